"""A member: one language model with its own tokenizer, template and limits.

`Member` and `MemberSession` are the boundary between the method and a model: a call does a whole stage of a round
and speaks text and numbers. Stages are generators, so that many answers can share a forward: they yield what they
want fed and return their result. `specfuse_shared.members.local` holds the one kind there is: a transformers model in
this process.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from specfuse_shared.sampling_params import SamplingParams
from specfuse_shared.text.codec import Codec
from specfuse_shared.types import MemberReport, Message, Tool

if TYPE_CHECKING:
    from specfuse_shared.members.sequence import ForwardRequest

Stage: TypeAlias = "Generator[ForwardRequest, None, Any]"
"""A stage of one member of one answer: yields feeds, returns its result."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A member's continuation of the answer. `ends`: it ended its turn. `tokens`: how many it sampled."""

    text: str
    ends: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of a member's thoughts; `ended`: they are over, and the answer may begin."""

    text: str
    ended: bool


@dataclass(frozen=True, slots=True)
class Question:
    """A candidate put to a verifier: its text, and whether an end of turn follows."""

    text: str
    ends: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's log p of each of its own tokens of a candidate (and of the end of turn), and their bytes."""

    logprobs: tuple[float, ...]
    token_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Bytes of running answers and of remembered prefixes; prompt tokens that were not read again, ever."""

    cache_bytes: int
    prefix_bytes: int
    reused_tokens: int


class MemberSession(Protocol):
    """One member's side of one answer. Between calls its context is the prompt and the committed answer."""

    prompt_tokens: int

    @property
    def answer_tokens(self) -> int:
        """Tokens of the committed answer, in the member's own encoding."""
        ...

    @property
    def thinking_tokens(self) -> int:
        """Tokens of its own thoughts, which stand between its prompt and the answer."""
        ...

    @property
    def fed(self) -> int:
        """Tokens that went through the model after the prompt."""
        ...

    def prefill(self) -> Stage:
        """Read the prompt; called once, first."""
        ...

    def think(self, limit: int, most: int) -> Stage:
        """Think up to `limit` more tokens, `most` in all, before the answer begins → `Thought`."""
        ...

    def draft(self, limit: int, round_index: int) -> Stage:
        """Continue the answer by at most `limit` own tokens, cut where every member can follow → `Draft`."""
        ...

    def verify(self, questions: Sequence[Question]) -> Stage:
        """Judge candidates for the next segment by this member's own probabilities → a `Verdict` for each."""
        ...

    def commit(self, text: str) -> Stage:
        """`text` is now part of the answer."""
        ...

    def draft_alone(self, limit: int, round_index: int) -> Stage:
        """Plain decoding for the last active member: up to `limit` further tokens, committed as drafted → `Draft`."""
        ...

    def release(self, remember: bool = False) -> None:
        """Free the cache; `remember` it for prompts that begin the same way. Safe to call twice."""
        ...


class Member(Protocol):
    """A loaded model that can take part in answers. Safe to use for several answers in turn.

    `devices`: where it computes, with the share of its caches that each holds. `thinks`: before it answers.
    """

    name: str
    weight: float
    devices: Mapping[str, float]
    codec: Codec
    context_limit: int | None
    thinks: bool
    bytes_per_token: int
    vocabulary_size: int

    @property
    def report(self) -> MemberReport:
        """What it turned out to be, as of now."""
        ...

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Prompt ids of a conversation and the tools that its answer may call. Raises `RequestError`."""
        ...

    def open(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> MemberSession:
        """A new answer to `prompt`."""
        ...

    def cache_use(self) -> CacheUse:
        """Memory for answers now."""
        ...

    def remember(self, limit: int) -> None:
        """Keep at most `limit` bytes of past answers, for prompts that begin the same way."""
        ...
