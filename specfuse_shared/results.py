"""The result of an answer: its record, and the report drawn from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specfuse_shared.differences import Difference, differences_of
from specfuse_shared.errors import SpecFuseError
from specfuse_shared.types import AnswerRecord


class EnsembleResult(AnswerRecord):
    """A finished answer. `text` is exactly the concatenation of the streamed `SegmentEvent.text`."""

    __slots__ = ()

    def to_html(self, title: str | None = None) -> str:
        """A report of the answer as one HTML file that needs no network. `title`: its heading, for example the
        question."""
        from specfuse_shared.report.html import document

        return document(self, title)

    def _repr_html_(self) -> str:
        """The same for a notebook, as an element with isolated styles."""
        from specfuse_shared.report.html import fragment

        return fragment(self)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The `joint` answer to a conversation, and what each member says `alone`, by its name; or why it `failed`."""

    joint: EnsembleResult
    alone: Mapping[str, EnsembleResult]
    failed: Mapping[str, SpecFuseError]

    @property
    def differences(self) -> Mapping[str | None, tuple[Difference, ...]]:
        """By member, and for the joint answer under None: numbers, names and longer words that another answer lacks."""
        texts: dict[str | None, str] = {None: self.joint.text}
        texts |= {name: result.text for name, result in self.alone.items()}
        return dict(zip(texts, differences_of(list(texts.values())), strict=True))
