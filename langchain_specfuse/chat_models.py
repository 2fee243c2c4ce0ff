"""`ChatSpecFuse`: an ensemble of local models as one LangChain chat model. It translates; the engine answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, Literal, cast

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    BaseRunManager,
    CallbackManager,
    CallbackManagerForLLMRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import Field

from langchain_specfuse.answers import PROVIDER, Answer
from langchain_specfuse.messages import to_messages
from langchain_specfuse.structured import structured_output
from langchain_specfuse.tools import ToolLike, schema_grammar, to_choice, to_schema, to_tools
from specfuse_shared.adapters import EnsembleSettings, Members, config_of, segment_record
from specfuse_shared.config import EnsembleConfig
from specfuse_shared.errors import ConfigError
from specfuse_shared.events import Event, SegmentEvent
from specfuse_shared.sampling_params import SamplingParams
from specfuse_shared.serving.engine import CallOptions, EnsembleEngine
from specfuse_shared.text.tool_calls import ToolUse, schema_request
from specfuse_shared.types import Message

SEGMENT_EVENT = "specfuse_segment"


@dataclass(frozen=True, slots=True)
class _Request:
    """One call: who answers what, and how its events are read."""

    engine: EnsembleEngine
    messages: list[Message]
    params: SamplingParams
    answer: Answer
    options: CallOptions


class ChatSpecFuse(EnsembleSettings, BaseChatModel):
    """Several local models answer together, segment by segment.

        model = ChatSpecFuse(members=["HuggingFaceTB/SmolLM2-135M-Instruct", "google/gemma-3-270m-it"])
        for chunk in model.stream("Why is the sky blue?", max_tokens=64):
            ...

    Every streamed chunk is one verified segment; `additional_kwargs["specfuse_segments"]` says which member wrote
    it, how each member scored it and where it stands in the answer. The last chunk is empty and carries
    `usage_metadata` (tokens of the reference member) and, in `response_metadata["specfuse"]`, the record of all
    rounds. Per call: `stop`, `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `seed`,
    `timeout`, `model` (a preset), `tools`, `tool_choice`, `parallel_tool_calls` and `response_format`.

    Tool calls and structured values are drafted under a grammar: they fit their schema, or
    `UnfinishedValueError` says that `max_tokens` left no room. Text only; images and audio raise `RequestError`.
    """

    presets: Mapping[str, Any] = Field(default_factory=dict)
    """Other ensembles by name, each as `members` or `config` take them; a call chooses one with `model="name"`."""
    segment_events: bool = False
    """Dispatch a custom event "specfuse_segment" for every verified segment."""

    @property
    def _llm_type(self) -> str:
        return "specfuse-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        presets = {name: self._preset_identity(name) for name in self.presets}
        return {**self._identity(), "parallel_tool_calls": self.parallel_tool_calls, "presets": presets}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        name = kwargs.get("model") or self._model_name()
        return LangSmithParams(**{**params, "ls_provider": PROVIDER, "ls_model_name": name})

    def _resolve_model_profile(self) -> ModelProfile:
        """`max_input_tokens` is the smallest member's; it is known once the engine is loaded, or where settings say."""
        return ModelProfile(
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
        )

    # ── answers ──────────────────────────────────────────────────────────────────────────────────

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        request = self._request(messages, stop, kwargs)
        events = request.engine.stream(request.messages, request.params, **request.options)
        with closing(cast("Generator[Event]", events)):
            for event in events:
                if isinstance(event, SegmentEvent):
                    self._tell(event)
                    if self.segment_events and run_manager is not None:
                        inside: RunnableConfig = {"callbacks": CallbackManager(**_child(run_manager))}
                        dispatch_custom_event(SEGMENT_EVENT, _event_data(event), config=inside)
                if (chunk := request.answer.chunk(event)) is not None:
                    yield chunk

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await agenerate_from_stream(self._astream(messages, stop, run_manager, **kwargs))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        request = self._request(messages, stop, kwargs)
        events = request.engine.astream(request.messages, request.params, **request.options)
        async with aclosing(cast("AsyncGenerator[Event]", events)):
            async for event in events:
                if isinstance(event, SegmentEvent):
                    self._tell(event)
                    if self.segment_events and run_manager is not None:
                        inside: RunnableConfig = {"callbacks": AsyncCallbackManager(**_child(run_manager))}
                        await adispatch_custom_event(SEGMENT_EVENT, _event_data(event), config=inside)
                if (chunk := request.answer.chunk(event)) is not None:
                    yield chunk

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answers to all inputs, as one batch of the engine unless `max_concurrency` says otherwise."""
        together = _together(config, len(inputs))
        return super().batch(inputs, together, return_exceptions=return_exceptions, **kwargs)

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

        `tool_choice`: None or "auto" (the ensemble decides), "any", "required" or True (it calls), "none" or False,
        a tool's name, or a dictionary of these. `strict` refuses schemas that no grammar can promise.
        """
        bound = to_tools(tools, strict)
        options: dict[str, Any] = {"tool_choice": to_choice(tool_choice, bound)}
        if parallel_tool_calls is not None:
            options["parallel_tool_calls"] = parallel_tool_calls
        described = [{**t.as_function(), **({"strict": True} if t.strict else {})} for t in bound]
        return self.bind(tools=described, **options, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A model that answers with values of `schema`: a Pydantic class, a TypedDict or a JSON schema.

        Every method gives values that fit the schema. "json_schema" shows it to the members, "function_calling"
        makes it a tool that must be called, "json_mode" leaves it to the prompt to say what is wanted. With
        `include_raw` the result is {"raw": message, "parsed": value, "parsing_error": error}.
        """
        return structured_output(self, schema, include_raw=include_raw, method=method, strict=strict, **kwargs)

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of the reference member; loads the engine on first use."""
        return self._resolve_engine().tokenize(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[ToolLike] | None = None) -> int:
        """Tokens of the whole prompt in the reference member's chat template, tools included."""
        return self._resolve_engine().count_tokens(to_messages(messages), to_tools(tools or ()))

    # ── one call ─────────────────────────────────────────────────────────────────────────────────

    def _request(self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> _Request:
        """Translate a call. A setting that does not exist or cannot work raises `ConfigError`."""
        overrides = {"parallel_tool_calls": self.parallel_tool_calls, **options, "stop": stop}
        model, timeout = overrides.pop("model", None), overrides.pop("timeout", self.timeout)
        tools = to_tools(overrides.pop("tools", None) or (), overrides.pop("strict", None))
        choice = to_choice(overrides.pop("tool_choice", None), tools)
        conversation, grammar = to_messages(messages), None
        if (wanted := overrides.pop("response_format", None)) is not None:
            schema, strict = to_schema(wanted)
            grammar = schema_grammar(schema, strict) if schema is not None else None
            shown = isinstance(wanted, Mapping) and wanted.get("shown", True) is False
            told = schema_request(schema) if schema is not None and not shown else None
            conversation += [told] if told else []
        parallel = bool(overrides.pop("parallel_tool_calls"))
        params = self._sampling({"grammar": grammar, **overrides})
        use = ToolUse(tools, choice, parallel)
        answer = Answer(model or self._model_name(), bool(use.offered))
        called = CallOptions(tools=use.tools, tool_choice=choice, parallel_tool_calls=parallel, timeout=timeout)
        self._complete_profile()
        return _Request(self._engine_of(model), conversation, params, answer, called)

    def _complete_profile(self) -> None:
        if self.profile is not None and (limit := self._context_limit()) is not None:
            self.profile.setdefault("max_input_tokens", limit)

    def _engine_of(self, model: str | None) -> EnsembleEngine:
        return self._resolve_engine() if model is None else self._engine_for(self._preset(model))

    def _preset(self, name: str) -> EnsembleConfig:
        if name == self._model_name():
            return self._ensemble()
        value: Members | EnsembleConfig = "demo" if name == "demo" else self.presets.get(name)
        if value is None:
            raise ConfigError(f"model {name!r} is no preset: use one of {['demo', *self.presets]}")
        return config_of(value)

    def _preset_identity(self, name: str) -> Any:
        return self._plain_ensemble(self._preset(name))

    def _tell(self, event: SegmentEvent) -> None:
        if self.on_segment is not None:
            self.on_segment(event)


def _child(run: BaseRunManager) -> dict[str, Any]:
    """What a manager of callbacks inside a run is made of: a custom event needs a run that it belongs to."""
    return {
        "handlers": run.handlers,
        "inheritable_handlers": run.inheritable_handlers,
        "parent_run_id": run.run_id,
        "tags": run.tags,
        "metadata": run.metadata,
    }


def _together(config: RunnableConfig | list[RunnableConfig] | None, count: int) -> list[RunnableConfig]:
    """LangChain runs a batch in as many threads as `max_concurrency` says; they only wait for the engine here."""
    each = config if isinstance(config, list) else [config or RunnableConfig()] * count
    return [{"max_concurrency": count, **one} for one in each]


def _event_data(event: SegmentEvent) -> dict[str, Any]:
    return {"text": event.text, **segment_record(event)}
