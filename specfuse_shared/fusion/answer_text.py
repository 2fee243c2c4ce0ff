"""The text of one answer: its limit of `max_tokens`, its visible part, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from specfuse_shared.config import SamplingParams
from specfuse_shared.events import SegmentEvent
from specfuse_shared.text.codec import Codec, Encoding
from specfuse_shared.text.stops import StopHold, StopMatch, find_stops
from specfuse_shared.types import FinishReason, RoundRecord


@dataclass(frozen=True, slots=True)
class TrimmedSegment:
    """A segment as it becomes part of the answer: why the answer ends with it, if it does, and at which stop string."""

    text: str
    reason: FinishReason | None
    stop: StopMatch | None = None


class AnswerText:
    """Grows by segments. `codec`: the reference member's, which counts `tokens`.

    `may_end`: whether a stop string may end the answer after a given text; always if unset. Otherwise it is plain text.
    """

    def __init__(self, params: SamplingParams, codec: Codec, may_end: Callable[[str], bool] | None = None) -> None:
        self.text = ""
        self.tokens = 0
        self.first_seconds: float | None = None
        self._limit = params.max_tokens
        self._stops = params.stops
        self._codec = codec
        self._may_end = may_end
        self._counted = Encoding()
        self._hold = StopHold(params.stops)
        self._began = time.monotonic()

    def fit(self, segment: str, reason: FinishReason | None, own_count: int | None = None) -> TrimmedSegment:
        """The segment within `max_tokens`, cut at a stop string.

        `reason`: an end of the answer that is already certain. `own_count`: number of tokens if the reference member
        decodes alone; the text then needs no encoding.
        """
        segment, reason = self._within_limit(segment, reason, own_count)
        for stop in find_stops(self.text, segment, self._stops):
            whole = (self.text + segment)[: stop.start]
            if self._may_end is None or self._may_end(whole):
                return TrimmedSegment(whole[len(self.text) :], FinishReason.STOP, stop)
        return TrimmedSegment(segment, reason)

    def _within_limit(
        self, segment: str, reason: FinishReason | None, own_count: int | None
    ) -> tuple[str, FinishReason | None]:
        if own_count is not None:
            self.tokens = own_count
            return segment, reason or (FinishReason.LENGTH if own_count >= self._limit else None)
        counted = self._codec.extend(self._counted, segment)
        if len(counted.ids) > self._limit:
            text = self._codec.head(counted, self._limit)
            self._counted = self._codec.extend(Encoding(), text)
            self.tokens = len(self._counted.ids)
            return text[len(self.text) :], FinishReason.LENGTH
        self._counted, self.tokens = counted, len(counted.ids)
        return segment, reason or (FinishReason.LENGTH if len(counted.ids) == self._limit else None)

    def tokens_with(self, segment: str) -> int:
        """Tokens of the answer with a segment."""
        return len(self._codec.extend(self._counted, segment).ids)

    def add(self, segment: str, record: RoundRecord) -> SegmentEvent:
        """Append a segment; the event shows what no stop string can begin in."""
        self.text += segment
        return self._segment(self._hold.feed(segment), record)

    def finish(self, segment: TrimmedSegment, record: RoundRecord | None) -> SegmentEvent | None:
        """Append the last segment, cut at the stop string, and release what was held back."""
        self.text += segment.text
        if segment.stop is not None:
            self.text = self.text[: segment.stop.start]
        released = self._hold.finish(segment.text, len(self.text))
        return self._segment(released, record) if released or record is not None else None

    def _segment(self, text: str, record: RoundRecord | None) -> SegmentEvent:
        if text and self.first_seconds is None:
            self.first_seconds = time.monotonic() - self._began
        end = self._hold.released
        return SegmentEvent(text, end - len(text), end, record)
