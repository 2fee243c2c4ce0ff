"""Streams that stop the compute when they are closed.

LlamaIndex wraps a stream to report its end, and when the wrapper is closed early, it reports the exception that closes
it and leaves the stream itself to the garbage collector. A handler that keeps the exception keeps the stream, and the
members would go on to `max_tokens` for nobody.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import aclosing, closing
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

Source = TypeVar("Source", bound=Generator[Any, None, None] | AsyncGenerator[Any, None])

_sources: ContextVar[list[Any] | None] = ContextVar("specfuse_sources", default=None)


def source(stream: Source) -> Source:
    """Mark what computes, in the body of an endpoint below; elsewhere it changes nothing."""
    if (sources := _sources.get()) is not None:
        sources.append(stream)
    return stream


def closes_source(endpoint: Callable[..., Any]) -> Callable[..., Generator[Any, None, None]]:
    """A streaming endpoint whose stream closes its source with itself."""

    @wraps(endpoint)
    def call(*args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        sources: list[Any] = []
        token = _sources.set(sources)
        try:
            stream = endpoint(*args, **kwargs)
        finally:
            _sources.reset(token)

        def responses() -> Generator[Any, None, None]:
            with closing(sources[0]), closing(stream):
                yield from stream

        return responses()

    return call


def acloses_source(
    endpoint: Callable[..., Coroutine[Any, Any, Any]],
) -> Callable[..., Coroutine[Any, Any, AsyncGenerator[Any, None]]]:
    """`closes_source` for an asynchronous endpoint."""

    @wraps(endpoint)
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        sources: list[Any] = []
        token = _sources.set(sources)
        try:
            stream = await endpoint(*args, **kwargs)
        finally:
            _sources.reset(token)

        async def responses() -> AsyncGenerator[Any, None]:
            async with aclosing(sources[0]), aclosing(stream):
                async for response in stream:
                    yield response

        return responses()

    return call
