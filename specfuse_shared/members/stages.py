"""The interface between answers (`fusion`) and members: a member, its lane, and the data that they exchange.

- `Member` has plain facts about a language model (`MemberInfo`) and its text side: template and tokenizer are always
  local.
- `Lane` runs the models of members. It takes whole stages of a round and returns their results.
- `StageRequest` names a stage of a member for an answer, and `StageResult` has its result. Both are plain data, which
  can be sent to another process or machine. They hold text and numbers. The only token ids among them are those
  of prompts, of drafts with `logprobs`, and of the most probable alternatives.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from specfuse_shared.candidate import CandidateLogprobs
from specfuse_shared.config import SamplingParams
from specfuse_shared.messages import Message, Tool
from specfuse_shared.text.codec import Codec
from specfuse_shared.text.grammars.grammar import Grammar
from specfuse_shared.types import MemberReport, StageName

# ── requests ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Open:
    """Begin an answer: prefill `prompt`. `speculates`: the member may guess next tokens, to save forward passes."""

    stage: ClassVar[StageName] = "prefill"
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    speculates: bool = False


@dataclass(frozen=True, slots=True)
class Think:
    """Think up to `limit` more tokens, `total_limit` in all, before the answer begins → `Thought`."""

    stage: ClassVar[StageName] = "think"
    limit: int
    total_limit: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Continue the answer by about `limit` tokens, up to a word's end, where every tokenizer can continue → `Drafted`.

    `min_tokens_left`: the turn may end only after this number of tokens. `guess`: a predicted draft, which affects
    speed, not output. `commit`: text that is already part of the answer, to be committed first.
    """

    stage: ClassVar[StageName] = "draft"
    limit: int
    round_index: int
    min_tokens_left: int = 0
    guess: str = ""
    commit: str = ""


@dataclass(frozen=True, slots=True)
class DraftAlone:
    """Plain decoding for the last active member: at most `limit` tokens, committed as drafted → `Drafted`.

    `top`: also return log p of each token, with this number of most probable alternatives; None: without log p.
    """

    stage: ClassVar[StageName] = "draft"
    limit: int
    round_index: int
    min_tokens_left: int = 0
    top: int | None = None


@dataclass(frozen=True, slots=True)
class ScoringQuery:
    """A candidate for a verifier: its text, and whether an end of turn follows.

    `overrun`: its author's text after the candidate, which may come next.
    """

    text: str
    ends: bool
    overrun: str = ""


@dataclass(frozen=True, slots=True)
class Verify:
    """Compute log p of candidates for the next segment, in the member's own tokens → `Verdicts`.

    `top`: number of most probable alternatives to return for each token.
    """

    stage: ClassVar[StageName] = "verify"
    candidates: tuple[ScoringQuery, ...]
    top: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """Append `text`, which is now part of the answer. Sent to members that get no `Draft` with the same requests."""

    stage: ClassVar[StageName] = "commit"
    text: str


@dataclass(frozen=True, slots=True)
class Close:
    """Forget the answer → `Closed`, also if it is unknown.

    A stage that still runs for it stops before its next forward pass, and gives no result. `remember`: keep the cache
    for prompts that begin the same way.
    """

    stage: ClassVar[StageName] = "commit"
    remember: bool = False


Op = Open | Think | Draft | DraftAlone | Verify | Commit | Close


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A whole stage of one member for one answer."""

    answer: int
    member: str
    op: Op


# ── results ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Drafted:
    """A member's continuation of the answer. `ends`: it ended its turn. `tokens`: number of sampled tokens.

    `overrun`: text that the member drafted after `text`, and that was cut off. `ids`, `logprobs` and `tops`: the
    committed tokens, their natural log p and the most probable alternatives, if `DraftAlone` requests them.
    """

    text: str
    ends: bool
    tokens: int
    overrun: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[Top, ...] = ()


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of a member's reasoning; `ended`: it is complete, and the answer may begin."""

    text: str
    ended: bool


