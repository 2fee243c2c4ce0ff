"""The typed events of one answer: start, thoughts, then segments, exits and warnings, then the finish."""

from __future__ import annotations

from dataclasses import dataclass

from specfuse_shared.results import EnsembleResult
from specfuse_shared.types import MemberExit, RoundRecord, StageName, TokenLogprob


@dataclass(frozen=True, slots=True)
class StartEvent:
    """The request was accepted and its prompt is in every member's cache."""

    members: tuple[str, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ThinkingEvent:
    """A piece of a member's thoughts, before the answer begins. Thoughts are not part of the answer."""

    member: str
    text: str


@dataclass(frozen=True, slots=True)
class SegmentEvent:
    """Verified text, as soon as it can be shown.

    `text` may lag behind `record.text` by a few characters that could still become a stop string or belong to an
    unfinished character. `start` and `end` are its character offsets in the final answer. `record` is None for text
    that was held back and is released at the end. `logprobs`: of the tokens that end in this text, with
    `SamplingParams.logprobs`, as long as the reference member takes part.
    """

    text: str
    start: int
    end: int
    record: RoundRecord | None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ExitEvent:
    """A member left this answer."""

    exit: MemberExit


@dataclass(frozen=True, slots=True)
class WarningEvent:
    """A member failed and left this answer, which goes on with the others. The fields are those of `MemberFault`."""

    member: str
    stage: StageName
    message: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event: the whole result."""

    result: EnsembleResult


Event = StartEvent | ThinkingEvent | SegmentEvent | ExitEvent | WarningEvent | FinishEvent
