"""The shared nouns: messages in, candidates, rounds and results out. Plain data, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal, Self

from specfuse_shared.errors import RequestError

Role = Literal["system", "user", "assistant", "tool"]
StageName = Literal["prefill", "think", "draft", "verify", "commit", "score"]
ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")
_OPENAI_ROLES: Mapping[str, Role] = {"developer": "system", "function": "tool"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that an answer may call. `parameters`: JSON schema of its arguments, an object.

    `strict` refuses a schema with keywords that no grammar can promise; else these are ignored.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise RequestError(f"a tool needs a name, not {self.name!r}")
        if not isinstance(self.parameters, Mapping) or self.parameters.get("type", "object") != "object":
            raise RequestError(f"the parameters of tool {self.name!r} must be the JSON schema of an object")

    @classmethod
    def from_dict(cls, tool: Mapping[str, Any]) -> Self:
        """A tool as OpenAI's clients describe it: {"type": "function", "function": {"name": …, "parameters": …}}.

        Raises `RequestError` for tools that a provider runs itself, such as {"type": "web_search"}.
        """
        function = tool.get("function", tool)
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping) or "name" not in function:
            raise RequestError(
                f"the tool {dict(tool)!r} is none that this engine can offer: give a function with a name and the "
                "JSON schema of its parameters (tools that a provider runs itself do not exist here)"
            )
        given = {key: function.get(key) for key in ("description", "parameters", "strict")}
        return cls(function["name"], **{key: value for key, value in given.items() if value is not None})

    def as_function(self) -> dict[str, Any]:
        """The tool as chat templates and other frameworks describe it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant message made: tool `name`, its `arguments` and an `id` for the answer."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None

    @classmethod
    def from_dict(cls, call: Mapping[str, Any]) -> Self:
        """A call as OpenAI's clients write it, its arguments as JSON. Raises `RequestError`."""
        function = call.get("function")
        if not isinstance(function, Mapping) or "name" not in function:
            raise RequestError(f"a tool call needs a function with a name, not {dict(call)!r}")
        return cls(function["name"], arguments_of(function.get("arguments")), call.get("id"))


def arguments_of(arguments: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """The arguments of a call, which may come as JSON. Raises `RequestError` if they are no object."""
    if isinstance(arguments, Mapping):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (TypeError, json.JSONDecodeError):
        parsed = None
    if not isinstance(parsed, dict):
        raise RequestError(f"the arguments of a tool call are no JSON object: {arguments!r}")
    return parsed


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    `content` is text and stays text: control strings inside it never become control tokens of a member.
    """

    role: Role
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise RequestError(f"message role {self.role!r} is unknown: use one of {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise RequestError(
                f"message content must be text, not {type(self.content).__name__}: this engine reads text only"
            )

    @classmethod
    def from_dict(cls, message: Mapping[str, Any]) -> Self:
        """A message as OpenAI's clients write it; its content is text, or parts of it. Raises `RequestError`."""
        known = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "audio")
        if unknown := sorted(set(message) - set(known)):
            raise RequestError(f"a message has no {unknown}: it may hold {', '.join(known[:5])}")
        return cls(
            role=_OPENAI_ROLES.get(message.get("role", ""), message.get("role", "")),
            content=_text_of(message.get("content")),
            name=message.get("name"),
            tool_calls=tuple(map(ToolCall.from_dict, message.get("tool_calls") or ())),
            tool_call_id=message.get("tool_call_id"),
        )


def _text_of(content: Any) -> Any:
    """The text of OpenAI's message content: a string, or parts of text."""
    if not isinstance(content, (list, tuple)):
        return content or ""
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"a message holds a part of type {kind!r}: this engine reads text only")
    return "".join(str(part.get(part["type"]) or "") for part in content)


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The ensemble ended its turn, or a stop string appeared (`EnsembleResult.stop_sequence`)."""
    LENGTH = "length"
    """`max_tokens` was reached, or no member had context left."""
    REPETITION = "repetition"
    """The ensemble could only say the same again (`EnsembleConfig.repetition_guard`)."""


@dataclass(frozen=True, slots=True)
class MemberUsage:
    """What one member computed for one answer, in its own tokens.

    `prompt`: prompt length. `drafted`: tokens it sampled. `fed`: tokens that went through the model after the
    prompt (drafts, verifications, re-encodings). `answer`: length of the answer in its own
    tokens; `thinking`: of its thoughts before.
    """

    prompt: int
    drafted: int
    fed: int
    answer: int
    thinking: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the reference member (`EnsembleConfig.reference`), and the work of each member."""

    prompt_tokens: int
    completion_tokens: int
    reference: str
    members: Mapping[str, MemberUsage] = field(default_factory=dict)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    """One member's draft of the next segment, as it was judged.

    `drafters`: the members that wrote this very text, best placed first. `ends`: it ends the answer.
    `scores`: verifier name → score in [0, 1], empty where nothing had to be verified. `score`: the aggregate, 0 where
    it `repeats` what the answer says already (the repetition guard).
    """

    text: str
    drafters: tuple[str, ...]
    ends: bool
    tokens: int
    scores: Mapping[str, float] = field(default_factory=dict)
    score: float | None = None
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class MemberExit:
    """A member left the answer: by "retention" (exit policy), its full "context", or a "fault" of its own."""

    member: str
    round: int
    reason: Literal["retention", "context", "fault"]
    retention: float | None = None


