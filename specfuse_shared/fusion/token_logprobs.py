"""What a member thinks of an answer's tokens, with their texts."""

from __future__ import annotations

from specfuse_shared.members.stages import CandidateVerdict
from specfuse_shared.text.codec import Codec
from specfuse_shared.types import TokenLogprob, TopLogprob


def token_logprobs(codec: Codec, text: str, verdict: CandidateVerdict) -> tuple[TokenLogprob, ...]:
    """The member's `verdict` on a whole text, token by token."""
    pieces = codec.pieces(text)
    tops = verdict.tops or [()] * len(pieces)
    alternatives = codec.alternatives(text, [[token for token, _ in top] for top in tops])
    return tuple(
        TokenLogprob(
            _shown(piece),
            logprob,
            tuple(piece),
            tuple(
                TopLogprob(_shown(other), chance, tuple(other)) for other, (_, chance) in zip(others, top, strict=True)
            ),
        )
        for piece, logprob, top, others in zip(pieces, verdict.logprobs, tops, alternatives, strict=True)
    )


def _shown(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
