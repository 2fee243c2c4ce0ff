"""From a validated body to calls of the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from specfuse_shared.api_server.models import Model, Models
from specfuse_shared.api_server.requests.bodies import (
    AllowedChoiceBody,
    Asked,
    BodyError,
    ChatBody,
    CompletionBody,
    LongPromptError,
    MessageBody,
    ToolBody,
    ToolChoiceBody,
)
from specfuse_shared.api_server.requests.responses_api import ResponsesBody
from specfuse_shared.api_server.settings import ServerSettings
from specfuse_shared.config import SamplingParams
from specfuse_shared.errors import ConfigError, GrammarError, SpecFuseError
from specfuse_shared.frameworks import ToolUse, response_schema, value_of
from specfuse_shared.messages import Message, Tool
from specfuse_shared.serving.calls import CallOptions, choice_of, conversation_of
from specfuse_shared.text.grammars.grammar import Grammar

SMALLEST_TOP_P = 1e-6
_SETTING = re.compile(r"SamplingParams\.(\w+)")
"""The beginning of error messages about sampling."""
_SAMPLING = tuple(f.name for f in fields(SamplingParams) if f.name not in ("grammar", "logprobs", "top_logprobs"))


@dataclass(frozen=True, slots=True)
class RequestedChoice:
    """One answer of a request: its conversation and sampling."""

    messages: Sequence[Message]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Call:
    """A request as calls of the engine, with the same `options` for each of its choices."""

    model: Model
    choices: Sequence[RequestedChoice]
    options: CallOptions
    use: ToolUse = field(default_factory=ToolUse)


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns bodies into calls, with a server's `settings` and sampling `defaults`."""

    models: Models
    settings: ServerSettings
    defaults: SamplingParams

    def chat(self, body: ChatBody) -> Call:
        """The call of a chat. Raises `RequestError` or `ConfigError` if the request is not possible."""
        model, (messages, tools) = self.models.find(body.model), self.conversation(body.messages, body.tools)
        tools, choice = _allowed(tools, body.tool_choice)
        grammar, spec = self._value(body)
        use = _tool_use(tools, choice, bool(body.parallel_tool_calls), grammar)
        limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        with _in_words({} if limit == body.max_tokens else {"max_tokens": "max_completion_tokens"}):
            params = self._params(
                body, max_tokens=limit, logprobs=body.logprobs, top_logprobs=body.top_logprobs, grammar=grammar
            )
        options = CallOptions(
            tools=use.tools,
            tool_choice=use.choice,
            parallel_tool_calls=use.parallel,
            timeout=body.timeout,
            members=model.members,
        )
        return Call(model, self._choices([[*messages, *spec]], params, body.n), options, use)

    def response(self, body: ResponsesBody) -> Call:
        """The call of a response. Raises `RequestError` or `ConfigError` if the request is not possible."""
        with _in_words(_OF_RESPONSES):
            return self.chat(body.chat())

    def completion(self, body: CompletionBody) -> Call:
        """A prompt is one user turn in each member's own template. Raises `RequestError` or `ConfigError`."""
        model, prompts = self.models.find(body.model), [body.prompt] if isinstance(body.prompt, str) else body.prompt
        self._check_size(sum(map(len, prompts)))
        wants_logprobs = body.logprobs is not None and body.logprobs is not False
        top = body.logprobs if wants_logprobs and body.logprobs is not True else None
        params = self._params(body, logprobs=wants_logprobs, top_logprobs=top)
        choices = self._choices([[Message("user", prompt)] for prompt in prompts], params, body.n)
        return Call(model, choices, CallOptions(timeout=body.timeout, members=model.members))

    def conversation(
        self, messages: Sequence[MessageBody], tools: Sequence[ToolBody] | None
    ) -> tuple[list[Message], list[Tool]]:
        """Turns and tools."""
        dumped = [message.model_dump(exclude_none=True, include=_OF_A_MESSAGE) for message in messages]
        offered = [tool.model_dump(exclude_none=True) for tool in tools or ()]
        self._check_size(len(repr(dumped)) + len(repr(offered)))
        turns, read = conversation_of(dumped), list[Tool]()
        for number, tool in enumerate(offered):
            with _about(f"tools.{number}.function"):
                read.append(Tool.from_dict(tool))
        return turns, read

    def _value(self, body: ChatBody) -> tuple[Grammar | None, list[Message]]:
        """The required form of the answer, from `response_format` or `grammar`."""
        if body.response_format is None:
            return _grammar(body), []
        if body.grammar is not None:
            raise BodyError("response_format and grammar both constrain the answer: give one of them", "grammar")
        self._check_size(len(repr(body.response_format)))
        response_format = body.response_format.model_dump(by_alias=True, exclude_none=True)
        with _about("response_format", "response_format.json_schema.schema."):
            grammar, spec = value_of(*response_schema(response_format))
        self._check_size(sum(len(message.content) for message in spec))
        return grammar, spec

    def _params(self, body: Asked, **overrides: Any) -> SamplingParams:
        """The server's defaults, overridden by the body."""
        settings: Mapping[str, Any] = (
            {name: getattr(body, name) for name in _SAMPLING} | {"grammar": _grammar(body)} | overrides
        )
        settings = {name: value for name, value in settings.items() if value is not None}
        if "top_p" in settings:
            settings = {
                **settings,
                "top_p": max(settings["top_p"], SMALLEST_TOP_P),
            }  # OpenAI's 0 is the most probable token
        try:
            return SamplingParams.on_top(asdict(self.defaults), settings)
        except ConfigError as error:
            if (named := _SETTING.match(str(error))) is None:
                raise
            raise BodyError(str(error)[named.start(1) :], named[1]) from error

    def _choices(
        self, prompts: Sequence[list[Message]], params: SamplingParams, n: int | None
    ) -> list[RequestedChoice]:
        limit, count = self.settings.max_choices, len(prompts) * (n or 1)
        if count > limit:
            raise BodyError(f"a request may have {limit} answers, not {count}: send several requests", "n")
        seeds = [params.seed if params.seed is None else params.seed + i for i in range(n or 1)]
        return [RequestedChoice(prompt, replace(params, seed=seed)) for prompt in prompts for seed in seeds]

    def _check_size(self, characters: int) -> None:
        limit = self.settings.max_prompt_characters
        if characters > limit:
            raise LongPromptError(characters, limit)


