"""Structured output: which request asks for a value, and which parser reads it."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.output_parsers.base import BaseGenerationOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from specfuse_shared.errors import ConfigError

if TYPE_CHECKING:
    from langchain_specfuse.chat_models import ChatSpecFuse

Method = Literal["json_schema", "function_calling", "json_mode"]
Parser = BaseOutputParser[Any] | BaseGenerationOutputParser[Any]


def structured_output(
    model: ChatSpecFuse,
    schema: dict[str, Any] | type,
    *,
    include_raw: bool,
    method: Method,
    strict: bool | None,
    **kwargs: Any,
) -> Runnable[LanguageModelInput, Any]:
    """The model bound to a schema, followed by the parser of its values."""
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: Parser
    if method == "function_calling":
        name = convert_to_openai_tool(schema)["function"]["name"]
        bound = model.bind_tools([schema], tool_choice=name, strict=strict, **_tracing(method, schema), **kwargs)
        if is_class:
            parser = PydanticToolsParser(tools=[schema], first_tool_only=True)  # type: ignore[list-item]
        else:
            parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    elif method in ("json_schema", "json_mode"):
        spec = {"schema": convert_to_json_schema(schema), "strict": bool(strict)}
        wanted = {"type": "json_schema", "json_schema": spec, "shown": method == "json_schema"}
        bound = model.bind(response_format=wanted, **_tracing(method, schema), **kwargs)
        parser = (
            PydanticOutputParser(pydantic_object=cast("type[BaseModel]", schema)) if is_class else JsonOutputParser()
        )
    else:
        raise ConfigError(f"method {method!r} is unknown: use json_schema, function_calling or json_mode")
    return _with_raw(bound, parser) if include_raw else bound | parser


def _with_raw(model: Runnable[LanguageModelInput, Any], parser: Parser) -> Runnable[LanguageModelInput, Any]:
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _tracing(method: Method, schema: Any) -> dict[str, Any]:
    """What LangSmith shows of the schema; the chat model takes it out of the call again."""
    return {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": convert_to_openai_tool(schema)}}
