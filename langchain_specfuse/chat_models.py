"""`ChatSpecFuse`: an ensemble of local models as one LangChain chat model. It translates; the engine answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, Literal, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, Field, model_validator

from langchain_specfuse.answers import PROVIDER, ChunkBuilder
from langchain_specfuse.batching import EngineBatches
from langchain_specfuse.callbacks import SegmentEvents
from langchain_specfuse.errors import UnknownModelError, as_langchain
from langchain_specfuse.identity import DescribedModel, InferredProfile
from langchain_specfuse.interrupts import belonging
from langchain_specfuse.messages import in_order, to_messages
from langchain_specfuse.structured import structured_output
from langchain_specfuse.tools import ToolLike, to_choice, to_tools, to_value
from specfuse_shared import CallOptions, ConfigError, EnsembleConfig, Event, Message, SamplingParams
from specfuse_shared.frameworks import (
    CLOSED,
    TRANSPORT_OPTIONS,
    Engine,
    Ensembles,
    ToolUse,
    Whole,
    config_of,
    members_of_model,
)

_TRANSPORT = TRANSPORT_OPTIONS | {"api_key", "base_url", "max_retries"}
"""LangChain's standard parameters among them; a secret is not kept."""
_OF_A_CALL = (
    *("tools", "tool_choice", "strict", "parallel_tool_calls", "response_format", "grammar", "timeout", "whole"),
    *("model", "model_name", "stream", *sorted(_TRANSPORT)),
)
"""What a call takes besides sampling; LangChain itself reads `stream`."""


_QUESTION = Message("user", "Why?")
"""Behind system messages that are counted by themselves."""


