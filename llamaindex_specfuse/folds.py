"""The events of an answer as its pieces, streamed and at once, in this thread and on an event loop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from typing import cast

from llamaindex_specfuse.answers import AnswerFold, AnswerStep
from specfuse_shared.errors import UnfinishedValueError, ValueTooLongError
from specfuse_shared.events import Event

logger = logging.getLogger(__name__)


def fold(answer: AnswerFold, events: Iterator[Event]) -> Generator[AnswerStep, None, None]:
    with seen(), closing(cast(Generator[Event], events)):
        yield from filter(None, map(answer.piece, events))


async def afold(answer: AnswerFold, events: AsyncIterator[Event]) -> AsyncGenerator[AnswerStep, None]:
    with seen():
        async with aclosing(cast(AsyncGenerator[Event], events)):
            async for event in events:
                if piece := answer.piece(event):
                    yield piece


@contextmanager
def seen() -> Iterator[None]:
    """LlamaIndex may go on without a value that found no room, and hides what it logs itself."""
    try:
        yield
    except (UnfinishedValueError, ValueTooLongError) as error:
        logger.warning("a structured answer failed: %s", error)
        raise


def last_of(pieces: Iterator[AnswerStep]) -> AnswerStep:
    return deque(pieces, maxlen=1).pop()


async def alast_of(pieces: AsyncGenerator[AnswerStep, None]) -> AnswerStep:
    async with aclosing(pieces):
        return [piece async for piece in pieces][-1]
