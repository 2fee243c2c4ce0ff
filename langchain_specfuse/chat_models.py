"""`ChatSpecFuse`: an ensemble of local models as one LangChain chat model.

This module translates between LangChain and the engine. It computes nothing itself. Parts, in this order:

- Batches run up to `max_concurrent` calls at once. Ctrl-C cancels them.
- Custom events report segments. They are sent from `on_llm_new_token`, which LangChain calls once per chunk.
- A model describes itself to traces (name, sampling), as a profile (sizes) and to `dumps` (all settings except keys,
  engines and local paths).
- Structured output binds a schema to the model, and parses the values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, Self, TypeVar, cast
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
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.output_parsers.base import BaseGenerationOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult, GenerationChunk, LLMResult
from langchain_core.runnables import (
    Runnable,
    RunnableConfig,
    RunnableLambda,
    RunnableMap,
    RunnablePassthrough,
    ensure_config,
)
from langchain_core.runnables.config import get_config_list
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, ConfigDict, Field, model_validator

from langchain_specfuse.errors import UnknownModelError, as_langchain
from langchain_specfuse.interrupts import in_batch, interruptible
from langchain_specfuse.messages import (
    PROVIDER,
    ChunkBuilder,
    SegmentChunk,
    ToolLike,
    in_order,
    json_schema_of,
    plain_options,
    schema_tool,
    to_choice,
    to_messages,
    to_tools,
    to_value,
    usage_metadata,
)
from specfuse_shared import (
    CallOptions,
    ConfigError,
    EnsembleConfig,
    Event,
    Message,
    SamplingParams,
    UnfinishedValueError,
)
from specfuse_shared.frameworks import (
    CLOSED,
    TRANSPORT_OPTIONS,
    Engine,
    Ensembles,
    EnsembleSettings,
    ToolUse,
    Whole,
    config_of,
    fold_async,
    members_of_model,
)

Configs = RunnableConfig | Sequence[RunnableConfig] | None


class EngineBatches(BaseChatModel):
    """A chat model whose batches run `max_concurrent` calls at once, or `max_concurrency` if that is lower."""

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answers to all inputs."""
        each = self._concurrent_configs(config, len(inputs), kwargs)
        batch = super().batch
        flag: Any = return_exceptions
        [answers] = interruptible(lambda: iter([batch(inputs, each, return_exceptions=flag, **kwargs)]))
        return answers

    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Index and answer of each input, in the order in which they are finished."""
        each = self._concurrent_configs(config, len(inputs), kwargs)
        flag: Any = return_exceptions
        completed: Callable[..., Iterator[tuple[int, Any]]] = super().batch_as_completed
        return interruptible(lambda: completed(inputs, each, return_exceptions=flag, **kwargs))

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answers to all inputs."""
        each = self._concurrent_configs(config, len(inputs), kwargs)
        return await super().abatch(inputs, each, return_exceptions=return_exceptions, **kwargs)

    def abatch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        """Index and answer of each input, in the order in which they are finished."""
        each = self._concurrent_configs(config, len(inputs), kwargs)
        flag: Any = return_exceptions
        answers: AsyncIterator[tuple[int, Any]]
        answers = super().abatch_as_completed(inputs, each, return_exceptions=flag, **kwargs)
        return answers

    def _concurrent_configs(self, config: Configs, count: int, options: Mapping[str, Any]) -> list[RunnableConfig]:
        limit = self._max_concurrent(options)
        each = get_config_list(config, count)
        return [{**one, "max_concurrency": min(limit, one.get("max_concurrency") or limit)} for one in each]

    def _max_concurrent(self, options: Mapping[str, Any]) -> int:
        """The engine's `max_concurrent`, for the model that a call names."""
        raise NotImplementedError


SEGMENT_EVENT = "specfuse_segment"
"""Name of the event. Its data is the segment's record, including the `text` that it added to the answer."""

Version = Literal["v1", "v2", "v3"]
Chunk = GenerationChunk | ChatGenerationChunk | None
Listeners = TypeVar("Listeners", CallbackManagerForLLMRun, AsyncCallbackManagerForLLMRun)


