"""Structured prediction: the members are told the fields of the class and draft under its grammar: it is valid JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictInProgressEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms.llm import LLM
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import Model, PydanticProgramMode
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel, PlainSerializer, PlainValidator, ValidationError
from pydantic_core import from_json

from specfuse_shared import Grammar
from specfuse_shared.errors import ConfigError
from specfuse_shared.frameworks import CLOSED, value_of

_dispatcher = get_dispatcher(__name__)
_OF_OTHER_PROGRAMS = ("tool_choice", "tool_required", "allow_parallel_tool_calls")
"""What callers pass on to a program that calls functions; a value under a grammar has no use for it."""


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
"""A grammar as a setting, which a dictionary of the LLM holds as plain JSON."""


class StructuredPrediction(LLM):
    """The four structured predicts of an LLM whose chats take a `grammar`.

    `pydantic_program_mode="llm"` keeps LlamaIndex's own way: a prompt and a parser, no grammar.
    """

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An instance of `output_cls`. Raises `UnfinishedValueError` if `max_tokens` has no room for it."""
        if self._by_prompt:
            output: Model = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return output
        _say_start(output_cls, prompt, prompt_args)
        response = self.chat(**self._structured_call(output_cls, prompt, llm_kwargs, prompt_args))
        return _whole(output_cls, response)

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """`structured_predict`, asynchronously."""
        if self._by_prompt:
            output: Model = await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return output
        _say_start(output_cls, prompt, prompt_args)
        response = await self.achat(**self._structured_call(output_cls, prompt, llm_kwargs, prompt_args))
        return _whole(output_cls, response)

    def stream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Model | FlexibleModel, None, None]:
        """The value as it grows; the last one is an instance of `output_cls`."""
        if self._by_prompt:
            yield from super().stream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        _say_start(output_cls, prompt, prompt_args)
        growing = _Growing(output_cls)
        for response in self.stream_chat(**self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)):
            yield growing.take(response)
        yield _whole(output_cls, response)

    async def astream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Model | FlexibleModel, None]:
        """`stream_structured_predict`, asynchronously."""
        if self._by_prompt:
            return await super().astream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)

        async def values() -> AsyncGenerator[Model | FlexibleModel, None]:
            _say_start(output_cls, prompt, prompt_args)
            growing = _Growing(output_cls)
            call = self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)
            async for response in await self.astream_chat(**call):
                yield growing.take(response)
            yield _whole(output_cls, response)

        return values()

    @property
    def _by_prompt(self) -> bool:
        return self.pydantic_program_mode not in (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION)

    def _structured_call(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None,
        prompt_args: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The arguments of the chat that writes the value."""
        options = {name: value for name, value in (llm_kwargs or {}).items() if name not in _OF_OTHER_PROGRAMS}
        messages: list[ChatMessage] = self._get_messages(prompt, **prompt_args)
        grammar, told = value_of(output_cls.model_json_schema(), strict=False)
        turns = [ChatMessage(message.content, role=message.role) for message in told]
        return {"whole": CLOSED, **options, "messages": [*messages, *turns], "grammar": grammar}


class _Growing:
    """Reads a value from the beginning of its JSON."""

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._output_cls = output_cls
        self._partial_cls = create_flexible_model(output_cls)

    def take(self, response: ChatResponse) -> Any:
        """An instance of the class if the value is one already, else of a class whose fields are all optional."""
        text = response.message.content or ""
        value = from_json(text, allow_partial="trailing-strings") if text else {}
        try:
            found: BaseModel = self._output_cls.model_validate(value)
        except ValidationError:
            found = self._partial_cls.model_validate(value)
        _dispatcher.event(LLMStructuredPredictInProgressEvent(output=found))
        return found


def _say_start(output_cls: type[BaseModel], prompt: BasePromptTemplate, prompt_args: dict[str, Any]) -> None:
    start = LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
    _dispatcher.event(start)


def _whole(output_cls: type[Model], response: ChatResponse) -> Model:
    output = output_cls.model_validate_json(response.message.content or "")
    _dispatcher.event(LLMStructuredPredictEndEvent(output=output))
    return output
