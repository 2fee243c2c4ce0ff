"""The result of an answer: its record, and the report drawn from it."""

from __future__ import annotations

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