class _SegmentEvents(BaseCallbackHandler):
    """A handler that dispatches each segment as a custom event to the other handlers of a run."""

    run_inline = True

    def __init__(self, inner: CallbackManager) -> None:
        self._others = inner

    def on_llm_new_token(self, token: Any, *, chunk: Chunk = None, run_id: UUID, **kwargs: Any) -> None:
        for data in _segments(chunk):
            self._others.on_custom_event(SEGMENT_EVENT, data, run_id=run_id)


class _AsyncSegmentEvents(AsyncCallbackHandler):
    """`_SegmentEvents` on an event loop."""

    run_inline = True

    def __init__(self, inner: AsyncCallbackManager) -> None:
        self._others = inner

    async def on_llm_new_token(self, token: Any, *, chunk: Chunk = None, run_id: UUID, **kwargs: Any) -> None:
        for data in _segments(chunk):
            await self._others.on_custom_event(SEGMENT_EVENT, data, run_id=run_id)


_SEGMENT_HANDLERS = (_SegmentEvents, _AsyncSegmentEvents)


class SegmentEvents(BaseChatModel):
    """A chat model that dispatches a custom event for every segment of its answers, if asked to."""

    segment_events: bool = False
    """Dispatch a custom event "specfuse_segment" for every segment."""

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        return super().generate(messages, stop, self._add_segment_handler(callbacks, kwargs), **plain_options(kwargs))

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        listening = self._aadd_segment_handler(callbacks, kwargs)
        return await super().agenerate(messages, stop, listening, **plain_options(kwargs))

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        return super().stream(input, self._with_segment_events(config), stop=stop, **kwargs)

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        return super().astream(input, self._awith_segment_events(config), stop=stop, **kwargs)

    def stream_events(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, version: Version = "v2", **kwargs: Any
    ) -> Any:
        config = self._with_segment_events(config) if version == "v3" else config  # v1 and v2 call `stream`
        return super().stream_events(input, config, version=version, **kwargs)

    def astream_events(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, version: Version = "v2", **kwargs: Any
    ) -> Any:
        config = self._awith_segment_events(config) if version == "v3" else config
        return super().astream_events(input, config, version=version, **kwargs)

    def _chunk_callbacks(self, run: Listeners | None, options: Mapping[str, Any]) -> Listeners | None:
        """The callbacks that get the chunks of `invoke`; if streaming is disabled, only handlers that report segments.

        Other callbacks, such as LangGraph's, would show the chunks as a stream.
        """
        by_tools = self.disable_streaming == "tool_calling" and bool(options.get("tools"))
        by_call = "stream" in options and not options["stream"]
        off = self.disable_streaming is True or by_tools or by_call or getattr(self, "streaming", None) is False
        if run is None or not off:
            return run
        segment_handlers: list[BaseCallbackHandler] = [
            handler for handler in run.handlers if isinstance(handler, _SEGMENT_HANDLERS)
        ]
        return type(run)(
            run_id=run.run_id, handlers=segment_handlers, inheritable_handlers=[], parent_run_id=run.parent_run_id
        )

    def _with_segment_events(self, config: RunnableConfig | None) -> RunnableConfig:
        config = ensure_config(config)
        return {**config, "callbacks": self._add_segment_handler(config.get("callbacks"), config)}

    def _awith_segment_events(self, config: RunnableConfig | None) -> RunnableConfig:
        config = ensure_config(config)
        return {**config, "callbacks": self._aadd_segment_handler(config.get("callbacks"), config)}

    def _add_segment_handler(self, callbacks: Callbacks, run: Mapping[str, Any]) -> Callbacks:
        """The callbacks of a call, plus one that reports segments to them and to the model's own callbacks."""
        if not self.segment_events or _has_segment_handler(callbacks):
            return callbacks
        managers = CallbackManager.configure(
            callbacks, self.callbacks, inheritable_tags=run.get("tags"), inheritable_metadata=run.get("metadata")
        )
        return _with_handler(callbacks, _SegmentEvents(managers))

    def _aadd_segment_handler(self, callbacks: Callbacks, run: Mapping[str, Any]) -> Callbacks:
        if not self.segment_events or _has_segment_handler(callbacks):
            return callbacks
        managers = AsyncCallbackManager.configure(
            callbacks, self.callbacks, inheritable_tags=run.get("tags"), inheritable_metadata=run.get("metadata")
        )
        return _with_handler(callbacks, _AsyncSegmentEvents(managers))


