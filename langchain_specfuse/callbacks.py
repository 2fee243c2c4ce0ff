"""Custom events for verified segments, whichever way LangChain runs the model.

Every way tells the callbacks of a run each chunk once, in `on_llm_new_token`, so that is where the events come from.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Literal, TypeVar
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackHandler,
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    BaseCallbackHandler,
    CallbackManager,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig, ensure_config

from langchain_specfuse.answers import SegmentChunk
from langchain_specfuse.tools import plain_options

SEGMENT_EVENT = "specfuse_segment"
"""Name of the event; its data is the segment's record and the `text` that it added to the answer."""

Version = Literal["v1", "v2", "v3"]
Chunk = GenerationChunk | ChatGenerationChunk | None
Listeners = TypeVar("Listeners", CallbackManagerForLLMRun, AsyncCallbackManagerForLLMRun)


class _SegmentEvents(BaseCallbackHandler):
    """Tells the other handlers of a run about its segments."""

    run_inline = True

    def __init__(self, others: CallbackManager) -> None:
        self._others = others

    def on_llm_new_token(self, token: Any, *, chunk: Chunk = None, run_id: UUID, **kwargs: Any) -> None:
        for data in _segments(chunk):
            self._others.on_custom_event(SEGMENT_EVENT, data, run_id=run_id)


class _AsyncSegmentEvents(AsyncCallbackHandler):
    """The same on an event loop."""

    run_inline = True

    def __init__(self, others: AsyncCallbackManager) -> None:
        self._others = others

    async def on_llm_new_token(self, token: Any, *, chunk: Chunk = None, run_id: UUID, **kwargs: Any) -> None:
        for data in _segments(chunk):
            await self._others.on_custom_event(SEGMENT_EVENT, data, run_id=run_id)


_OWN = (_SegmentEvents, _AsyncSegmentEvents)


class SegmentEvents(BaseChatModel):
    """A chat model that dispatches a custom event for every segment of its answers, if asked to."""

    segment_events: bool = False
    """Dispatch a custom event "specfuse_segment" for every verified segment."""

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        return super().generate(messages, stop, self._listening(callbacks, kwargs), **plain_options(kwargs))

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        heard = self._alistening(callbacks, kwargs)
        return await super().agenerate(messages, stop, heard, **plain_options(kwargs))

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        return super().stream(input, self._told(config), stop=stop, **kwargs)

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        return super().astream(input, self._atold(config), stop=stop, **kwargs)

    def stream_events(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, version: Version = "v2", **kwargs: Any
    ) -> Any:
        config = self._told(config) if version == "v3" else config  # the others ask `stream`
        return super().stream_events(input, config, version=version, **kwargs)

    def astream_events(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, version: Version = "v2", **kwargs: Any
    ) -> Any:
        config = self._atold(config) if version == "v3" else config
        return super().astream_events(input, config, version=version, **kwargs)

    def _heard(self, run: Listeners | None, options: Mapping[str, Any]) -> Listeners | None:
        """Who hears of the chunks of a call that is no stream: where streams are switched off, only `segment_events`.

        LangGraph, for one, would show them as a stream.
        """
        by_tools = self.disable_streaming == "tool_calling" and bool(options.get("tools"))
        unasked = "stream" in options and not options["stream"]
        off = self.disable_streaming is True or by_tools or unasked or getattr(self, "streaming", None) is False
        if run is None or not off:
            return run
        own: list[BaseCallbackHandler] = [handler for handler in run.handlers if isinstance(handler, _OWN)]
        return type(run)(run_id=run.run_id, handlers=own, inheritable_handlers=[], parent_run_id=run.parent_run_id)

    def _told(self, config: RunnableConfig | None) -> RunnableConfig:
        config = ensure_config(config)
        return {**config, "callbacks": self._listening(config.get("callbacks"), config)}

    def _atold(self, config: RunnableConfig | None) -> RunnableConfig:
        config = ensure_config(config)
        return {**config, "callbacks": self._alistening(config.get("callbacks"), config)}

    def _listening(self, callbacks: Callbacks, run: Mapping[str, Any]) -> Callbacks:
        """The callbacks of a call, with one more that tells them and the model's own ones about segments."""
        if not self.segment_events or _listens(callbacks):
            return callbacks
        others = CallbackManager.configure(
            callbacks, self.callbacks, inheritable_tags=run.get("tags"), inheritable_metadata=run.get("metadata")
        )
        return _joined(callbacks, _SegmentEvents(others))

    def _alistening(self, callbacks: Callbacks, run: Mapping[str, Any]) -> Callbacks:
        if not self.segment_events or _listens(callbacks):
            return callbacks
        others = AsyncCallbackManager.configure(
            callbacks, self.callbacks, inheritable_tags=run.get("tags"), inheritable_metadata=run.get("metadata")
        )
        return _joined(callbacks, _AsyncSegmentEvents(others))


def _listens(callbacks: Callbacks) -> bool:
    """Whether somebody tells of segments already: a stream that is switched off is made of a call."""
    handlers = callbacks if isinstance(callbacks, list) else callbacks.handlers if callbacks is not None else []
    return any(isinstance(handler, _OWN) for handler in handlers)


def _joined(callbacks: Callbacks, handler: BaseCallbackHandler) -> Callbacks:
    if callbacks is None or isinstance(callbacks, list):
        return [*(callbacks or ()), handler]
    manager = callbacks.copy()
    manager.add_handler(handler, inherit=False)
    return manager


def _segments(chunk: Chunk) -> Iterator[dict[str, Any]]:
    if isinstance(chunk, SegmentChunk):
        yield chunk.segment
