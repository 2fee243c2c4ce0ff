"""Structured output: which request asks for a value, and which parser reads it."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.output_parsers.base import BaseGenerationOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from langchain_specfuse.answers import usage_metadata
from langchain_specfuse.tools import json_schema_of, schema_tool
from specfuse_shared import ConfigError, UnfinishedValueError
from specfuse_shared.frameworks import CLOSED

if TYPE_CHECKING:
    from langchain_specfuse.chat_models import ChatSpecFuse

Method = Literal["json_schema", "function_calling", "json_mode"]
Schema = dict[str, Any] | type | None
Parser = BaseOutputParser[Any] | BaseGenerationOutputParser[Any]
ModelAndParser = tuple[Runnable[LanguageModelInput, Any], Parser]
"""A model that is bound to a schema, and the parser of what it says."""


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
    bind = _calling if method == "function_calling" else _answering
    bound, parser = bind(model, schema, method, strict, **_tracing(method, schema), **kwargs)
    return with_raw(bound, parser) if include_raw else bound | parser


def _calling(model: ChatSpecFuse, schema: Schema, method: Method, strict: bool | None, **kwargs: Any) -> ModelAndParser:
    tool = schema_tool(schema, strict)
    bound = model.bind_tools([tool], tool_choice=tool.name, whole=True if strict else CLOSED, **kwargs)
    if (of_class := _pydantic(schema)) is not None:
        return bound, PydanticToolsParser(tools=[of_class], first_tool_only=True)
    return bound, JsonOutputKeyToolsParser(key_name=tool.name, first_tool_only=True)


def _answering(
    model: ChatSpecFuse, schema: Schema, method: Method, strict: bool | None, **kwargs: Any
) -> ModelAndParser:
    wanted: dict[str, Any] = {"type": "json_object"}
    if schema is not None:
        spec = {"schema": json_schema_of(schema), "strict": bool(strict)}
        wanted = {"type": "json_schema", "json_schema": spec, "shown": method == "json_schema"}
    bound = model.bind(response_format=wanted, **kwargs)
    of_class = _pydantic(schema)
    return bound, JsonOutputParser() if of_class is None else PydanticOutputParser(pydantic_object=of_class)


def _pydantic(schema: Schema) -> type[BaseModel] | None:
    return schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None


def with_raw(model: Runnable[LanguageModelInput, Any], parser: Parser) -> Runnable[LanguageModelInput, Any]:
    """The value next to the message that holds it, and what went wrong instead of an error."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    read = parsed.with_fallbacks([failed], exception_key="parsing_error")
    asked: Runnable[Any, Any] = itemgetter("given") | RunnableMap(raw=model) | read
    known = (UnfinishedValueError,)
    answered = asked.with_fallbacks([RunnableLambda(_cut)], exceptions_to_handle=known, exception_key="cut")
    return RunnableMap(given=RunnablePassthrough()) | answered


def _cut(call: dict[str, Any]) -> dict[str, Any]:
    """The beginning of a value that `max_tokens` cut; a parser might take it for the whole."""
    cut: UnfinishedValueError = call["cut"]
    usage = None if cut.usage is None else usage_metadata(cut.usage)
    raw = AIMessage(cut.text, response_metadata={"finish_reason": "length"}, usage_metadata=usage)
    return {"raw": raw, "parsed": None, "parsing_error": cut}


def _tracing(method: Method, schema: Schema) -> dict[str, Any]:
    """What LangSmith shows of the schema, in LangChain's own words; the chat model takes it out of the call again."""
    if schema is None:
        return {}
    named = {"title": "output", **json_schema_of(schema)} if isinstance(schema, Mapping) else schema
    return {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": convert_to_openai_tool(named)}}