def _has_segment_handler(callbacks: Callbacks) -> bool:
    """Whether a handler already reports segments. `stream` adds one, and calls `invoke` if streaming is disabled."""
    handlers = callbacks if isinstance(callbacks, list) else callbacks.handlers if callbacks is not None else []
    return any(isinstance(handler, _SEGMENT_HANDLERS) for handler in handlers)


def _with_handler(callbacks: Callbacks, handler: BaseCallbackHandler) -> Callbacks:
    if callbacks is None or isinstance(callbacks, list):
        return [*(callbacks or ()), handler]
    manager = callbacks.copy()
    manager.add_handler(handler, inherit=False)
    return manager


def _segments(chunk: Chunk) -> Iterator[dict[str, Any]]:
    if isinstance(chunk, SegmentChunk):
        yield chunk.segment


class InferredProfile(dict[str, Any]):
    """A profile that the model computed itself, rather than one that the user set."""


class DescribedModel(EnsembleSettings, BaseChatModel):
    """The part of the chat model that describes itself, to traces, profiles and `dumps`.

    `model_name` and `model` always return a name, as users of other chat models expect: the chosen one,
    else the name of the ensemble or of the server's model.
    """

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)  # a property cannot override a pydantic field
        return self._model_name() if name == "model_name" and attribute is None else attribute

    @property
    def model(self) -> str:
        """The name of the ensemble, or of a server's model."""
        return self._model_name()

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Content of a trace and of a cache key: name, sampling, and a digest of all other settings."""
        kwargs = json.dumps(self.to_json()["kwargs"], sort_keys=True, default=repr)
        return {**self._traced(), "settings": hashlib.sha256(kwargs.encode()).hexdigest()[:16]}

    def to_json(self) -> Any:
        """The model as LangChain's `dumps` writes and `loads` reads it: without keys, engines and local paths.

        `loads` needs `allowed_objects=[ChatSpecFuse]` and `valid_namespaces=["langchain_specfuse"]`. A name replaces
        each local path, and only the same process can map it back.
        """
        shown_kwargs = {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p}
        named = {} if self.base_url and self._chosen_model is None else {"model_name": self._model_name()}
        kwargs = {**self.model_dump(exclude_defaults=True), **shown_kwargs, **named}
        return {"lc": 1, "type": "constructor", "id": self.lc_id(), "kwargs": kwargs, "name": type(self).__name__}

    def _resolve_model_profile(self) -> ModelProfile:
        """The model's profile. `max_input_tokens` is the smallest context; it may be unknown before `load`."""
        limit = self._context_limit()
        profile = ModelProfile(
            **({} if limit is None else {"max_input_tokens": limit}),
            name=self._model_name(),
            max_output_tokens=self.max_tokens,
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            tool_calling=True,
            tool_choice=True,
            structured_output=True,
            reasoning_output=self._thinks(),
        )
        return cast("ModelProfile", InferredProfile(profile))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other settings; an inferred `profile` follows `max_tokens`."""
        copied = super().model_copy(update=update, deep=deep)
        if isinstance(copied.profile, InferredProfile) and "max_tokens" in (update or {}):
            copied.profile = cast("ModelProfile", InferredProfile(copied.profile, max_output_tokens=copied.max_tokens))
        return copied

    def load(self, on_progress: Any = None) -> Self:
        """Load the members now, or ask the server for its model. Afterwards `profile` has its context size.

        Raises `MemberLoadError`.
        """
        with as_langchain():
            super().load(on_progress)
        if isinstance(self.profile, InferredProfile):
            self.profile = self._resolve_model_profile()
        return self


Method = Literal["json_schema", "function_calling", "json_mode"]
Schema = dict[str, Any] | type | None
Parser = BaseOutputParser[Any] | BaseGenerationOutputParser[Any]
ModelAndParser = tuple[Runnable[LanguageModelInput, Any], Parser]
"""A model bound to a schema, and the parser of its output."""


def structured_output(
    model: ChatSpecFuse,
    schema: Schema,
    *,
    include_raw: bool,
    method: Method,
    strict: bool | None,
    **kwargs: Any,
) -> Runnable[LanguageModelInput, Any]:
    """The model bound to a schema, followed by the parser of its values."""
    if method not in ("json_schema", "function_calling", "json_mode"):
        raise ConfigError(f"method {method!r} is unknown: use json_schema, function_calling or json_mode")
    if schema is None and method != "json_mode":
        raise ConfigError(f'method "{method}" needs a schema; only "json_mode" goes without one')
    bind = _bind_tool_call if method == "function_calling" else _bind_response_format
    bound, parser = bind(model, schema, method, strict, **_trace_options(method, schema), **kwargs)
    return with_raw(bound, parser) if include_raw else bound | parser


def _bind_tool_call(
    model: ChatSpecFuse, schema: Schema, method: Method, strict: bool | None, **kwargs: Any
) -> ModelAndParser:
    tool = schema_tool(schema, strict)
    bound = model.bind_tools([tool], tool_choice=tool.name, whole=True if strict else CLOSED, **kwargs)
    if (of_class := _pydantic(schema)) is not None:
        return bound, PydanticToolsParser(tools=[of_class], first_tool_only=True)
    return bound, JsonOutputKeyToolsParser(key_name=tool.name, first_tool_only=True)


def _bind_response_format(
    model: ChatSpecFuse, schema: Schema, method: Method, strict: bool | None, **kwargs: Any
) -> ModelAndParser:
    response_format: dict[str, Any] = {"type": "json_object"}
    if schema is not None:
        spec = {"schema": json_schema_of(schema), "strict": bool(strict)}
        response_format = {"type": "json_schema", "json_schema": spec, "shown": method == "json_schema"}
    bound = model.bind(response_format=response_format, **kwargs)
    of_class = _pydantic(schema)
    return bound, JsonOutputParser() if of_class is None else PydanticOutputParser(pydantic_object=of_class)


def _pydantic(schema: Schema) -> type[BaseModel] | None:
    return schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None


def with_raw(model: Runnable[LanguageModelInput, Any], parser: Parser) -> Runnable[LanguageModelInput, Any]:
    """A runnable that returns {"raw": message, "parsed": value, "parsing_error": error or None}."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    read = parsed.with_fallbacks([failed], exception_key="parsing_error")
    chain: Runnable[Any, Any] = itemgetter("given") | RunnableMap(raw=model) | read
    expected = (UnfinishedValueError,)
    answered = chain.with_fallbacks([RunnableLambda(_cut_value)], exceptions_to_handle=expected, exception_key="cut")
    return RunnableMap(given=RunnablePassthrough()) | answered


