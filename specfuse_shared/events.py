"""The typed events of one answer: start, reasoning, segments, exits and warnings, finish.

Also the result of an answer: its record, and the HTML report made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specfuse_shared.agreement import Difference, differences_of
from specfuse_shared.errors import SpecFuseError
from specfuse_shared.types import AnswerRecord, MemberExit, RoundRecord, StageName, TokenLogprob


class EnsembleResult(AnswerRecord):
    """A finished answer. `text` is exactly the concatenation of the streamed `SegmentEvent.text`."""

    __slots__ = ()

    def to_html(self, title: str | None = None) -> str:
        """A report of the answer as one HTML file that needs no network.

        Args:
            title: The heading, for example the question.

        Returns:
            The HTML document.

        Example:
            ```python
            from pathlib import Path
            from tempfile import mkdtemp

            from specfuse_shared import SamplingParams

            result = engine.generate("Name a colour.", SamplingParams(max_tokens=8))
            Path(mkdtemp(), "answer.html").write_text(result.to_html("Name a colour."), "utf-8")
            ```
        """
        from specfuse_shared.report.html import document

        return document(self, title)

    def _repr_html_(self) -> str:
        """The report for a notebook, as an element with isolated styles."""
        from specfuse_shared.report.html import fragment

        return fragment(self)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The `joint` answer to a conversation and each member's answer `alone`, by name; or the reason why it `failed`."""

    joint: EnsembleResult
    alone: Mapping[str, EnsembleResult]
    failed: Mapping[str, SpecFuseError]

    @property
    def differences(self) -> Mapping[str | None, tuple[Difference, ...]]:
        """By member, and for the joint answer under None: numbers, names and longer words that another answer lacks."""
        texts: dict[str | None, str] = {None: self.joint.text}
        texts |= {name: result.text for name, result in self.alone.items()}
        return dict(zip(texts, differences_of(list(texts.values())), strict=True))


@dataclass(frozen=True, slots=True)
class StartEvent:
    """The request was accepted, and its prompt is in the cache of every member that is not late.

    `prompt_tokens`: its length in the reference member.
    """

    members: tuple[str, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ThinkingEvent:
    """A piece of a member's reasoning, before the answer begins. Reasoning is not part of the answer."""

    member: str
    text: str


@dataclass(frozen=True, slots=True)
class SegmentEvent:
    """Verified text, as soon as it can be shown.

    `text` may lack the last characters of `record.text`, which could become a stop string or are an incomplete
    character; a later event has them. `start` and `end` are its character offsets in the final answer. `record` is None
    for text that was held back and is released at the end. `logprobs`: with `SamplingParams.logprobs`, log p of the
    tokens that end in this text. Once the reference member has left, the last event has all that are missing.
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
    """A member failed and left this answer; the others continue. The fields are those in `MemberFault`."""

    member: str
    stage: StageName
    message: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event, with the whole result."""

    result: EnsembleResult


Event = StartEvent | ThinkingEvent | SegmentEvent | ExitEvent | WarningEvent | FinishEvent
