"""The record of an answer: candidates, rounds, exits, usage. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Self

from specfuse_shared.agreement import (
    Agreement,
    FieldAgreement,
    MemberDifference,
    agreement_of,
    differences_among,
    fields_among,
)

StageName = Literal["prefill", "think", "draft", "verify", "commit", "score"]


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The ensemble ended its turn, or a stop string appeared (`EnsembleResult.stop_sequence`)."""
    LENGTH = "length"
    """`max_tokens` was reached, or no member had context left."""
    REPETITION = "repetition"
    """All candidates repeated the answer, or a value repeated itself and was closed after the first occurrence
    (`EnsembleConfig.repetition_guard`)."""


@dataclass(frozen=True, slots=True)
class MemberUsage:
    """The computation of one member for one answer, counted in its own tokens.

    `prompt`: length of the prompt. `drafted`: tokens that it sampled. `fed`: tokens that went through the model after
    the prompt (drafts, verifications, re-encodings, guesses). `forwards`: number of forward passes. `answer`: length of
    the answer. `thinking`: length of its reasoning. `guessed`: tokens fed as guesses (`EnsembleConfig.speculation`).
    `accepted`: guesses that came true.
    """

    prompt: int
    drafted: int
    fed: int
    answer: int
    thinking: int = 0
    forwards: int = 0
    guessed: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the reference member (`EnsembleConfig.reference`), and the work of each member."""

    prompt_tokens: int
    completion_tokens: int
    reference: str
    members: Mapping[str, MemberUsage] = field(default_factory=dict)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    """One member's draft of the next segment, as it was judged.

    `drafters`: the members that wrote exactly this text, in the order of the configuration. `ends`: it ends the
    answer. `tokens`: tokens that the first of them sampled. `scores`: verifier name → score in [0, 1], empty if nothing
    had to be verified. `score`: the vote, 0 if it `repeats` the answer (the repetition guard).
    """

    text: str
    drafters: tuple[str, ...]
    ends: bool
    tokens: int
    scores: Mapping[str, float] = field(default_factory=dict)
    score: float | None = None
    repeats: bool = False


ExitReason = Literal["retention", "context", "fault", "late"]


@dataclass(frozen=True, slots=True)
class MemberExit:
    """A member left the answer: by "retention" (exit policy), its full "context", its own "fault", or because it
    was "late" for too many rounds in a row (`EnsembleConfig.late_rounds`)."""

    member: str
    round: int
    reason: ExitReason
    retention: float | None = None


@dataclass(frozen=True, slots=True)
class MemberFault:
    """A member failed in a stage and left the answer; the others continued. `kind`: the error's class.

    `message` is the error's text, which may name files and addresses: a server does not send it to clients.
    """

    member: str
    stage: StageName
    message: str
    kind: str = ""

    @classmethod
    def public(cls, member: str, stage: StageName, kind: str) -> Self:
        """The fault without its message, as a server shows it to its clients.

        Args:
            member: The member that failed.
            stage: The stage in which it failed.
            kind: The class of the error.

        Returns:
            The fault.

        Example:
            ```python
            from specfuse_shared import MemberFault

            print(MemberFault.public("gemma", "draft", "OutOfMemoryError").message)
            ```
        """
        return cls(member, stage, f"member {member!r} failed in {stage} ({kind})", kind)


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most probable tokens at a position: its text, natural log p, and its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer in the reference member's encoding: its text, natural log p, and its UTF-8 bytes.

    `token` holds U+FFFD where a character is spread over several tokens; `bytes` are exact. `top`: the most probable
    tokens at its position, as many as `SamplingParams.top_logprobs` asked for, the most probable first.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """Seconds spent in the stages of one round. `draft` includes the commit of the previous segment."""

    draft: float = 0.0
    verify: float = 0.0

    @property
    def total(self) -> float:
        return self.draft + self.verify


@dataclass(frozen=True, slots=True)
class MemberAbsence:
    """A member missed a round, which was decided without it (`EnsembleConfig.round_seconds`).

    `stage`: the stage in which it was late, with candidates of at most `tokens` tokens; None: it was still busy with an
    earlier round.
    """

    member: str
    stage: Literal["draft", "verify"] | None = None
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The record of one round.

    `text`: the winner's segment as members commit it. `start`, `end`: its character offsets in the generated text
    (before a stop string or `max_tokens` cut it). `weights`: the verifiers' weights in this round. `retention`: the
    exit policy's probabilities after it; empty if it did not run. `verified`: False if all members agreed or only one
    was left. `leader`: the member that drafted first, if one did (`EnsembleConfig.speculation`). `active`: the members
    present when it began; `absent`: the late ones among them, which missed it.
    """

    index: int
    active: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    winner: str
    text: str
    start: int
    end: int
    verified: bool
    weights: Mapping[str, float]
    retention: Mapping[str, float]
    exits: tuple[MemberExit, ...]
    timing: RoundTiming
    leader: str | None = None
    absent: tuple[MemberAbsence, ...] = ()

    @property
    def present(self) -> tuple[str, ...]:
        """The members that took part."""
        late = {absence.member for absence in self.absent}
        return tuple(name for name in self.active if name not in late)

    @property
    def agreement(self) -> float | None:
        """Share of the segment that all members would have written (`specfuse_shared.agreement`)."""
        measured = agreement_of([self])
        return None if measured is None else measured.share