def _cut_value(call: dict[str, Any]) -> dict[str, Any]:
    """The result of a value that `max_tokens` cut. It is not parsed, because a parser might accept the beginning."""
    cut: UnfinishedValueError = call["cut"]
    usage = None if cut.usage is None else usage_metadata(cut.usage)
    raw = AIMessage(cut.text, response_metadata={"finish_reason": "length"}, usage_metadata=usage)
    return {"raw": raw, "parsed": None, "parsing_error": cut}


def _trace_options(method: Method, schema: Schema) -> dict[str, Any]:
    """The schema in the form that LangSmith shows. The chat model removes it from the call."""
    if schema is None:
        return {}
    named = {"title": "output", **json_schema_of(schema)} if isinstance(schema, Mapping) else schema
    return {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": convert_to_openai_tool(named)}}


_TRANSPORT = TRANSPORT_OPTIONS | {"api_key", "base_url", "max_retries"}
"""Options of an HTTP client, including LangChain's standard parameters. A call ignores all but `extra_headers`."""
_CALL_OPTIONS = (
    *("tools", "tool_choice", "strict", "parallel_tool_calls", "response_format", "grammar", "timeout", "whole"),
    *("model", "model_name", "stream", *sorted(_TRANSPORT)),
)
"""Options of a call besides sampling. LangChain itself reads `stream`."""


_QUESTION = Message("user", "Why?")
"""The user turn that is added to count system messages alone. Its own tokens are subtracted."""


@dataclass(frozen=True, slots=True)
class _Request:
    """One call: the engine, its arguments, and the builder of chunks from its events."""

    engine: Engine
    messages: list[Message]
    params: SamplingParams
    answer: ChunkBuilder
    options: CallOptions


class ChatSpecFuse(DescribedModel, SegmentEvents, EngineBatches):
    """Several local models answer together, segment by segment.

        model = ChatSpecFuse(members=["HuggingFaceTB/SmolLM2-135M-Instruct", "google/gemma-3-270m-it"])
        for chunk in model.stream("How does a vaccine work?", max_tokens=64):
            ...

    In the chunk of a segment, `additional_kwargs["specfuse_segments"]` has the member that wrote it, each member's
    score and the position in the answer. The last chunk is empty and carries `usage_metadata` (tokens of the reference
    member, and all reasoning) and, in `response_metadata["specfuse"]`, the record of the answer. Every call takes the
    fields of `SamplingParams` (`stop`, `max_tokens`, `temperature`, `seed`, `grammar`, …), `timeout`, `stream`, `model`
    (another ensemble), `tools`, `tool_choice`, `parallel_tool_calls`, `response_format` and `whole` (an answer that
    `max_tokens` cuts raises an error).

    `ChatSpecFuse(base_url="http://127.0.0.1:8000")` uses a server (`specfuse-llm serve`) instead, with the same chunks
    and records. `model` is then one of the server's models.

    A member's reasoning (`MemberConfig(thinking=True)`) precedes the answer, in reasoning blocks (`content_blocks`) and
    in `additional_kwargs["reasoning_content"]`. It is not part of the text.

    Tool calls and structured values are drafted under a grammar and fit their schema. A call that `max_tokens` cut is
    in `invalid_tool_calls`, with the finish reason "length". A structured value that was cut is closed, with a
    `ClosedValueWarning`, if brackets and quotes complete it. Otherwise, and always with `strict=True`, it raises
    `UnfinishedValueError`. Images and audio from the user raise `RequestError`. Each error of
    `langchain_specfuse.errors` is an error of the engine and of LangChain.
    """

    model_config = ConfigDict(populate_by_name=True)

    ensembles: Ensembles = Field(default_factory=dict)
    """Other ensembles by name, in the form of `members` or `config`. A call selects one with `model="name"`."""
    model_name: str | None = Field(default=None, alias="model")
    """The default ensemble, instead of `members`: "demo" or one of `ensembles`. With `base_url`, one of the server's
    models. Without `ensembles` and `base_url`, a model or a list of models, as in `members`."""
    streaming: bool | None = None
    """False: `stream` yields one chunk, and callbacks get no chunks of `invoke`. Otherwise `stream` yields every
    segment as a chunk, and callbacks also get the chunks of `invoke`."""

    def __init__(self, *args: Any, **values: Any) -> None:
        with as_langchain():
            super().__init__(*args, **values)

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = {key: value for key, value in values.items() if key in cls.model_fields or key not in _TRANSPORT}
        if isinstance(values.get("profile"), InferredProfile):  # the profile of a model that this one copies
            del values["profile"]
        name = values.get("model", values.get("model_name"))
        if name is None or any(values.get(key) is not None for key in ("members", "config", "engine", "base_url")):
            return values
        ensembles = values.get("ensembles") or {}
        if name == "demo" and name not in ensembles:
            return {**values, "members": "demo"}
        if isinstance(name, list | tuple) or not ensembles:
            return members_of_model(values, name)
        return {**values, "config": _ensemble_named(name, ensembles)}

    @property
    def _llm_type(self) -> str:
        return "specfuse-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        name = _model_in(kwargs) or self._model_name()
        return LangSmithParams(**{**params, "ls_provider": PROVIDER, "ls_model_name": name})

    # ── answers ──────────────────────────────────────────────────────────────────────────────────

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, self._chunk_callbacks(run_manager, kwargs), **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        """With a `run_manager`, this method reports each chunk to the callbacks; without one, LangChain does."""
        with as_langchain():
            request = self._request(messages, stop, kwargs)
            events = request.engine.stream(request.messages, request.params, **request.options)
            stream = cast("Generator[Event]", events)
            with closing(stream), in_batch(stream):
                for event in events:
                    self._observe(event)
                    for chunk in request.answer.chunks(event):
                        if run_manager is not None:
                            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        listening = self._chunk_callbacks(run_manager, kwargs)
        return await agenerate_from_stream(self._astream(messages, stop, listening, **kwargs))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with as_langchain():
            request = self._request(messages, stop, kwargs)
            events = request.engine.astream(request.messages, request.params, **request.options)
            async with aclosing(cast("AsyncGenerator[Event]", events)):
                async for event in events:
                    self._observe(event)
                    for chunk in await fold_async(request.answer.chunks, event):
                        if run_manager is not None:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk

    # ── tools and structure ──────────────────────────────────────────────────────────────────────

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A model that may call tools.

        Args:
            tools: Functions, classes, `BaseTool`s or dictionaries.
            tool_choice: None, False or "auto" (the ensemble decides), "any", "required" or True (a call is forced),
                "none", a tool's name, or OpenAI's dictionary.
            strict: Refuse schemas that no grammar can enforce.
            parallel_tool_calls: Allow several calls in one answer.
            **kwargs: Further options of each call.

        Returns:
            A runnable that returns an `AIMessage`.

        Example:
            ```python
            from langchain_specfuse import ChatSpecFuse


            def weather(city: str) -> str:
                '''The weather of a city.'''
                return f"sunny in {city}"


            model = ChatSpecFuse(members="demo", max_tokens=60).bind_tools([weather], tool_choice="any")
            print(model.invoke("How is the weather in Oslo?").tool_calls)
            ```
        """
        with as_langchain():
            bound = to_tools(tools, strict)
            options: dict[str, Any] = {"tool_choice": to_choice(tool_choice, bound)}
        if parallel_tool_calls is not None:
            options["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=[tool.to_dict() for tool in bound], **options, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A model that answers with values of a schema, enforced by a grammar with every method.

        Args:
            schema: A Pydantic class, a TypedDict or a JSON schema; None for any object, with "json_mode".
            include_raw: Return {"raw": message, "parsed": value, "parsing_error": error}.
            method: "json_schema" describes the schema to the members, "function_calling" makes it a tool that must be
                called, "json_mode" does not describe it.
            strict: Refuse schemas that cannot be enforced.
            **kwargs: Further options of each call.

        Returns:
            A runnable that returns a value.

        Raises:
            UnfinishedValueError: When called, if `max_tokens` cut the value, unless brackets and quotes complete it and
                `strict` is not set. With `include_raw` it is returned as the parsing error.

        Example:
            ```python
            from langchain_specfuse import ChatSpecFuse
            from pydantic import BaseModel


            class Capital(BaseModel):
                city: str


            model = ChatSpecFuse(members="demo", max_tokens=60).with_structured_output(Capital)
            print(model.invoke("The capital of France?"))
            ```
        """
        with as_langchain():
            return structured_output(self, schema, include_raw=include_raw, method=method, strict=strict, **kwargs)

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of the reference member, or of `custom_get_token_ids`. Loads a tokenizer and no weights.

        Args:
            text: The text to encode.

        Returns:
            The ids.

        Example:
            ```python
            from langchain_specfuse import ChatSpecFuse

            print(len(ChatSpecFuse(members="demo").get_token_ids("The tide rises.")))
            ```
        """
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        with as_langchain():
            return self._resolve_engine().tokenize(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[ToolLike] | None = None) -> int:
        """Tokens of the whole prompt in the reference member's chat template.

        System messages without other messages count as what they add to a conversation, because `trim_messages` counts
        them separately. The number is negative if they replace a longer default of the template. With
        `custom_get_token_ids`, only the texts of the messages are counted.

        Args:
            messages: The conversation.
            tools: Tools to offer; their descriptions count.

        Returns:
            The number of tokens.

        Example:
            ```python
            from langchain_core.messages import HumanMessage
            from langchain_specfuse import ChatSpecFuse

            print(ChatSpecFuse(members="demo").get_num_tokens_from_messages([HumanMessage("Hello")]))
            ```
        """
        if not messages:
            return 0
        if self.custom_get_token_ids is not None:
            return sum(len(self.custom_get_token_ids(message.text)) for message in messages)
        with as_langchain():
            turns, offered, engine = to_messages(in_order(messages)), to_tools(tools or ()), self._resolve_engine()
            if any(turn.role != "system" for turn in turns):
                return engine.count_tokens(turns, offered)
            return engine.count_tokens([*turns, _QUESTION], offered) - engine.count_tokens([_QUESTION])

    # ── one call ─────────────────────────────────────────────────────────────────────────────────

    def _request(self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> _Request:
        """Translate a call. A setting that does not exist or cannot work raises `ConfigError`."""
        overrides = {**options, "stop": stop}
        defaults: dict[str, Any] = {"parallel_tool_calls": self.parallel_tool_calls, "timeout": self.timeout}
        per_call = {key: overrides.pop(key, None) for key in _CALL_OPTIONS}
        requested: dict[str, Any] = {
            key: defaults.get(key) if value is None else value for key, value in per_call.items()
        }
        tools = to_tools(requested["tools"] or (), requested["strict"])
        choice = to_choice(requested["tool_choice"], tools)
        grammar, spec = to_value(requested["response_format"], requested["grammar"])
        params, name = self._sampling({**overrides, "grammar": grammar}), _model_in(requested)
        is_value = requested["response_format"] is not None and grammar is not None
        whole: Whole = "all" if requested["whole"] else "value" if is_value else "none"
        may_close = requested["whole"] == CLOSED or (whole == "value" and grammar is not None and not grammar.strict)
        reader = ToolUse(tools, choice, otherwise=params.grammar).reader()
        return _Request(
            engine=self._resolve_engine(name, requested["extra_headers"]),
            messages=[*to_messages(messages), *spec],
            params=params,
            answer=ChunkBuilder(
                lambda: name or self._model_name(), self.ledger, reader=reader, whole=whole, may_close=may_close
            ),
            options=CallOptions(
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=requested["parallel_tool_calls"],
                timeout=requested["timeout"],
            ),
        )

    def _ensemble(self, name: str | None = None) -> EnsembleConfig:
        """The ensemble called `name`; without a name, this model's."""
        name, described = name or self._chosen_model, super()._ensemble()
        return described if name in (None, "+".join(described.names)) else _ensemble_named(name, self.ensembles)

    def _model_name(self) -> str:
        return self._chosen_model or super()._model_name()

    def _max_concurrent(self, options: Mapping[str, Any]) -> int:
        try:
            return self._concurrency_of(_model_in(options))
        except ConfigError:  # each input raises it
            return 1


def _model_in(options: Mapping[str, Any]) -> str | None:
    """The ensemble that a call names, if any."""
    return options.get("model") or options.get("model_name")


def _ensemble_named(name: str, ensembles: Mapping[str, Any]) -> EnsembleConfig:
    if name in ensembles:
        return config_of(ensembles[name])
    if name == "demo":
        return config_of("demo")
    raise UnknownModelError(f"model {name!r} is not an ensemble here: use one of {['demo', *ensembles]}, or add it")
