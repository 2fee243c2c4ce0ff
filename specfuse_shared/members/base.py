"""A member as the method sees it, and the lane that runs it.

A `Member` is what the coordinator has of a language model: `MemberInfo`, plain facts, and its side of text (template
and tokenizer are local wherever the model is). Its model is behind a `Lane`, which takes whole stages of a round as
plain data (`specfuse_shared.members.stages`) and gives plain data back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from specfuse_shared.members.stages import Fault, Reply, StageRequest
from specfuse_shared.messages import Message, Tool
from specfuse_shared.text.codec import Codec
from specfuse_shared.text.grammars.grammar import Grammar
from specfuse_shared.types import MemberReport


class OnForward(Protocol):
    """Called after a forward of a member, which so many answers shared and which took so many seconds.

    A request to a server counts as one, and may have had it take several `steps`, one for each token.
    """

    def __call__(self, member: str, answers: int, seconds: float, steps: int = 1) -> None: ...


def nobody_listens(member: str, answers: int, seconds: float, steps: int = 1) -> None:
    """An `OnForward` of a lane whose forwards nobody counts."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """Facts about a loaded member; what admission and the method need to know of its model.

    `devices`: where it computes, with the share of its caches that each holds; none, where memory is nobody's affair
    here. `thinks`: before it answers. `smallest_row`: slots of its smallest cache row; rows are powers of two.
    `report`: what it turned out to be. `drafts_under_grammar`: it does not only judge where a grammar binds the answer.
    `fixed_blocks`: rows come in blocks that stay where they are.
    `cache_tokens`: its cache is there from the start and holds so many tokens of all answers, and so many branches
    (`cache_branches`); None where answers take memory as they come.
    `may_guess`: it makes use of guesses of what comes next (`EnsembleConfig.speculation`).
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
    fixed_blocks: bool = False
    may_guess: bool = False
    cache_tokens: int | None = None
    cache_branches: int | None = None


class TextSide(Protocol):
    """A member's side of text: `specfuse_shared.text.member_text.MemberText`."""

    @property
    def codec(self) -> Codec:
        """Its canonical encoding of answers."""
        ...

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Prompt ids of a conversation and the tools that its answer may call. Raises `RequestError`."""
        ...

    def encode_thoughts(self, thoughts: str = "") -> list[int]:
        """Ids between a prompt and the answer to it, of a member that thinks."""
        ...

    def prepare(self, grammar: Grammar | None = None) -> None:
        """Get ready for answers under a grammar, or under any. Raises `ConfigError` where the tokenizer cannot."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an ensemble as the coordinator has it."""

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
    """Bytes of running answers and of remembered prefixes; prompt tokens that were not read again, ever."""

    cache_bytes: int = 0
    prefix_bytes: int = 0
    reused_tokens: int = 0

    def __add__(self, other: CacheUse) -> CacheUse:
        return CacheUse(
            self.cache_bytes + other.cache_bytes,
            self.prefix_bytes + other.prefix_bytes,
            self.reused_tokens + other.reused_tokens,
        )


class Lane(Protocol):
    """Members that share devices, and whoever runs their stages: in this process, or behind a wire.

    A lane runs a stage from its first forward to its last by itself, batches what it has, and recovers from lack of
    memory. Stages of one member of one answer come one after another; every request has exactly one result, but
    for those that a `Close` overtakes. Every method may be called from any thread and waits for no forward.
    """

    @property
    def members(self) -> Sequence[MemberInfo]:
        """Its members, as of now."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes for answers on each device, with the weights in place; equal names are the same device."""
        ...

    def remember(self, limits: Mapping[str, int]) -> None:
        """Keep at most so many bytes of each member's past answers, for prompts that begin the same way."""
        ...

    def reply_to(self, reply: Reply) -> None:
        """Give all results to `reply`; called once, before any stage is asked for."""
        ...

    def submit(self, requests: Sequence[StageRequest]) -> None:
        """Run stages; those of one call are drafted and verified together where they can be."""
        ...

    def cache_use(self) -> CacheUse:
        """Memory for answers now."""
        ...

    @property
    def fault(self) -> Fault | None:
        """Why every stage fails now; None while stages run. A fatal one ends the engine."""
        ...

    def close(self) -> None:
        """Free all caches and end. Stages that still run give no result. Safe to call twice."""
        ...
