"""Constructed results for the report: rounds with a winner, and rivals whose text names their author."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specfuse_shared.events import EnsembleResult
from specfuse_shared.types import Candidate, FinishReason, MemberExit, MemberUsage, RoundRecord, RoundTiming, Usage

Turn = tuple[str, str]
"""The winner and the text of a round."""


def rival_text(index: int, name: str) -> str:
    return f" what {name} drafted in round {index}"


def round_of(index: int, start: int, turn: Turn, active: Sequence[str]) -> RoundRecord:
    """A verified round; each member scores its own draft 0.75, the winner's 0.5 and the others 0.25."""
    winner, text = turn

    def candidate(name: str) -> Candidate:
        scores = {judge: 0.75 if judge == name else 0.5 if name == winner else 0.25 for judge in active}
        draft = text if name == winner else rival_text(index, name)
        return Candidate(draft, (name,), False, 7, scores, sum(scores.values()) / len(scores))

    return RoundRecord(
        index=index,
        active=tuple(active),
        candidates=tuple(candidate(name) for name in active),
        winner=winner,
        text=text,
        start=start,
        end=start + len(text),
        verified=True,
        weights=dict.fromkeys(active, 1 / len(active)),
        retention={name: (2 if name == winner else 1) / (len(active) + 1) for name in active},
        exits=(),
        timing=RoundTiming(0.25, 0.125),
    )


def unverified(record: RoundRecord, drafters: Sequence[str], tokens: int = 5) -> RoundRecord:
    """The same round with one candidate, which needs no verification."""
    only = Candidate(record.text, tuple(drafters), False, tokens)
    return replace(record, candidates=(only,), verified=False, retention={})


def explained(
    turns: Sequence[Turn],
    members: Sequence[str] = ("alpha", "beta"),
    *,
    leaving: Mapping[int, Sequence[MemberExit]] | None = None,
    **changes: Any,
) -> EnsembleResult:
    """A result of these rounds. `leaving`: exits by round; `changes`: fields of the result to set otherwise."""
    rounds: list[RoundRecord] = []
    active, text = list(members), ""
    for index, turn in enumerate(turns, 1):
        exits = tuple((leaving or {}).get(index, ()))
        rounds.append(replace(round_of(index, len(text), turn, active), exits=exits))
        text += turn[1]
        active = [name for name in active if name not in {e.member for e in exits}]
    usage = Usage(31, 40, members[0], {name: MemberUsage(31, 1234, 60, 40) for name in members})
    result = EnsembleResult(
        text=text,
        finish_reason=FinishReason.STOP,
        stop_sequence=None,
        usage=usage,
        rounds=tuple(rounds),
        members=tuple(members),
        seed=None,
        prefill_seconds=0.5,
        first_segment_seconds=0.875,
        total_seconds=0.6 + sum(r.timing.total for r in rounds),
    )
    return replace(result, **changes)


Drafts = Mapping[str, str]
"""Member → its draft, unless it equals the round's text; "…" at its end: the draft ends the answer."""


def differing(
    rounds: Sequence[tuple[str, Drafts]], weights: Mapping[str, float], *, over: bool = False
) -> EnsembleResult:
    """An answer whose rounds have a text that the first member won, and other members' drafts. `over`: it has ended."""
    names, start, records = list(weights), 0, []
    for index, (text, drafts) in enumerate(rounds, 1):
        ends = over and index == len(rounds)
        texts = {name: (drafts[name].removesuffix("…"), drafts[name].endswith("…")) for name in drafts}
        texts = {name: texts.get(name, (text, ends)) for name in names}
        scores = dict.fromkeys(names, 0.5)
        candidates = [
            Candidate(draft, tuple(n for n in names if texts[n] == (draft, is_last)), is_last, 3, scores, 0.25)
            for draft, is_last in dict.fromkeys(texts.values())
        ]
        record = round_of(index, start, (names[0], text), names)
        records.append(replace(record, candidates=tuple(candidates), weights=weights))
        start += len(text)
    text = "".join(text for text, _ in rounds)
    return replace(explained([(names[0], text)], names), text=text, rounds=tuple(records))
