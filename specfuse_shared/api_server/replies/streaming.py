"""The concurrent choices of a request as one stream. A disconnected client stops the computation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Send

from specfuse_shared.api_server.access.clients import Client
from specfuse_shared.api_server.replies.answers import ChoicePiece, ChoiceReader, Folded
from specfuse_shared.api_server.replies.formats import Format, usage_of
from specfuse_shared.api_server.requests.calls import Call, RequestedChoice
from specfuse_shared.errors import SpecFuseError
from specfuse_shared.events import Event
from specfuse_shared.serving.calls import CallOptions

T = TypeVar("T")
Pieces = AsyncGenerator[tuple[ChoiceReader, ChoicePiece], None]


async def run_choices(call: Call, answers: Sequence[ChoiceReader], client: Client) -> Pieces:
    """The pieces of all answers as they arrive. Closing it, or the first error, stops all answers."""
    queue: asyncio.Queue[tuple[ChoiceReader, ChoicePiece] | Exception | None] = asyncio.Queue()

    async def run(answer: ChoiceReader, choice: RequestedChoice) -> None:
        try:
            async with client.answer(call.options.get("timeout")) as remaining:
                options = CallOptions(**{**call.options, "timeout": remaining})
                events = call.model.engine.astream(choice.messages, choice.params, **options)
                async with aclosing(cast(AsyncGenerator[Event], events)):
                    async for piece in answer.pieces(events):
                        queue.put_nowait((answer, piece))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(run(*each)) for each in zip(answers, call.choices, strict=True)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                item[1].specfuse |= await item[0].report()
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def fold(pieces: Pieces, answers: Sequence[ChoiceReader]) -> list[Folded]:
    """Whole choices, in the answers' order."""
    folded = [Folded() for _ in answers]
    async with aclosing(pieces):
        async for answer, piece in pieces:
            folded[answer.index].add(piece)
    return folded


@dataclass(slots=True)
class ChoiceStream:
    """Choices as server-sent events. `logged`: receives token counts for the log."""

    pieces: Pieces
    answers: Sequence[ChoiceReader]
    form: Format
    logged: dict[str, Any]

    async def lines(self, first: tuple[ChoiceReader, ChoicePiece]) -> AsyncGenerator[bytes, None]:
        """The lines of every piece, then of the end or of the error."""
        async with aclosing(self.pieces):
            for line in self.form.lines(*first):
                yield line
            try:
                async for answer, piece in self.pieces:
                    for line in self.form.lines(answer, piece):
                        yield line
            except SpecFuseError as error:
                yield self.form.failure(error)
                return
            finally:
                self.logged |= usage_of(self.answers)
            for line in self.form.end(self.answers):
                yield line


class EventStreamResponse(StreamingResponse):
    """Server-sent events. Their source is always closed with the response."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncGenerator[bytes, None]) -> None:
        super().__init__(content, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._source = content

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._source):
            await super().stream_response(send)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects. Raises `ClientDisconnect`."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