Top = tuple[tuple[int, float], ...]
"""Ids of the most probable tokens at one position, and their natural log p; the most probable first."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Each candidate as the verifier sees it, in the order of the request.

    `tops`: the most probable alternatives to each token of each candidate, if requested.
    """

    each: tuple[CandidateLogprobs, ...]
    tops: tuple[tuple[Top, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """The member's cache of the answer was freed."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one answer so far, in the member's own encoding.

    `answer`: committed tokens. `thinking`: tokens of the member's reasoning, which lie between prompt and answer.
    `computed`: tokens that went through the model after the prompt, in `forwards` forward passes. `guessed`: guesses
    among them, with `accepted` right ones.
    """

    answer: int = 0
    thinking: int = 0
    computed: int = 0
    forwards: int = 0
    guessed: int = 0
    accepted: int = 0


NOTHING_YET = TokenCounts()


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a stage failed: the error's class and message, and where it came from (`details`, for logs).

    `is_fatal`: a lane of this process broke in an unknown state, so the engine must stop.
    """

    kind: str
    message: str
    details: str = ""
    is_fatal: bool = False

    @classmethod
    def of(cls, error: BaseException, *, is_fatal: bool = False) -> Self:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)), is_fatal)


Value = Drafted | Thought | Verdicts | Closed | None


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of a request: a value, or a fault."""

    answer: int
    member: str
    value: Value = None
    counts: TokenCounts = NOTHING_YET
    error: Fault | None = None


def unanswered(request: StageRequest, fault: Fault) -> StageResult:
    """The result of a request to a lane that is gone: there is no cache left to close."""
    if isinstance(request.op, Close):
        return StageResult(request.answer, request.member, Closed())
    return StageResult(request.answer, request.member, error=fault)


Reply = Callable[[Sequence[StageResult]], None]
"""Takes results, from any thread, in any order."""


def ignore_results(results: Sequence[StageResult]) -> None:
    """The `Reply` of a lane before `reply_to`."""


class OnForward(Protocol):
    """Called after a forward pass of a member, with the number of answers in it and its seconds.

    A request to a server counts as one, and may comprise several `steps`, one for each token.
    """

    def __call__(self, member: str, answers: int, seconds: float, steps: int = 1) -> None: ...


def ignore_steps(member: str, answers: int, seconds: float, steps: int = 1) -> None:
    """An `OnForward` that does nothing."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """Facts about a loaded member, for admission and answers.

    `devices`: its devices, each with the share of the caches on it; empty if its memory is managed elsewhere.
    `thinks`: it reasons before it answers. `smallest_row`: tokens in its smallest cache row (a power of two) or page.
    `report`: facts for users. `drafts_under_grammar`: whether it also drafts under a grammar.
    `cache_tokens`, `cache_branches`: tokens and parallel sequences that its preallocated cache holds for all answers;
    None if answers allocate memory as needed.
    `may_guess`: it supports guesses of the next tokens (`EnsembleConfig.speculation`).
    """

    name: str
    weight: float
    devices: Mapping[str, float]
    context_limit: int | None
    thinks: bool
    bytes_per_token: int
    smallest_row: int
    vocabulary_size: int
    report: MemberReport
    drafts_under_grammar: bool = True
    may_guess: bool = False
    cache_tokens: int | None = None
    cache_branches: int | None = None

    @property
    def has_pages(self) -> bool:
        """Whether `cache_tokens` are held in pages of `smallest_row` tokens."""
        return self.cache_tokens is not None and self.smallest_row > 1


class TextSide(Protocol):
    """A member's template and tokenizer: `specfuse_shared.text.chat_template.MemberText`."""

    @property
    def codec(self) -> Codec:
        """Encodes an answer as the tokenizer encodes the whole text, no matter which tokens were drafted."""
        ...

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Prompt ids of a conversation and the tools that its answer may call. Raises `RequestError`."""
        ...

    def encode_thoughts(self, thoughts: str = "") -> list[int]:
        """Ids between a prompt and its answer, for a member that thinks."""
        ...

    def prepare(self, grammar: Grammar | None = None) -> None:
        """Prepare for answers under this grammar; None: any. Raises `ConfigError` if the tokenizer has no support."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an ensemble: facts about its model, and its text side."""

    info: MemberInfo
    text: TextSide

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def context_limit(self) -> int | None:
        return self.info.context_limit

    @property
    def codec(self) -> Codec:
        return self.text.codec

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        return self.text.encode_prompt(messages, tools)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Bytes of running answers and of remembered prefixes; prompt tokens so far that came from such a prefix."""

    cache_bytes: int = 0
    prefix_bytes: int = 0
    reused_tokens: int = 0

    def __add__(self, more: CacheUse) -> CacheUse:
        return CacheUse(
            self.cache_bytes + more.cache_bytes,
            self.prefix_bytes + more.prefix_bytes,
            self.reused_tokens + more.reused_tokens,
        )


class Lane(Protocol):
    """Members that share devices, or all members on servers, and their runner, in this process or elsewhere.

    A lane runs each stage from its first forward pass to its last, batches stages, and recovers when memory runs
    out. Stages of one member of one answer come one after another. Every request has exactly one result, except
    requests that a `Close` overtakes. Any thread may call every method. Only `close` waits for a forward pass.
    """

    @property
    def members(self) -> Sequence[MemberInfo]:
        """Its members at present."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes for answers on each device, after loading the weights. Lanes that name the same device share it."""
        ...

    def remember(self, limits: Mapping[str, int]) -> None:
        """Keep at most this number of bytes of each member's past answers, for prompts with the same prefix."""
        ...

    def reply_to(self, reply: Reply) -> None:
        """Pass all results to `reply`. Called once, before any `submit`."""
        ...

    def submit(self, requests: Sequence[StageRequest]) -> None:
        """Run stages; the stages of one call share forward passes if possible."""
        ...

    def cache_use(self) -> CacheUse:
        """The memory that answers use now."""
        ...

    @property
    def fault(self) -> Fault | None:
        """Why every stage fails now; None while stages run. A fatal one ends the engine."""
        ...

    def close(self) -> None:
        """Free all caches and end. Stages that still run give no result. Safe to call twice."""
        ...