def _allowed(tools: list[Tool], choice: str | ToolChoiceBody | AllowedChoiceBody | None) -> tuple[list[Tool], str]:
    """The tools that may be called, and the choice among them. Raises `BodyError` for one that is not offered."""
    if not isinstance(choice, AllowedChoiceBody):
        return tools, choice_of(choice.model_dump() if isinstance(choice, ToolChoiceBody) else choice)
    names, allowed = [tool.name for tool in tools], choice.allowed_tools
    for name in allowed.names:
        if name not in names:
            raise BodyError(f"tool_choice allows the tool {name!r}, which is not in tools: {names}", "tool_choice")
    return [tool for tool in tools if tool.name in allowed.names], choice_of(allowed.mode)


_OF_A_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "function_call"}


_OF_RESPONSES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    ".function.parameters": ".parameters",
    ".function": "",
    "messages": "input",
}
"""Names of chat fields in the Responses API."""


def _grammar(body: Asked) -> Grammar | None:
    with _about("grammar"):
        return None if body.grammar is None else Grammar(**body.grammar.model_dump())


def _tool_use(tools: Sequence[Tool], choice: str, parallel: bool, grammar: Grammar | None) -> ToolUse:
    """The use of tools with valid schemas. Raises `ConfigError`, which names the tool and its field."""
    try:
        use = ToolUse(tools, choice, parallel, grammar)
        use.grammar()
    except ConfigError as error:
        error.param = "tool_choice" if str(error).startswith("tool_choice") else "tools"
        if isinstance(error, GrammarError) and error.tool is not None:
            number = [tool.name for tool in tools].index(error.tool)
            field = f".{error.field}" if error.field else ""
            error.param = f"tools.{number}.function.parameters{field}"
        raise
    return use


@contextmanager
def _about(param: str, of_schema: str | None = None) -> Iterator[None]:
    """Sets `param` of errors in this block: to the field, or for an error in a schema, to `of_schema` and its place."""
    try:
        yield
    except SpecFuseError as error:
        field = error.field if isinstance(error, GrammarError) else None
        error.param = f"{of_schema}{field}" if of_schema and field else param
        raise


@contextmanager
def _in_words(names: Mapping[str, str]) -> Iterator[None]:
    """Replaces field names in errors of this block by those that the client used."""
    try:
        yield
    except SpecFuseError as error:
        for ours, theirs in names.items():
            if error.param and ours in error.param:
                error.param = error.param.replace(ours, theirs, 1)
                error.args = tuple(str(arg).replace(ours, theirs) for arg in error.args)
                break
        raise
