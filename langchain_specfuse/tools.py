"""LangChain's tools, tool choices and response formats as the engine's tools and grammars."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from langchain_core.tools import BaseTool
from langchain_core.tools import Tool as SimpleTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_function
from pydantic import BaseModel

from specfuse_shared import ConfigError, Grammar, Message, Tool
from specfuse_shared.frameworks import RESPONSE_FORMATS, choice_of, response_schema, value_of

Foreign = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
ToolLike = Foreign | Tool
_SCHEMA_KEYS = ("parameters", "input_schema", "schema")
"""Where the descriptions of functions that are in use keep the schema of their arguments."""


def to_tools(tools: Sequence[ToolLike], strict: bool | None = None) -> list[Tool]:
    """Functions, classes, `BaseTool`s, or tools and schemas as dictionaries. `strict` overrides what they say."""
    return [_to_tool(tool, strict) for tool in tools]


def to_choice(choice: Any, tools: Sequence[Tool]) -> str:
    """Any form of `tool_choice`: None, a bool, "auto", "any", "required", "none", a name, or a dictionary of these.

    True calls the only tool, False says nothing. Raises `ConfigError` for a tool that is not bound.
    """
    names = [tool.name for tool in tools]
    if choice is True and len(names) == 1:
        return names[0]
    asked = choice_of(choice)
    if asked in (*names, "auto", "none") or (asked == "any" and names):
        return asked
    if not names:
        raise ConfigError(f"tool_choice {choice!r} needs tools, and none are bound: bind tools, or leave it out")
    raise ConfigError(f"tool_choice {asked!r} is none of the bound tools {names} and no word like 'any'")


def to_schema(response_format: Any) -> tuple[dict[str, Any] | None, bool]:
    """The JSON schema of a response format, None for plain text, and whether it must be enforced to the letter.

    Takes {"type": "text" | "json_object" | "json_schema"}, a JSON schema, a Pydantic class or a TypedDict.
    """
    if isinstance(response_format, Mapping) and response_format.get("type") in RESPONSE_FORMATS:
        return response_schema(response_format)
    return json_schema_of(response_format), False


def json_schema_of(schema: Any) -> dict[str, Any]:
    """The JSON schema that a class or dictionary stands for; a JSON schema stays as it is."""
    if isinstance(schema, Mapping):
        function = _function_of(schema)
        inner = next((function[key] for key in _SCHEMA_KEYS if _is_named(function, key)), None)
        if inner is None:
            return dict(schema)
        told = {"title": function["name"], "description": function.get("description")}
        return {**{key: value for key, value in told.items() if value}, **inner}
    if _is_model(schema):
        return dict(schema.model_json_schema())
    return convert_to_json_schema(schema)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call as a cache may know them: a class is its schema, since its name may outlive its fields."""
    wanted = options.get("response_format")
    return {**options, "response_format": json_schema_of(wanted)} if isinstance(wanted, type) else dict(options)


def to_value(response_format: Any, grammar: Grammar | None) -> tuple[Grammar | None, list[Message]]:
    """What an answer must be, and what the members are told about it."""
    if response_format is None:
        return grammar, []
    if grammar is not None:
        raise ConfigError("a call takes a response_format or a grammar, not both: both say what the answer is")
    schema, strict = to_schema(response_format)
    return value_of(schema, strict, not isinstance(response_format, Mapping) or response_format.get("shown", True))


def schema_tool(schema: Any, strict: bool | None = None) -> Tool:
    """The tool whose arguments are a value of the schema; one without a title is called "output"."""
    if isinstance(schema, Mapping) and "name" not in _function_of(schema) and not schema.get("title"):
        schema = {"title": "output", **schema}
    return _to_tool(schema, strict)


def _to_tool(tool: ToolLike, strict: bool | None) -> Tool:
    if isinstance(tool, Tool):
        return tool
    function = _as_function(tool)
    return Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters=function.get("parameters") or {"type": "object", "properties": {}},
        strict=bool(function.get("strict") if strict is None else strict),
    )


def _as_function(tool: Foreign) -> dict[str, Any]:
    """Name, description and parameters as they are given; what has no JSON schema yet is converted."""
    if isinstance(tool, Mapping):
        return _mapped(tool)
    if _is_model(tool):
        name = tool.model_config.get("title") or tool.__name__
        return {
            "name": name,
            "description": inspect.cleandoc(tool.__doc__ or ""),
            "parameters": tool.model_json_schema(),
        }
    if isinstance(tool, BaseTool) and not (isinstance(tool, SimpleTool) and not tool.args_schema):
        arguments = tool.tool_call_schema
        schema = arguments.model_json_schema() if _is_model(arguments) else arguments
        if isinstance(schema, Mapping):
            return {"name": tool.name, "description": tool.description, "parameters": schema}
    return convert_to_openai_function(tool)


def _mapped(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "toolSpec" in tool:
        return convert_to_openai_function(tool)
    function = _function_of(tool)
    kind, schema = tool.get("type"), next((function[key] for key in _SCHEMA_KEYS if key in function), None)
    if "name" in function and (schema is not None or kind in (None, "function", "custom")):
        return {**function, "parameters": schema}
    if title := tool.get("title"):
        rest = {key: value for key, value in tool.items() if key not in ("title", "description")}
        return {"name": title, "description": tool.get("description"), "parameters": rest}
    if kind is not None and kind not in ("function", "object"):
        raise ConfigError(
            f"a tool of type {kind!r} is run by another provider, not here: give a function, a class, a BaseTool or "
            '{"type": "function", "function": {"name": …, "parameters": {…}}}'
        )
    raise ConfigError(f"a tool needs a name (or its JSON schema a title), but has only {sorted(tool)}")


def _function_of(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """What stands under "function" in OpenAI's dictionaries, else the dictionary itself."""
    function = description.get("function")
    return function if isinstance(function, Mapping) else description


def _is_named(function: Mapping[str, Any], key: str) -> bool:
    return isinstance(function.get("name"), str) and isinstance(function.get(key), Mapping)


def _is_model(value: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(value, type) and issubclass(value, BaseModel)
