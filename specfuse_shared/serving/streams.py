"""The events of one answer, as whoever asked for it takes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from specfuse_shared.events import Event, FinishEvent
from specfuse_shared.results import EnsembleResult

_SECONDS_OF_A_WAIT = 0.2 if sys.platform == "win32" and sys.version_info < (3, 14) else None
"""There Ctrl-C is seen between two waits, but not within one (cpython #74157)."""


class EventStream(Iterator[Event]):
    """The events of one answer; stops it when it is closed or no longer referenced, even if never iterated.

    `engine`: kept until the answer is over.
    """

    def __init__(self, items: SimpleQueue[Event | Exception], cancel: Callable[[], None], engine: object) -> None:
        self._items = items
        self._cancel = cancel
        self._engine: object | None = engine
        self._over = False

    def __next__(self) -> Event:
        if self._over:
            raise StopIteration
        try:
            item = self._next_item()
        except BaseException:  # Ctrl-C while waiting
            self.close()
            raise
        if isinstance(item, Exception):
            self._over, self._engine = True, None
            raise item
        if isinstance(item, FinishEvent):
            self._over, self._engine = True, None
        return item

    def _next_item(self) -> Event | Exception:
        while _SECONDS_OF_A_WAIT is not None:
            with suppress(Empty):
                return self._items.get(timeout=_SECONDS_OF_A_WAIT)
        return self._items.get()

    def close(self) -> None:
        """Stop the answer and free its caches."""
        if not self._over:
            self._over, self._engine = True, None
            self._cancel()

    def __del__(self) -> None:
        self.close()


def result_of(events: Iterator[Event]) -> EnsembleResult:
    """The fold of a stream."""
    for event in events:
        if isinstance(event, FinishEvent):
            return event.result
    raise AssertionError("a stream ends with a FinishEvent")


def results_of(starts: Sequence[Callable[[], Iterator[Event]]], return_exceptions: bool) -> list[Any]:
    """Start all streams, then fold each. The first failure is raised once all have ended, or each is in its place."""

    def outcome(step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:
            return error

    begun = [outcome(start) for start in starts]
    ended = [e if isinstance(e, Exception) else outcome(partial(result_of, e)) for e in begun]
    failures = [e for e in ended if isinstance(e, Exception)]
    if failures and not return_exceptions:
        raise failures[0]
    return ended