@dataclass(frozen=True, slots=True)
class MemberFault:
    """A member failed in a stage and left the answer, which went on with the others."""

    member: str
    stage: StageName
    message: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer in the reference member's encoding: its text, natural log p, and its UTF-8 bytes.

    `token` holds U+FFFD where a character is spread over several tokens; `bytes` are exact.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """Seconds spent in the stages of one round."""

    draft: float = 0.0
    verify: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.commit


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The ledger of one round.

    `text` is the winner's segment as it became context; `start`/`end` are character offsets in the
    generated text (before a stop string or `max_tokens` cut it). `weights` are the verifiers' weights used in
    this round, `retention` the exit policy's probabilities after it (empty where it did not run).
    `verified` is False if all members agreed or only one was left.
    """

    index: int
    active: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    winner: str
    text: str
    start: int
    end: int
    verified: bool
    weights: Mapping[str, float]
    retention: Mapping[str, float]
    exits: tuple[MemberExit, ...]
    timing: RoundTiming


@dataclass(frozen=True, slots=True)
class MemberSummary:
    """One member's part in an answer, over all rounds."""

    member: str
    segments_won: int
    mean_score: float | None
    weight: float | None
    exit_round: int | None
    exit_reason: str | None


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """What is known of a finished answer (`specfuse_shared.results.EnsembleResult`)."""

    text: str
    finish_reason: FinishReason
    stop_sequence: str | None
    usage: Usage
    rounds: tuple[RoundRecord, ...]
    members: tuple[str, ...]
    seed: int | None
    prefill_seconds: float
    first_segment_seconds: float | None
    total_seconds: float
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the answer's tokens, where `SamplingParams.logprobs` asked for them."""
    thinking: Mapping[str, str] = field(default_factory=dict)
    """Member → what it thought before the answer."""
    warnings: tuple[MemberFault, ...] = ()
    """Members that failed and left the answer."""

    def summary(self) -> tuple[MemberSummary, ...]:
        """What each member contributed, in the order of the configuration."""
        return tuple(_summarise(name, self.rounds) for name in self.members)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe form of the whole result."""
        data = asdict(self)
        data["finish_reason"] = str(self.finish_reason)
        data["usage"]["total_tokens"] = self.usage.total_tokens
        return data


def _summarise(name: str, rounds: tuple[RoundRecord, ...]) -> MemberSummary:
    own = [c.score for r in rounds for c in r.candidates if name in c.drafters and c.score is not None]
    leave = next((e for r in rounds for e in r.exits if e.member == name), None)
    weights = [r.weights[name] for r in rounds if name in r.weights]
    return MemberSummary(
        member=name,
        segments_won=sum(r.winner == name for r in rounds),
        mean_score=sum(own) / len(own) if own else None,
        weight=weights[-1] if weights else None,
        exit_round=leave.round if leave else None,
        exit_reason=leave.reason if leave else None,
    )


@dataclass(frozen=True, slots=True)
class MemberReport:
    """What a loaded member turned out to be (`EnsembleEngine.describe()`, `specfuse-llm doctor`).

    `memory_bytes`: its weights. `device`: one, or those that share the member joined by "+". `verification`: "packed"
    (all candidates in one forward) or "rows" (one forward a candidate). `probe_error`: largest |Δ log p| between the
    cached path and the model's own plain forward. `graphs`: "captured" (its steps run as CUDA graphs), or "eager: " and
    why not. `template`: "own", "given" or "plain". `context`: token limit, None if the model states none.
    """

    name: str
    model: str
    architecture: str
    parameters: int
    memory_bytes: int
    device: str
    dtype: str
    quantization: str | None
    attention: str
    verification: Literal["packed", "rows"]
    probe_error: float
    graphs: str
    template: Literal["own", "given", "plain"]
    context: int | None
    stop_token_ids: tuple[int, ...]
    load_seconds: float
