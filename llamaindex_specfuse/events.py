"""The instrumentation event of a verified segment."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.events import BaseEvent


class SpecFuseSegmentEvent(BaseEvent):
    """One verified segment of an answer, sent to LlamaIndex's dispatcher before the segment is streamed.

    `span_id` and `tags` are those of the call that asked, also when the answer is consumed after its span closed or
    in another thread.
    """

    text: str
    """The new text of the answer."""
    record: dict[str, Any]
    """What the streamed response holds in `raw["specfuse"]`: round, member, scores, weights, candidates, offsets."""

    @classmethod
    def class_name(cls) -> str:
        return "SpecFuseSegmentEvent"
