"""The text of one answer: what fits within `max_tokens`, what may be shown, where it ends."""

from __future__ import annotations

import time

from specfuse_shared.events import SegmentEvent
from specfuse_shared.sampling_params import SamplingParams
from specfuse_shared.text.codec import Codec, Encoding
from specfuse_shared.text.stops import StopHold, StopMatch, find_stop
from specfuse_shared.types import FinishReason, RoundRecord


class AnswerText:
    """Grows by segments; `codec` is that of the reference member, which counts tokens."""

    def __init__(self, params: SamplingParams, codec: Codec) -> None:
        self.text = ""
        self.first_seconds: float | None = None
        self._limit, self._stops, self._codec = params.max_tokens, params.stops, codec
        self._counted, self._hold = Encoding(), StopHold(params.stops)
        self._began = time.monotonic()

    def find_stop(self, addition: str) -> StopMatch | None:
        """The first stop string that `addition` completes."""
        return find_stop(self.text, addition, self._stops)

    def fit(
        self, segment: str, reason: FinishReason | None, own_count: int | None = None
    ) -> tuple[str, FinishReason | None]:
        """The segment within `max_tokens`, and why the answer ends with it, if it does.

        `reason`: why it ends in any case. `own_count`: tokens of the reference member where it decodes alone, which
        need no encoding of the text.
        """
        if own_count is not None:
            return segment, reason or (FinishReason.LENGTH if own_count >= self._limit else None)
        counted = self._codec.extend(self._counted, segment)
        if len(counted.ids) > self._limit:
            text = self._codec.head(counted, self._limit)
            self._counted = self._codec.extend(Encoding(), text)
            return text[len(self.text) :], FinishReason.LENGTH
        self._counted = counted
        return segment, reason or (FinishReason.LENGTH if len(counted.ids) == self._limit else None)

    def add(self, segment: str, record: RoundRecord) -> SegmentEvent:
        """Append a segment; the event shows what no stop string can begin in."""
        self.text += segment
        return self._segment(self._hold.feed(segment), record)

    def finish(self, segment: str, stop: StopMatch | None, record: RoundRecord | None) -> SegmentEvent | None:
        """Append the last segment, cut at the stop string, and release what was held back."""
        self.text += segment
        if stop is not None:
            self.text = self.text[: stop.start]
        shown = self._hold.finish(segment, len(self.text))
        return self._segment(shown, record) if shown or record is not None else None

    def _segment(self, text: str, record: RoundRecord | None) -> SegmentEvent:
        if text and self.first_seconds is None:
            self.first_seconds = time.monotonic() - self._began
        end = self._hold.released
        return SegmentEvent(text, end - len(text), end, record)
