"""A candidate for the next segment, from its draft to its record, and how each verifier sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specfuse_shared.types import Candidate, FinishReason


@dataclass(frozen=True, slots=True)
class CandidateLogprobs:
    """One candidate of a round as one verifier sees it, in the verifier's own tokens.

    `logprobs`: natural log p of each token. `token_bytes`: UTF-8 bytes of each token (≥ 1). The tokens end where
    `text` ends. They begin before `text`, in the answer, if it changes the tokens at the answer's end.
    For a candidate that `ends` the turn, the last entry of both is the end of turn. `call_bytes`: UTF-8 bytes at its
    beginning that open a tool call; 0 for text.
    """

    text: str
    ends: bool
    logprobs: Sequence[float]
    token_bytes: Sequence[int]
    call_bytes: int = 0

    @property
    def size(self) -> int:
        """UTF-8 bytes of the text."""
        return len(self.text.encode())


@dataclass(slots=True, eq=False)
class RoundCandidate:
    """A distinct candidate of a round: its text, whether the turn ends after it, and the members that drafted it.

    Verification adds `logprobs`, the election `scores` and `vote`. Stop strings do not affect it. They cut the final
    answer.
    """

    text: str
    ends: bool
    drafters: list[str]
    tokens: int = 0
    """Tokens that the first drafter sampled."""
    overrun: str = ""
    """Text that the first drafter wrote after the candidate, and that was cut off."""
    grammar_end: FinishReason | None = None
    """Why the answer ends after this text, if its grammar says so."""
    repeats: bool = False
    """Whether it repeats earlier text, so that the repetition guard gives it no vote."""
    logprobs: dict[str, CandidateLogprobs] = field(default_factory=dict)
    """The candidate as each verifier sees it."""
    scores: dict[str, float] = field(default_factory=dict)
    """Each verifier's score."""
    vote: float | None = None
    """The weighted vote of all verifiers."""

    @property
    def size(self) -> int:
        """UTF-8 bytes of the text."""
        return len(self.text.encode())

    @property
    def finishes(self) -> bool:
        return self.reason is not None

    @property
    def reason(self) -> FinishReason | None:
        """Why the answer ends with this candidate, if it does."""
        return self.grammar_end or (FinishReason.STOP if self.ends else None)

    def record(self) -> Candidate:
        drafters, scores = tuple(self.drafters), dict(self.scores)
        return Candidate(self.text, drafters, self.finishes, self.tokens, scores, self.vote, self.repeats)
