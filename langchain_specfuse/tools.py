"""LangChain's tools, tool choices and response formats as the engine's tools and grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool

from specfuse_shared.errors import ConfigError
from specfuse_shared.text.grammar import Grammar
from specfuse_shared.types import Tool

ToolLike = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
_WORDS = {"auto": "auto", "none": "none", "any": "any", "required": "any"}


def to_tools(tools: Sequence[ToolLike], strict: bool | None = None) -> list[Tool]:
    """Functions, classes, `BaseTool`s, or tools and schemas as dictionaries."""
    return [_to_tool(tool, strict) for tool in tools]


def to_choice(choice: Any, tools: Sequence[Tool]) -> str:
    """Any form of `tool_choice`: None, a bool, "auto", "any", "required", "none", a name, or a dictionary of these.

    True calls the only tool. Raises `ConfigError` for a tool that is not bound.
    """
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = (function or choice).get("name") or choice.get("type")
    if choice is None or choice is False:
        return "auto" if choice is None else "none"
    if choice is True:
        return tools[0].name if len(tools) == 1 else "any"
    names = [tool.name for tool in tools]
    if choice in names or choice in _WORDS:
        return str(choice) if choice in names else _WORDS[choice]
    raise ConfigError(f"tool_choice {choice!r} is none of the bound tools {names} and no word like 'any'")


def to_schema(response_format: Any) -> tuple[dict[str, Any] | None, bool]:
    """The JSON schema of a response format, None for plain text, and whether it must be enforced to the letter.

    Takes {"type": "text" | "json_object" | "json_schema"}, a JSON schema, a Pydantic class or a TypedDict.
    """
    if not isinstance(response_format, Mapping):
        return convert_to_json_schema(response_format), False
    kind = response_format.get("type")
    if kind == "text":
        return None, False
    if kind == "json_object":
        return {"type": "object"}, False
    if kind != "json_schema":
        return convert_to_json_schema(dict(response_format)), False
    spec = response_format.get("json_schema")
    if not isinstance(spec, Mapping) or not isinstance(spec.get("schema", spec), Mapping):
        raise ConfigError('response_format of type "json_schema" needs {"json_schema": {"schema": {…}}}')
    return dict(spec.get("schema", spec)), bool(spec.get("strict"))


def schema_grammar(schema: Mapping[str, Any], strict: bool) -> Grammar:
    return Grammar.json_schema(schema, strict=strict)


def _to_tool(tool: ToolLike, strict: bool | None) -> Tool:
    if isinstance(tool, Tool):
        return tool
    function = convert_to_openai_tool(tool, strict=strict)["function"]
    return Tool(
        name=function["name"],
        description=function.get("description", ""),
        parameters=function.get("parameters") or {"type": "object", "properties": {}},
        strict=bool(function.get("strict")),
    )
