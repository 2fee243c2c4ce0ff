"""Many requests at once of one engine, at most so many in flight: neither memory nor the queue grows with the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from specfuse_shared.serving.engine import EnsembleEngine

T = TypeVar("T")
R = TypeVar("R")
_MOST_THREADS = 64


def asked_together(engine: EnsembleEngine, todo: Iterator[T], ask: Callable[[T], R]) -> Iterator[tuple[T, Future[R]]]:
    """Each item with its outcome, as they come. The engine is closed in the end, whatever happens."""
    threads = min(engine.config.max_concurrent, _MOST_THREADS)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="specfuse-comparing")
    running: dict[Future[R], T] = {}
    try:
        while True:
            while len(running) < 2 * threads and (following := next(todo, None)) is not None:
                running[pool.submit(ask, following)] = following
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done
    finally:
        engine.close()  # ends what still runs, so that no thread is waited for
        pool.shutdown(wait=True, cancel_futures=True)
