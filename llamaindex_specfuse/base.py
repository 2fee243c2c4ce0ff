"""`SpecFuseLLM`: an ensemble of local models as one LlamaIndex LLM.

This module translates between LlamaIndex and the engine. It computes nothing itself.

Closing a stream stops the members. LlamaIndex wraps a stream to report its end. If the wrapper is closed early, it
reports the exception that closes it and leaves the inner stream to the garbage collector. A handler that keeps the
exception would keep that stream alive, and members would generate up to `max_tokens` for no reader. So each endpoint
closes its own source (`closes_source`).

In structured prediction, members see the fields of the class and draft under its grammar, so the output is valid JSON.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, replace
from functools import wraps
from typing import Annotated, Any, Self, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictInProgressEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import Model, PydanticProgramMode
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError, model_validator
from pydantic_core import from_json

from llamaindex_specfuse.messages import (
    AnswerFold,
    AnswerStep,
    ToolCalling,
    afold,
    alast_step,
    fold,
    last_step,
    logged_failures,
    react_stops,
    to_messages,
    to_tools,
)
from specfuse_shared import CallOptions, Grammar, Message, SamplingParams
from specfuse_shared.errors import ConfigError, RequestError
from specfuse_shared.frameworks import CLOSED, EnsembleSettings, ToolUse, Whole, choice_of, members_of_model, value_of

Source = TypeVar("Source", bound=Generator[Any, None, None] | AsyncGenerator[Any, None])

_sources: ContextVar[list[Any] | None] = ContextVar("specfuse_sources", default=None)


def source(stream: Source) -> Source:
    """Mark a stream as the source of the endpoint that is being called, if it is decorated with `closes_source`."""
    if (sources := _sources.get()) is not None:
        sources.append(stream)
    return stream


def closes_source(endpoint: Callable[..., Any]) -> Callable[..., Generator[Any, None, None]]:
    """A decorator of a streaming endpoint: closing its stream also closes the `source`."""

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


_dispatcher = get_dispatcher(__name__)
_PROGRAM_OPTIONS = ("tool_choice", "tool_required", "allow_parallel_tool_calls")
"""Options of function-calling programs. Structured prediction under a grammar ignores them."""


def _as_grammar(value: Any) -> Grammar | None:
    if value is None or isinstance(value, Grammar):
        return value
    if isinstance(value, Mapping) and set(value) == {part.name for part in fields(Grammar)}:
        return Grammar(**value)
    raise ConfigError(f"grammar is {value!r}: give a Grammar, such as Grammar.choice([...])")


GrammarField = Annotated[
    Grammar | None,
    PlainValidator(_as_grammar),
    PlainSerializer(lambda value: value and asdict(value)),
]
"""A grammar as a field. `to_dict` writes it as plain JSON."""


class StructuredPrediction(LLM):
    """The four structured-prediction methods of an LLM whose `chat` takes a `grammar`.

    `pydantic_program_mode="llm"` uses LlamaIndex's own method instead: a prompt and a parser.
    """

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An instance of `output_cls`. Raises `UnfinishedValueError` if it was cut and cannot simply be closed."""
        if self._uses_prompt:
            output: Model = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return output
        _dispatch_start(output_cls, prompt, prompt_args)
        response = self.chat(**self._structured_call(output_cls, prompt, llm_kwargs, prompt_args))
        return _final_value(output_cls, response)

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """`structured_predict`, asynchronously."""
        if self._uses_prompt:
            output: Model = await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return output
        _dispatch_start(output_cls, prompt, prompt_args)
        response = await self.achat(**self._structured_call(output_cls, prompt, llm_kwargs, prompt_args))
        return _final_value(output_cls, response)

    def stream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Model | FlexibleModel, None, None]:
        """The value as it grows; the last one is an instance of `output_cls`."""
        if self._uses_prompt:
            yield from super().stream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        _dispatch_start(output_cls, prompt, prompt_args)
        growing = _GrowingValue(output_cls)
        for response in self.stream_chat(**self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)):
            yield growing.take(response)
        yield _final_value(output_cls, response)

    async def astream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Model | FlexibleModel, None]:
        """`stream_structured_predict`, asynchronously."""
        if self._uses_prompt:
            return await super().astream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)

        async def values() -> AsyncGenerator[Model | FlexibleModel, None]:
            _dispatch_start(output_cls, prompt, prompt_args)
            growing = _GrowingValue(output_cls)
            call = self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)
            async for response in await self.astream_chat(**call):
                yield growing.take(response)
            yield _final_value(output_cls, response)

        return values()

    @property
    def _uses_prompt(self) -> bool:
        return self.pydantic_program_mode not in (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION)

    def _structured_call(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None,
        prompt_args: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The arguments of the chat whose answer is the value."""
        options = {name: value for name, value in (llm_kwargs or {}).items() if name not in _PROGRAM_OPTIONS}
        messages: list[ChatMessage] = self._get_messages(prompt, **prompt_args)
        grammar, spec = value_of(output_cls.model_json_schema(), strict=False)
        turns = [ChatMessage(message.content, role=message.role) for message in spec]
        return {"whole": CLOSED, **options, "messages": [*messages, *turns], "grammar": grammar}


class _GrowingValue:
    """Reads a value while its JSON grows."""

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._output_cls = output_cls
        self._partial_cls = create_flexible_model(output_cls)

    def take(self, response: ChatResponse) -> Any:
        """An instance of the class once the value is valid; before, of a class whose fields are all optional."""
        text = response.message.content or ""
        value = from_json(text, allow_partial="trailing-strings") if text.strip() else {}
        try:
            parsed: BaseModel = self._output_cls.model_validate(value)
        except ValidationError:
            parsed = self._partial_cls.model_validate(value)
        _dispatcher.event(LLMStructuredPredictInProgressEvent(output=parsed))
        return parsed


def _dispatch_start(output_cls: type[BaseModel], prompt: BasePromptTemplate, prompt_args: dict[str, Any]) -> None:
    start = LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
    _dispatcher.event(start)


def _final_value(output_cls: type[Model], response: ChatResponse) -> Model:
    output = output_cls.model_validate_json(response.message.content or "")
    _dispatcher.event(LLMStructuredPredictEndEvent(output=output))
    return output


_SOURCES = ("members", "config", "engine", "base_url")
PROMPT_RESERVE = 620
"""Tokens that LlamaIndex's own prompt templates and one short passage need in front of an answer."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Options of one call besides its conversation."""

    params: SamplingParams
    use: ToolUse
    timeout: float | None
    whole: Whole = "none"
    """The part that must be complete: `UnfinishedValueError` is raised if `max_tokens` cuts it."""
    may_close: bool = False
    """Accept a cut part that brackets and quotes completed."""
    headers: Mapping[str, str] | None = None

    @property
    def options(self) -> CallOptions:
        return CallOptions(
            tools=self.use.tools,
            tool_choice=self.use.choice,
            parallel_tool_calls=self.use.parallel,
            timeout=self.timeout,
        )


class _TracedMetadata(LLMMetadata):
    """LlamaIndex's metadata plus the sampling settings, which OpenInference writes into its spans."""

    model_config = ConfigDict(extra="allow")


class SpecFuseLLM(EnsembleSettings, StructuredPrediction, CustomLLM, ToolCalling):
    """Several local models answer together, segment by segment.

        llm = SpecFuseLLM(members=["HuggingFaceTB/SmolLM2-135M-Instruct", "google/gemma-3-270m-it"])
        for response in llm.stream_complete("How does a vaccine work?", max_tokens=64):
            ...

    Each streamed response is one verified segment. Its `raw["specfuse"]` has the member that wrote it, each member's
    score, the position in the answer, and the other candidates. LlamaIndex's dispatcher receives the same in
    `SpecFuseSegmentEvent`s. The last response adds no text. It carries `raw["usage"]` (tokens of the reference member),
    the finish reason and the record of the answer; `complete` and `chat` return it. Every call takes the sampling
    settings, `grammar`, `logprobs`, `timeout`, `tools`, `tool_choice`, `parallel_tool_calls` and `whole` (an answer
    that `max_tokens` cuts raises an error). A completion is one user turn in each member's own template. Images and
    audio raise `RequestError`.

    Tool calls and structured predictions are drafted under a grammar: every call names a known tool and fits its
    schema, every prediction is valid JSON for its class. Calls are never streamed as text; a response holds the calls
    that are complete. A call that `max_tokens` cut is left out; an agent receives the reason and can call again. A cut
    prediction is closed, with a `ClosedValueWarning`, if brackets and quotes complete it. Otherwise it raises
    `UnfinishedValueError`, as does a cut call in `predict_and_call`.

    `SpecFuseLLM(base_url="http://127.0.0.1:8000")` uses a server (`specfuse-llm serve`) instead, with the same
    responses and records. `model` is then one of the server's models.

    Raises `ConfigError` if the smallest context is too small for LlamaIndex's prompts. `metadata.num_output` is at most
    the context that these prompts leave free.
    """

    context_window: int | None = Field(default=None, gt=0)
    """Context size for LlamaIndex's planning, in tokens; None: the smallest member's."""
    grammar: GrammarField = None
    """The `Grammar` of every answer, unless a call sets another."""
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of every call; a call can replace each of them."""
    is_function_calling_model: bool = True
    """False makes LlamaIndex work without function calling, for example with ReAct."""

    @classmethod
    def class_name(cls) -> str:
        """The name of the class in serialised components.

        Returns:
            "specfuse_llm".

        Example:
            ```python
            from llamaindex_specfuse import SpecFuseLLM

            print(SpecFuseLLM.class_name())
            ```
        """
        return "specfuse_llm"

    def to_payload(self) -> dict[str, Any]:
        """The content of a trace, computed without a request to a server.

        Returns:
            Names, sizes and sampling.

        Example:
            ```python
            from llamaindex_specfuse import SpecFuseLLM

            print(SpecFuseLLM(members="demo", max_tokens=8).to_payload()["model_name"])
            ```
        """
        payload = {"class_name": self.class_name(), "model_name": self.model, "context_window": self._window()}
        return {**payload, "is_function_calling_model": self.is_function_calling_model, **self._traced()}

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """The model as plain JSON that `from_dict` reads.

        Args:
            **kwargs: Options of LlamaIndex's `to_dict`.

        Returns:
            The fields. Local paths are replaced by names, which only this process can map back.

        Example:
            ```python
            from llamaindex_specfuse import SpecFuseLLM

            llm = SpecFuseLLM(members="demo", max_tokens=8)
            print(SpecFuseLLM.from_dict(llm.to_dict()).max_tokens)
            ```
        """
        data = super().to_dict(**kwargs)
        data.pop("model_name", None)
        return data if self.base_url and self._chosen_model is None else {**data, "model": self.model}

    @model_validator(mode="before")
    @classmethod
    def _read_model(cls, values: Any) -> Any:
        """Without other members, `model` is "demo" or a list of models."""
        if not isinstance(values, Mapping) or any(values.get(source) is not None for source in _SOURCES):
            return values
        name = _model_in(values)
        if name == "demo":
            return {**values, "members": "demo"}
        return values if name is None else members_of_model(values, name)

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.base_url is None and self.model_name not in (None, "demo", "+".join(self._ensemble().names)):
            raise ConfigError(
                f'model is {self.model_name!r}: it is "demo", or one of a server\'s models with base_url; members in '
                f"this process are given as members=[{self.model_name!r}]"
            )
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Sends no request: a server's context size is checked on the first read of `metadata`."""
        self._call({})  # raises for options that no call takes
        self._check_capacity()
        return self

    def _check_capacity(self) -> None:
        window = self._window()
        if window is not None and window <= PROMPT_RESERVE:
            raise ConfigError(
                f"the context holds {window} tokens, and LlamaIndex's prompts take up to {PROMPT_RESERVE}: raise "
                "context_window or the smallest member's max_context, or leave that member out"
            )

    @property
    def metadata(self) -> LLMMetadata:
        """`context_window` always leaves space for a prompt, even if no member states a context size.

        `num_output` covers the answer and, if a member thinks, its reasoning, and leaves space for prompts. The first
        read requests a server's description of its model. Raises `EngineClosedError` if the server does not respond.
        """
        if (remote := self._remote()) is not None and not remote.known:
            remote.describe()
            self._check_capacity()
        longest, window = self._longest_output(), self._window()
        if window is not None:
            longest = min(longest, window - PROMPT_RESERVE)
        return _TracedMetadata(
            **self._traced(),
            context_window=window or max(DEFAULT_CONTEXT_WINDOW, longest + PROMPT_RESERVE),
            num_output=longest,
            is_chat_model=True,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self._model_name(),
        )

    @property
    def model(self) -> str:
        """The name of the ensemble, or of a server's model."""
        return self._model_name()

    @property
    def tokenizer(self) -> Callable[[str], list[int]]:
        """A function from text to token ids of the reference member, for `Settings.tokenizer`. Loads no weights."""
        return self._token_ids

    # ── the eight endpoints ──────────────────────────────────────────────────────────────────────

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The answer to a prompt, as one user turn.

        Example:
            ```python
            from llamaindex_specfuse import SpecFuseLLM

            llm = SpecFuseLLM(members="demo", max_tokens=8)
            print(llm.complete("Why is the sky blue?").text)
            ```
        """
        return last_step(self._steps(self._completion_turn(prompt, formatted, kwargs), kwargs)).completion()

    @closes_source
    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """The answer to a prompt, in verified segments. Each response has the new text in `delta`.

        Example:
            ```python
            from llamaindex_specfuse import SpecFuseLLM

            llm = SpecFuseLLM(members="demo", max_tokens=8)
            for response in llm.stream_complete("Why is the sky blue?"):
                print(response.delta, end="", flush=True)
            ```
        """
        steps = self._steps(self._completion_turn(prompt, formatted, kwargs), kwargs)
        return (step.completion() for step in steps)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The next turn of a conversation.

        Example:
            ```python
            from llama_index.core.llms import ChatMessage

            from llamaindex_specfuse import SpecFuseLLM

            llm = SpecFuseLLM(members="demo", max_tokens=8)
            print(llm.chat([ChatMessage("Why is the sky blue?")]).message.content)
            ```
        """
        return last_step(self._steps(self._turns(messages), kwargs)).chat()

    @closes_source
    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """The next turn of a conversation, in verified segments. Each response has the new text in `delta`.

        Example:
            ```python
            from llama_index.core.llms import ChatMessage

            from llamaindex_specfuse import SpecFuseLLM

            llm = SpecFuseLLM(members="demo", max_tokens=8)
            for response in llm.stream_chat([ChatMessage("Why is the sky blue?")]):
                print(response.delta, end="", flush=True)
            ```
        """
        steps = self._steps(self._turns(messages), kwargs)
        return (step.chat() for step in steps)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete`, asynchronously.

        Example:
            ```python
            import asyncio

            from llamaindex_specfuse import SpecFuseLLM

            llm = SpecFuseLLM(members="demo", max_tokens=8)
            print(asyncio.run(llm.acomplete("Why is the sky blue?")).text)
            ```
        """
        return (await alast_step(self._asteps(self._completion_turn(prompt, formatted, kwargs), kwargs))).completion()

    @acloses_source
    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """`stream_complete`, asynchronously.

        Example:
            ```python
            import asyncio

            from llamaindex_specfuse import SpecFuseLLM

            llm = SpecFuseLLM(members="demo", max_tokens=8)


            async def main() -> None:
                async for response in await llm.astream_complete("Why is the sky blue?"):
                    print(response.delta, end="", flush=True)


            asyncio.run(main())
            ```
        """
        steps = self._asteps(self._completion_turn(prompt, formatted, kwargs), kwargs)
        return (step.completion() async for step in steps)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat`, asynchronously.

        Example:
            ```python
            import asyncio

            from llama_index.core.llms import ChatMessage

            from llamaindex_specfuse import SpecFuseLLM

            llm = SpecFuseLLM(members="demo", max_tokens=8)
            print(asyncio.run(llm.achat([ChatMessage("Why is the sky blue?")])).message.content)
            ```
        """
        return (await alast_step(self._asteps(self._turns(messages), kwargs))).chat()

    @acloses_source
    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """`stream_chat`, asynchronously.

        Example:
            ```python
            import asyncio

            from llama_index.core.llms import ChatMessage

            from llamaindex_specfuse import SpecFuseLLM

            llm = SpecFuseLLM(members="demo", max_tokens=8)


            async def main() -> None:
                async for response in await llm.astream_chat([ChatMessage("Why is the sky blue?")]):
                    print(response.delta, end="", flush=True)


            asyncio.run(main())
            ```
        """
        steps = self._asteps(self._turns(messages), kwargs)
        return (step.chat() async for step in steps)

    # ── one call ─────────────────────────────────────────────────────────────────────────────────

    def _completion_turn(self, prompt: str, formatted: bool, overrides: Mapping[str, Any]) -> list[Message]:
        if overrides.get("tools"):
            raise RequestError("a completion cannot hold tool calls: use chat, chat_with_tools or predict_and_call")
        render = self.completion_to_prompt
        return [Message("user", prompt if formatted or render is None else render(prompt))]

    def _turns(self, messages: Sequence[ChatMessage]) -> list[Message]:
        """The members use their own chat templates unless the user set `messages_to_prompt`."""
        render = self.messages_to_prompt
        if render is None or render is generic_messages_to_prompt:
            return to_messages(messages)
        return [Message("user", render(messages))]

    def _token_ids(self, text: str) -> list[int]:
        return self._resolve_engine().tokenize(text)

    def _longest_output(self) -> int:
        params = self._call({}).params
        return params.max_tokens + (params.max_thinking_tokens if self._thinks() else 0)

    def _window(self) -> int | None:
        return self.context_window or self._context_limit()

    def _call(self, overrides: Mapping[str, Any]) -> _Call:
        """Settings of a call. `overrides` win over `additional_kwargs`, which win over the fields."""
        options = {**self.additional_kwargs, **{name: value for name, value in overrides.items() if value is not None}}
        for name in {"model", "model_name"} & set(options):
            if (requested := options.pop(name)) != self.model:
                raise ConfigError(
                    f"{name} is {requested!r}: this LLM is {self.model!r}, make another one for other members"
                )
        tools, choice = to_tools(options.pop("tools", None)), choice_of(options.pop("tool_choice", None))
        parallel = bool(options.pop("parallel_tool_calls", self.parallel_tool_calls))
        timeout, requested = options.pop("timeout", self.timeout), options.pop("whole", False)
        whole: Whole = "call" if requested == "call" else "all" if requested else "none"
        headers = options.pop("extra_headers", None)
        params = self._sampling(options)
        use = ToolUse(tools, choice, parallel, params.grammar)
        return _Call(params, use, timeout, whole, requested == CLOSED, headers)

    def _call_for(self, messages: Sequence[Message], overrides: Mapping[str, Any]) -> _Call:
        """The settings of a call, with the stop strings that a ReAct conversation needs."""
        call = self._call(overrides)
        return replace(call, params=replace(call.params, stop=(*call.params.stops, *react_stops(messages))))

    def _answer(self, call: _Call) -> AnswerFold:
        return AnswerFold(
            call.use.reader(), self.ledger, self._observe, call.whole, self._model_name, may_close=call.may_close
        )

    def _steps(self, messages: list[Message], overrides: dict[str, Any]) -> Generator[AnswerStep, None, None]:
        """The steps of an answer. This call, not the first step, raises if the request cannot be served."""
        call = self._call_for(messages, overrides)
        with logged_failures():
            events = self._resolve_engine(headers=call.headers).stream(messages, call.params, **call.options)
        return source(fold(self._answer(call), events))

    def _asteps(self, messages: list[Message], overrides: dict[str, Any]) -> AsyncGenerator[AnswerStep, None]:
        """`_steps`, asynchronously. The engine works in its own threads and raises at the first step."""
        call = self._call_for(messages, overrides)
        events = self._resolve_engine(headers=call.headers).astream(messages, call.params, **call.options)
        return source(afold(self._answer(call), events))


def _model_in(values: Mapping[str, Any]) -> Any:
    return values.get("model", values.get("model_name"))
