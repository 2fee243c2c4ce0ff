"""Places for requests. One is taken before a request is read, so that refusing one costs nothing."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError

from specfuse_shared.errors import EngineBusyError, RequestTimeoutError
from specfuse_shared.settings.config import EnsembleConfig


class Places:
    """Who may run, wait, or get ready to wait: `max_concurrent` and `max_queue` together.

    Every method may be called from any thread.
    """

    def __init__(self, config: EnsembleConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._free = config.max_concurrent + config.max_queue
        self._asking = deque[Future[None]]()
        self._closed: Exception | None = None

    def take(self, seconds: float | None = None) -> None:
        """Take a place; `leave` gives it back. If all are taken, wait for one, or raise `EngineBusyError`.

        Raises `RequestTimeoutError` after so many seconds.
        """
        place = self._ask()
        try:
            place.result(seconds)
        except TimeoutError:
            self._give_up(place)
            raise _timed_out() from None
        except BaseException:  # Ctrl-C while waiting
            self._give_up(place)
            raise

    async def atake(self, seconds: float | None = None) -> None:
        """`take` on an event loop."""
        place = self._ask()
        try:
            await asyncio.wait_for(asyncio.wrap_future(place), seconds)
        except TimeoutError:
            self._give_up(place)
            raise _timed_out() from None
        except BaseException:
            self._give_up(place)
            raise

    def leave(self) -> None:
        """The request is over, or was never submitted."""
        with self._lock:
            while self._asking:
                try:
                    self._asking.popleft().set_result(None)
                    return
                except InvalidStateError:  # it gave up meanwhile
                    continue
            self._free += 1

    def close(self, error: Exception) -> None:
        """Refuse everybody, also those who wait."""
        with self._lock:
            self._closed = error
            asking, self._asking = list(self._asking), deque()
        for place in asking:
            if place.set_running_or_notify_cancel():
                place.set_exception(error)

    def check(self) -> None:
        """Raises `EngineBusyError` where `take` would."""
        if self._free <= 0 and self._config.when_busy == "raise":
            raise EngineBusyError(
                f"as many requests run and wait as may (max_concurrent={self._config.max_concurrent}, "
                f"max_queue={self._config.max_queue}): try again later, or set when_busy='wait'"
            )

    def _ask(self) -> Future[None]:
        place = Future[None]()
        with self._lock:
            if self._closed is not None:
                raise self._closed
            self.check()
            if self._free > 0:
                self._free -= 1
                place.set_result(None)
            else:
                self._asking.append(place)
        return place

    def _give_up(self, place: Future[None]) -> None:
        if not place.cancel() and place.exception() is None:
            self.leave()


def _timed_out() -> RequestTimeoutError:
    return RequestTimeoutError("the timeout passed while the request waited for a place", text="")