@dataclass(frozen=True, slots=True)
class _Request:
    """One call: who answers what, and how its events are read."""

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

    Every streamed chunk is one verified segment; `additional_kwargs["specfuse_segments"]` says which member wrote
    it, how each member scored it and where it stands in the answer. The last chunk is empty and carries
    `usage_metadata` (tokens of the reference member) and, in `response_metadata["specfuse"]`, the record of the
    answer. Per call: `stop`, `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `seed`,
    `timeout`, `stream`, `model` (another ensemble), `tools`, `tool_choice`, `parallel_tool_calls`, `response_format`,
    `grammar` and `whole` (what `max_tokens` cuts is an error).

    `ChatSpecFuse(base_url="http://127.0.0.1:8000")` asks a server (`specfuse-llm serve`) instead, with the same chunks
    and records; `model` is then one of the server's.

    Thoughts of members (`MemberConfig(thinking=True)`) are reasoning blocks in front of the answer (`content_blocks`,
    and `additional_kwargs["reasoning_content"]`), not part of its text.

    Tool calls and structured values are drafted under a grammar and fit their schema. A call that `max_tokens` cut is
    in `invalid_tool_calls`, with the finish reason "length"; a structured value that it cut raises
    `UnfinishedValueError`. Text only; images and audio raise `RequestError`. Each error of `langchain_specfuse.errors`
    is an error of the engine and of LangChain.
    """

    model_config = ConfigDict(populate_by_name=True)

    ensembles: Ensembles = Field(default_factory=dict)
    """Other ensembles by name, each in a form that `members` or `config` take; a call selects one with
    `model="name"`."""
    model_name: str | None = Field(default=None, alias="model")
    """The ensemble of calls that name none: "demo" or one of `ensembles`, instead of `members`; or one of a server's
    models. Without any of these, a model or a list of them is the same as `members`."""
    streaming: bool | None = None
    """True: callbacks get the chunks of `invoke` as of a stream. False: `stream` yields one chunk."""

    def __init__(self, *args: Any, **values: Any) -> None:
        with as_langchain():
            super().__init__(*args, **values)

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = {key: value for key, value in values.items() if key in cls.model_fields or key not in _TRANSPORT}
        if isinstance(values.get("profile"), InferredProfile):  # of the model that this one is a copy of
            del values["profile"]
        name = values.get("model", values.get("model_name"))
        if name is None or any(values.get(key) is not None for key in ("members", "config", "engine", "base_url")):
            return values
        ensembles = values.get("ensembles") or {}
        if name != "demo" and (isinstance(name, list | tuple) or not ensembles):  # as models of one provider take it
            return members_of_model(values, name)
        config = _ensemble_named(name, ensembles)
        return {**values, **({"members": "demo"} if name == "demo" else {"config": config})}

    @property
    def _llm_type(self) -> str:
        return "specfuse-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        name = _named(kwargs) or self._model_name()
        return LangSmithParams(**{**params, "ls_provider": PROVIDER, "ls_model_name": name})

    # ── answers ──────────────────────────────────────────────────────────────────────────────────

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, self._heard(run_manager, kwargs), **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        """LangChain gives a `run_manager` where it does not tell the callbacks of each chunk by itself."""
        with as_langchain():
            request = self._request(messages, stop, kwargs)
            events = request.engine.stream(request.messages, request.params, **request.options)
            stream = cast("Generator[Event]", events)
            with closing(stream), belonging(stream):
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
        heard = self._heard(run_manager, kwargs)
        return await agenerate_from_stream(self._astream(messages, stop, heard, **kwargs))

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
                    for chunk in request.answer.chunks(event):
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
        """A model that may call `tools`: functions, classes, `BaseTool`s or dictionaries.

        `tool_choice`: None, False or "auto" (the ensemble decides), "any", "required" or True (a call is forced),
        "none", a tool's name, or a dictionary of these. `strict` refuses schemas that no grammar can enforce."""
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
        """A model that answers with values of `schema`: a Pydantic class, a TypedDict or a JSON schema.

        With every method the values fit the schema. "json_schema" describes it to the members, "function_calling" makes
        it a tool that must be called, and "json_mode" does not describe it; without a schema, "json_mode" gives any
        object. With `include_raw` the result is {"raw": message, "parsed": value, "parsing_error": error}.
        """
        with as_langchain():
            return structured_output(self, schema, include_raw=include_raw, method=method, strict=strict, **kwargs)

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of the reference member, or of `custom_get_token_ids`; reads a tokenizer and no weights."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        with as_langchain():
            return self._resolve_engine().tokenize(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[ToolLike] | None = None) -> int:
        """Tokens of the whole prompt in the reference member's chat template, tools included.

        System messages by themselves count as what they add to a conversation, which may be less than nothing where
        they replace the template's own. So `trim_messages`, which counts them apart from the turns, keeps what fits.
        With `custom_get_token_ids`, those of the texts of the messages.
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
        given = {key: overrides.pop(key, None) for key in _OF_A_CALL}
        asked: dict[str, Any] = {key: defaults.get(key) if value is None else value for key, value in given.items()}
        tools = to_tools(asked["tools"] or (), asked["strict"])
        choice = to_choice(asked["tool_choice"], tools)
        grammar, told = to_value(asked["response_format"], asked["grammar"])
        params, name = self._sampling({**overrides, "grammar": grammar}), _named(asked)
        is_value = asked["response_format"] is not None and grammar is not None
        whole: Whole = "all" if asked["whole"] else "value" if is_value else "none"
        may_close = asked["whole"] == CLOSED or (whole == "value" and grammar is not None and not grammar.strict)
        reader = ToolUse(tools, choice, otherwise=params.grammar).reader()
        return _Request(
            engine=self._resolve_engine(name, asked["extra_headers"]),
            messages=[*to_messages(messages), *told],
            params=params,
            answer=ChunkBuilder(
                lambda: name or self._model_name(), self.ledger, reader=reader, whole=whole, may_close=may_close
            ),
            options=CallOptions(
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=asked["parallel_tool_calls"],
                timeout=asked["timeout"],
            ),
        )

    def _ensemble(self, name: str | None = None) -> EnsembleConfig:
        """The ensemble of this name; without one, that of this model."""
        name, own = name or self._chosen_model, super()._ensemble()
        return own if name in (None, "+".join(own.names)) else _ensemble_named(name, self.ensembles)

    def _model_name(self) -> str:
        return self._chosen_model or super()._model_name()

    def _most_at_once(self, options: Mapping[str, Any]) -> int:
        try:
            return self._at_once(_named(options))
        except ConfigError:  # each input says so for itself
            return 1


def _named(options: Mapping[str, Any]) -> str | None:
    """The ensemble that a call asks for."""
    return options.get("model") or options.get("model_name")


def _ensemble_named(name: str, ensembles: Mapping[str, Any]) -> EnsembleConfig:
    if name in ensembles:
        return config_of(ensembles[name])
    if name == "demo":
        return config_of("demo")
    raise UnknownModelError(f"model {name!r} is not an ensemble here: use one of {['demo', *ensembles]}, or add it")