@dataclass(frozen=True, slots=True)
class MemberSummary:
    """One member's part in an answer, over all rounds."""

    member: str
    segments_won: int
    mean_score: float | None
    weight: float | None
    exit_round: int | None
    exit_reason: str | None
    late_rounds: int = 0


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """The record of a finished answer (`specfuse_shared.events.EnsembleResult`)."""

    text: str
    finish_reason: FinishReason
    stop_sequence: str | None
    usage: Usage
    rounds: tuple[RoundRecord, ...]
    members: tuple[str, ...]
    seed: int | None
    prefill_seconds: float
    first_segment_seconds: float | None
    total_seconds: float
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Log-probabilities of the answer's tokens, with `SamplingParams.logprobs`."""
    thinking: Mapping[str, str] = field(default_factory=dict)
    """Member → its reasoning before the answer."""
    warnings: tuple[MemberFault, ...] = ()
    """Members that failed and left the answer."""
    closing: str = ""
    """The end of the answer that no member wrote: it completes a value or call within `max_tokens`."""
    loops: tuple[str, ...] = ()
    """Repetitions in lists or strings of a value: each was closed after its first occurrence."""

    def summary(self) -> tuple[MemberSummary, ...]:
        """Each member's contribution, in the order of the configuration."""
        return tuple(_summarise(name, self.rounds) for name in self.members)

    @property
    def agreement(self) -> Agreement | None:
        """How far the members agree on the text, and where not; None if only one member had an opinion."""
        return agreement_of(self.rounds, len(self.text))

    @property
    def differences(self) -> tuple[MemberDifference, ...]:
        """Where members would have written other words, the most important first. Every access computes it from the
        rounds."""
        return differences_among(self.rounds, self.text)

    @property
    def fields(self) -> tuple[FieldAgreement, ...]:
        """How far members agree on each field of the JSON in the text, tool calls included; () without JSON."""
        return fields_among(self.rounds, self.text)

    def to_dict(self, *, rounds: bool = True) -> dict[str, Any]:
        """JSON-safe form of the whole result. `rounds=False`: the number of rounds instead of their records."""
        data = asdict(self if rounds else replace(self, rounds=()))
        agreement = self.agreement
        if not rounds:
            data["rounds"] = len(self.rounds)
        data["agreement"] = None if agreement is None else asdict(agreement)
        data["differences"] = [asdict(difference) for difference in self.differences]
        data["fields"] = [asdict(field) for field in self.fields]
        data["finish_reason"] = str(self.finish_reason)
        data["usage"]["total_tokens"] = self.usage.total_tokens
        return data


def _summarise(name: str, rounds: tuple[RoundRecord, ...]) -> MemberSummary:
    scores = [c.score for r in rounds for c in r.candidates if name in c.drafters and c.score is not None]
    leave = next((e for r in rounds for e in r.exits if e.member == name), None)
    weights = [r.weights[name] for r in rounds if name in r.weights]
    return MemberSummary(
        member=name,
        segments_won=sum(r.winner == name for r in rounds),
        mean_score=sum(scores) / len(scores) if scores else None,
        weight=weights[-1] if weights else None,
        exit_round=leave.round if leave else None,
        exit_reason=leave.reason if leave else None,
        late_rounds=sum(absence.member == name for r in rounds for absence in r.absent),
    )


@dataclass(frozen=True, slots=True)
class MemberReport:
    """Facts about a loaded member (`EnsembleEngine.describe()`, `specfuse-llm doctor`).

    `memory_bytes`: bytes of its weights. `device`: its device, or several joined by "+". `verification`: "packed"
    (all candidates in one forward pass), "rows" (one forward pass per candidate), or, at a server, "tokens" (one
    request per candidate that is not its own, using its prefix cache), "prefixes" (one request with every prefix of
    the candidates) or "prompt" (the context is read again each round). `advice`: how to make verification cheaper.
    `probe_error`: largest |Δ log p| between the cached path and the model's own plain forward pass, or between a
    server's two ways of scoring. `memory_bytes` is 0 for a server, `parameters` is 0 where it is not known. `graphs`:
    "captured" (its steps run as CUDA graphs), or "eager: " and the reason. `template`: "own", "given" or "plain".
    `context`: token limit, None if the model states none. `backend`: the library that runs it; `why`: the reason for
    that backend. `layers`: "compiled", or "not compiled: " and the reason; empty if that was not tried. `forwards`:
    counts of forward passes: "replayed" as CUDA graphs, as packed steps without a graph ("packed"), or in the shape
    that the tokens have ("dynamic"); empty with other backends than transformers.
    """

    name: str
    model: str
    architecture: str
    parameters: int
    memory_bytes: int
    device: str
    dtype: str
    quantization: str | None
    attention: str
    verification: Literal["packed", "rows", "tokens", "prefixes", "prompt"]
    probe_error: float
    graphs: str
    template: Literal["own", "given", "plain"]
    context: int | None
    stop_token_ids: tuple[int, ...]
    load_seconds: float
    backend: str = "transformers"
    why: str = ""
    advice: str = ""
    layers: str = ""
    forwards: Mapping[str, int] = field(default_factory=dict)
