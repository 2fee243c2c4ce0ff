"""Validated request bodies: OpenAI's fields and the engine's own settings.

Fields without meaning here (`user`, `store`, …) are ignored. Fields that would change the answer but are not supported
raise an error that names them. So do unknown fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from specfuse_shared.config import TopLogprobs
from specfuse_shared.errors import RequestError
from specfuse_shared.frameworks import TRANSPORT_OPTIONS, Detail
from specfuse_shared.messages import earlier_fields
from specfuse_shared.validation import unknown_setting

SEED_LIMIT = 2**63
_IGNORED = (TRANSPORT_OPTIONS - {"stream_options"}) | {
    *("prompt_cache_retention", "reasoning_effort", "verbosity", "prediction"),
}
"""Fields about a provider's operation, not about the answer."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
}
_INSTEAD = {
    "presence_penalty": "use repetition_penalty, which has a similar effect",
    "frequency_penalty": "use repetition_penalty, which has a similar effect",
    "functions": "use tools",
    "function_call": "use tool_choice",
}

B = TypeVar("B", bound="Body")
T = TypeVar("T")


class _FirstError(FailFast):
    __hash__ = object.__hash__  # unions of types hash their annotations


Several = Annotated[list[T], _FirstError()]
"""A list that is validated up to its first invalid item: a million errors would take seconds."""
MOST_FIELDS = 64
"""Maximum number of fields of an object, except free JSON."""
MOST_VALUES = 100_000
"""Maximum number of objects, lists and scalars in a body; a thousand turns with a hundred tools have ten thousand."""
MOST_TURNS = 10_000
"""Maximum number of turns in a conversation."""
_STRING = re.compile(rb'(?s)"(?:[^"\\]|\\.)*+"?')
_OF_UNIONS = re.compile(r"(list|dict)\[|function-|item-|\w+Body$|(str|bool|int|float|constrained-\w+)$")
"""Names of a union's branches, which pydantic adds to the location of a field."""
LONGEST_NAME = 80
"""Maximum number of characters of an unknown field's name in an error."""


class Body(BaseModel):
    """A JSON body. Its errors name the field and the accepted values."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted without effect."""
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL
    """Unsupported fields, with the values that are accepted because they change nothing."""
    instead: ClassVar[Mapping[str, str]] = _INSTEAD
    """Advice about unsupported fields."""

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"has {len(value)} fields, and the limit is {MOST_FIELDS}")
        return value


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Extension(Body):
    """The field `specfuse` of a request: the details that the response includes."""

    events: bool = False
    """Every event of the engine, for this package's clients."""
    ledger: Detail = "summary"
    """The detail of the record at the end of the answer."""
    report: bool = False
    """The HTML report of the answer so far, a few times a second; at the end, also as a file."""


class GrammarBody(Body):
    kind: Literal["json_schema", "regex", "choice", "lark"]
    source: str
    strict: bool = True


class FunctionBody(Body):
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody


class NamedBody(Body):
    name: str


class ToolChoiceBody(Body):
    type: Literal["function"]
    function: NamedBody


class AllowedToolsBody(Body):
    """A part of the tools, one of which may ("auto") or must ("required") be called."""

    mode: Literal["auto", "required"]
    tools: Several[dict[str, JsonValue]] = Field(min_length=1)

    @property
    def names(self) -> list[str]:
        """Names of the tools, in the form of chats or of the Responses API."""
        functions = (tool.get("function", tool) for tool in self.tools)
        return [str(function.get("name") if isinstance(function, dict) else function) for function in functions]


