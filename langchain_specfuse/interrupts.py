"""Ctrl-C in a batch: the answers that run are stopped, and the threads that wait for them end at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from specfuse_shared.errors import EngineClosedError

T = TypeVar("T")


class Closable(Protocol):
    """A stream of events."""

    def close(self) -> None: ...


class Streams:
    """The streams of one batch, which are closed together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Closable] = set()
        self._closed = False

    def add(self, stream: Closable) -> None:
        """Raises `EngineClosedError` where the batch was interrupted already."""
        with self._lock:
            if not self._closed:
                self._open.add(stream)
                return
        stream.close()
        raise EngineClosedError("the batch was interrupted")

    def discard(self, stream: Closable) -> None:
        with self._lock:
            self._open.discard(stream)

    def close(self) -> None:
        """Stop the answers that run; those that have not begun fail."""
        with self._lock:
            self._closed = True
            streams, self._open = self._open, set()
        for stream in streams:
            stream.close()


_streams: ContextVar[Streams | None] = ContextVar("specfuse_batch", default=None)


@contextmanager
def in_batch(stream: Closable) -> Iterator[None]:
    """While this lasts, the stream is one of the batch that runs in this context, if there is one."""
    batch = _streams.get()
    if batch is None:
        yield
        return
    batch.add(stream)
    try:
        yield
    finally:
        batch.discard(stream)


class _End(Generic[T]):
    """How an iterator ended."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def interruptible(items: Callable[[], Iterator[T]]) -> Iterator[T]:
    """The results of `items`, computed in another thread.

    LangChain's executors wait for all their threads before they let an interrupt pass, so the interrupted thread must
    not be one of them.
    """
    queue, batch = SimpleQueue[T | _End[T]](), Streams()

    def run() -> None:
        _streams.set(batch)
        try:
            for item in items():
                queue.put(item)
        except BaseException as error:
            queue.put(_End(error))
        else:
            queue.put(_End())

    thread = threading.Thread(target=copy_context().run, args=(run,), name="specfuse-batch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        batch.close()
        thread.join()
