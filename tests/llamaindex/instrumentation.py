"""Helpers of the LlamaIndex tests: the framework's events about a call, and every endpoint by its name."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index_instrumentation.span_handlers import NullSpanHandler
from pydantic import Field

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared.errors import SpecFuseError

SYNC_ENDPOINTS = ("complete", "stream_complete", "chat", "stream_chat")
ENDPOINTS = (*SYNC_ENDPOINTS, *(f"a{name}" for name in SYNC_ENDPOINTS))
PACKAGES = ("llama_index", "llamaindex_specfuse", "specfuse_shared")
"""Packages that can raise an error of a call; the innermost frame of them is its origin."""


class Listener(BaseEventHandler):
    """Records all events of LlamaIndex's dispatcher while a test runs."""

    events: list[BaseEvent] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    def of(self, name: str) -> list[Any]:
        return [event for event in self.events if event.class_name() == name]

    def calls(self) -> list[str]:
        """The events of calls of an LLM, in order, without the events of single responses."""
        names = [event.class_name() for event in self.events]
        return [name for name in names if name.startswith("LLM") and "InProgress" not in name]

    def prompts(self) -> list[str]:
        """The prompts of all chats."""
        return ["\n".join(map(str, event.messages)) for event in self.of("LLMChatStartEvent")]


class Failures(NullSpanHandler):
    """Records the exceptions of all spans of LlamaIndex."""

    errors: list[BaseException | None] = Field(default_factory=list)

    def span_drop(self, *args: Any, err: BaseException | None = None, **kwargs: Any) -> None:
        self.errors.append(err)


@contextmanager
def readable_or_refused(listener: Listener, text: str) -> Iterator[None]:
    """The LLM gets `text` and answers; LlamaIndex parses the answer, or it or one of its libraries raises an error.

    Both are allowed, since they depend on the members: `docs/llamaindex.md` lists what small ones often cannot write.
    """
    try:
        with answered(listener, text):
            yield
    except Exception as error:
        files = (Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
        inside = [part for file in files for part in file.parts if part in PACKAGES]
        if isinstance(error, SpecFuseError) or inside[-1:] != ["llama_index"]:
            raise


@contextmanager
def answered(listener: Listener, text: str) -> Iterator[None]:
    """Assert that the words were in a prompt, and that every prompt has an answer."""
    try:
        yield
    finally:
        assert any(text in prompt for prompt in listener.prompts())
        ends = listener.of("LLMChatEndEvent")
        assert len(ends) == len(listener.prompts())
        raws = [end.response.raw for end in ends if isinstance(end.response.raw, dict)]
        assert raws
        assert all(raw["usage"]["completion_tokens"] > 0 and raw["finish_reason"] for raw in raws)


class Callbacks:
    """The counts of LlamaIndex's older callbacks."""

    def __init__(self) -> None:
        self.debug = LlamaDebugHandler(print_trace_on_end=False)
        self.counter = TokenCountingHandler(tokenizer=str.split)
        self.manager = CallbackManager([self.debug, self.counter])

    def calls(self) -> list[list[Any]]:
        """The start and the end of each call of an LLM."""
        return self.debug.get_event_pairs(CBEventType.LLM)


async def ask(llm: SpecFuseLLM, endpoint: str, question: str, **options: Any) -> list[Any]:
    """The responses of one of the eight endpoints; a list of one if it does not stream."""
    answer = getattr(llm, endpoint)([ChatMessage(question)] if "chat" in endpoint else question, **options)
    if endpoint.startswith("a"):
        answer = await answer
    if "stream" not in endpoint:
        return [answer]
    return [response async for response in answer] if endpoint.startswith("a") else list(answer)


def text_of(response: ChatResponse | CompletionResponse) -> str:
    return response.text if isinstance(response, CompletionResponse) else response.message.content or ""
