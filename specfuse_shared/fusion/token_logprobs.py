"""Log-probabilities of an answer's tokens by the reference member, with their texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from specfuse_shared.members.stages import Drafted, Top, Verdicts
from specfuse_shared.text.codec import Codec, Encoding
from specfuse_shared.types import TokenLogprob, TopLogprob


def token_logprobs(codec: Codec, verdicts: Verdicts) -> tuple[TokenLogprob, ...]:
    """The member's verdict on a whole text, token by token."""
    [verdict], tops = verdicts.each, next(iter(verdicts.tops), ())
    alternatives = codec.alternatives(verdict.text, [[token for token, _ in top] for top in tops])
    return _reported(codec.pieces(verdict.text), verdict.logprobs, tops, alternatives)


class SegmentLogprobs:
    """Log-probabilities for the text of each segment, in order.

    `codec`: the judging member's. `reported`: bytes of the reported tokens. A token that reaches into the next text is
    reported with that text. If a later encoding replaces a reported token, only its additional bytes are reported.
    `is_over`: a segment was not judged, so later ones have no position.
    """

    def __init__(self, codec: Codec) -> None:
        self.reported = 0
        self.is_over = False
        self._codec = codec
        self._encoding = Encoding()
        self._waiting = deque[TokenLogprob]()
        self._shown = 0
        self._drafts: list[Drafted] = []
        self._drafted: tuple[int, ...] = ()

    def judged(self, verdicts: Verdicts) -> None:
        """The verdict on a segment that follows the previous ones."""
        [verdict], tops = verdicts.each, next(iter(verdicts.tops), ())
        before, after = self._encoding, self._codec.extend(self._encoding, verdict.text)
        pairs = enumerate(zip(before.ids, after.ids, strict=False))
        base = next((n for n, (one, two) in pairs if one != two), min(len(before.ids), len(after.ids)))
        pieces = self._codec.pieces_after(after.ids[:base], after.ids[base:], verdict.text)
        self._add(pieces, verdict.logprobs, tops)
        self._encoding = after

    def drafted(self, draft: Drafted) -> None:
        """A draft of the member itself, which was committed as it was drafted; its text may come with a later one."""
        self._drafts.append(draft)
        ids = tuple(token for each in self._drafts for token in each.ids)
        text, before = "".join(each.text for each in self._drafts), (*self._encoding.ids, *self._drafted)
        if self._codec.text_after(before, ids) != text:
            return
        pieces = deque(self._codec.pieces_after(before, ids, text))
        for each in self._drafts:
            self._add([pieces.popleft() for _ in each.ids], each.logprobs, each.tops)
        self._drafts, self._drafted = [], self._drafted + ids

    def take(self, text: str) -> tuple[TokenLogprob, ...]:
        """The tokens that end in `text`, which becomes visible now."""
        self._shown += len(text.encode())
        tokens = []
        while self._waiting and self.reported + len(self._waiting[0].bytes) <= self._shown:
            tokens.append(self._waiting.popleft())
            self.reported += len(tokens[-1].bytes)
        return tuple(tokens)

    def _add(self, pieces: Sequence[bytes], logprobs: Sequence[float], tops: Sequence[Top]) -> None:
        alternatives = self._codec.spelled([[token for token, _ in top] for top in tops])
        self._waiting.extend(_reported(pieces, logprobs, tops, alternatives))


def logprobs_after(logprobs: Sequence[TokenLogprob], count: int) -> tuple[TokenLogprob, ...]:
    """The tokens of a whole answer that end after its first `count` bytes."""
    tokens, end = [], 0
    for token in logprobs:
        end += len(token.bytes)
        if end > count:
            tokens.append(token)
    return tuple(tokens)


def _reported(
    pieces: Sequence[bytes], logprobs: Sequence[float], tops: Sequence[Top], alternatives: Sequence[Sequence[bytes]]
) -> tuple[TokenLogprob, ...]:
    nothing: list[tuple[()]] = [()] * len(pieces)
    return tuple(
        TokenLogprob(
            _shown(piece),
            logprob,
            tuple(piece),
            tuple(
                TopLogprob(_shown(alternative), chance, tuple(alternative))
                for alternative, (_, chance) in zip(spelled, top, strict=True)
            ),
        )
        for piece, logprob, top, spelled in zip(pieces, logprobs, tops or nothing, alternatives or nothing, strict=True)
    )


def _shown(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