class AllowedChoiceBody(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsBody


class MessageBody(Body):
    """A turn. Unknown fields in turns of models and tools are ignored."""

    role: str
    content: str | Several[dict[str, JsonValue] | str] | None = None
    name: str | None = None
    tool_calls: JsonValue = None
    tool_call_id: JsonValue = None
    function_call: JsonValue = None
    refusal: JsonValue = None
    annotations: JsonValue = None
    audio: JsonValue = None

    @model_validator(mode="before")
    @classmethod
    def _earlier(cls, value: Any) -> Any:
        return earlier_fields(value) if isinstance(value, dict) else value


class SchemaBody(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, JsonValue] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class FormatBody(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaBody | None = None


class Asked(Body):
    """Fields that chats and completions share: sampling, and the form of the response."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-SEED_LIMIT, lt=SEED_LIMIT)
    stop: str | Several[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    grammar: GrammarBody | None = None
    max_thinking_tokens: int | None = None
    n: int | None = Field(default=None, ge=1)
    timeout: float | None = Field(default=None, gt=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    specfuse: Extension | None = None

    ignored = frozenset(_IGNORED)

    @property
    def extension(self) -> Extension:
        return self.specfuse or Extension()

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(Asked):
    """POST /v1/chat/completions."""

    messages: Several[MessageBody] = Field(min_length=1, max_length=MOST_TURNS)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Several[ToolBody] | None = None
    tool_choice: str | ToolChoiceBody | AllowedChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    response_format: FormatBody | None = None


class CompletionBody(Asked):
    """POST /v1/completions. A prompt is one user turn."""

    prompt: str | Several[str]
    logprobs: bool | TopLogprobs | None = None

    @field_validator("prompt")
    @classmethod
    def _some(cls, value: str | list[str]) -> str | list[str]:
        if value == []:
            raise ValueError("holds no prompt")
        return value


class TokenizeBody(Body):
    """POST /tokenize: the tokens of a text, or the number of tokens of a conversation."""

    model: str
    prompt: str | None = None
    messages: Several[MessageBody] | None = Field(default=None, min_length=1, max_length=MOST_TURNS)
    tools: Several[ToolBody] | None = None


class BodyError(RequestError):
    """A body is not JSON, or a field is invalid; `param` is the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class LongPromptError(BodyError):
    """A prompt has more characters than the server accepts, in the wording that OpenAI's clients recognise."""

    def __init__(self, count: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {count} characters, and this model's maximum context length is {limit} characters here: "
            "shorten it",
            "messages",
        )


def read_body(kind: type[B], raw: bytes) -> B:
    """The body as `kind`. Raises `BodyError`, which names the first invalid field."""
    quotes = raw.count(b'"') - raw.count(rb"\"")  # a lower bound on the quotes around strings
    # counted before parsing, because a million empty lists take seconds
    if quotes > 2 * MOST_VALUES or sum(map(_STRING.sub(b"", raw).count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise BodyError(
            f"the body holds more than {MOST_VALUES} values or names: shorten the conversation, or its tools"
        )
    try:
        parsed = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise BodyError(f"the body is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BodyError("the body is not a JSON object")
    if len(parsed) > MOST_FIELDS:
        raise BodyError(f"the body has {len(parsed)} fields, and the limit is {MOST_FIELDS}")
    for name in sorted(set(parsed) - set(kind.model_fields)):
        if name in kind.ignored or parsed[name] is None or parsed[name] in kind.neutral.get(name, ()):
            del parsed[name]
        elif name in kind.neutral:
            hint = kind.instead.get(name, "leave it out")
            raise BodyError(f"{name} is not supported here: {hint}", name)
        else:
            fields = [*kind.model_fields, *kind.ignored, *kind.neutral]
            short_name = name[:LONGEST_NAME]
            raise BodyError(str(unknown_setting("a request", short_name, fields)), short_name)
    try:
        return kind.model_validate(parsed)
    except ValidationError as error:
        raise _named(error) from None


def _named(error: ValidationError) -> BodyError:
    """The deepest error. In a union, that is the error of the best matching branch, with the right type if possible."""
    details = error.errors(include_url=False, include_input=False)
    deepest = max(details, key=lambda e: (len(e["loc"]), not e["type"].endswith("_type")))
    place = ".".join(part for part in map(str, deepest["loc"]) if not _OF_UNIONS.match(part))
    message = deepest["msg"].removeprefix("Value error, ")
    return BodyError(f"{place}: {message[0].lower()}{message[1:]}", place)
