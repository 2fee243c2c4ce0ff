"""An answer explained in HTML: authors and rivals of each segment, weights, retention, exits and time.

`document` is a complete file, `fragment` the same inside another page, with its style under one class. Neither needs
a network or JavaScript. Uses results, no engine. The drawing is computed here; its look is in `templates/`.

Also the formats of scores, shares, differences and unknown values, in the terminal and in reports.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from specfuse_shared.agreement import MemberDifference, MemberWords
from specfuse_shared.types import AnswerRecord, Candidate, FinishReason, MemberExit, MemberUsage, RoundRecord

UNKNOWN = "–"
NOTHING = "∅"
_AROUND, _LONGEST = 32, 120


def number(value: float | None) -> str:
    """Three decimals; a score that would round to zero keeps one digit (probabilities of whole texts)."""
    if value is None:
        return UNKNOWN
    return f"{value:.0e}" if 0 < value < 0.0005 else f"{value:.3f}"


def work_of(usage: MemberUsage) -> str:
    """Forward passes of a member per token of the answer, and the share of right guesses; empty if unknown."""
    if not usage.forwards or not usage.answer:
        return ""
    guesses = f", {usage.accepted} of {usage.guessed} guesses right" if usage.guessed else ""
    return f"{usage.forwards / usage.answer:.2f} forward passes per token{guesses}"


def leader_of(record: RoundRecord) -> str:
    """The member that drafted first in a round; empty if there was none."""
    return "" if record.leader is None else f" · {record.leader} drafted first"


def unverified(record: RoundRecord) -> str:
    """Why a round has no scores; empty if it has."""
    if record.verified:
        return ""
    if len(record.present) > 1:
        return " · all members agreed"
    return " · one member on time" if record.absent else " · one member left, nothing to verify"


def absences_of(record: RoundRecord) -> list[str]:
    """Who sat a round out, and why."""
    return [
        f"{absence.member} sat this round out: "
        + (f"late with its {_LATE_WITH[absence.stage]}" if absence.stage else "still at work for an earlier round")
        for absence in record.absent
    ]


_LATE_WITH = {"draft": "draft", "verify": "verdicts"}


# ── what members differ on ───────────────────────────────────────────────────────────────────────


def in_context(text: str, start: int, end: int) -> tuple[str, str, str]:
    """Characters `start` to `end` of a text on one line, with some words before and after them."""
    before, after = text[max(0, start - _AROUND) : start], text[end : end + _AROUND]
    if start > _AROUND:
        before = "…" + before.partition(" ")[2]
    if end + _AROUND < len(text):
        after = after.rpartition(" ")[0] + "…"
    return _on_one_line(before), _on_one_line(_shortened(text[start:end])) or NOTHING, _on_one_line(after)


def instead(member_words: MemberWords) -> str:
    """The words that a member would have written."""
    if not member_words.words:
        return "the end" if member_words.ends else "nothing"
    words = _on_one_line(_shortened(member_words.words) + "…" * member_words.is_cut)
    return (words if words.startswith('"') else f"“{words}”") + " and the end" * member_words.ends


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _on_one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")


COLOURS, LINES = 6, 5
"""Member colours and underline styles in `report.css`; coprime, so that 30 members look different."""
STAGES = ("draft", "verify")
TICKS = 10
SHOWN, MAX_DIFFERENCES = 6, 200
"""Number of differences shown at once, and in total; the same for fields."""
ENDS = {
    FinishReason.STOP: "the answer was complete",
    FinishReason.LENGTH: "max_tokens or context reached",
    FinishReason.REPETITION: "it could only say the same again",
}


def document(result: AnswerRecord, title: str | None = None) -> str:
    """The report as a whole HTML file. `title`: its heading, usually the question."""
    return environment().get_template("document.html").render(view(result), title=title, running=False)


def fragment(result: AnswerRecord, *, running: bool = False) -> str:
    """The report as an element to put into another page. `running`: the answer is still being written."""
    return (
        environment().get_template("fragment.html").render(view(result, running=running), title=None, running=running)
    )


@cache
def environment(*more: str) -> Environment:
    """Templates that escape their values: the report's, and those in `more` packages."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in ("specfuse_shared.report", *more)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"exact": exact, "marked": marked, "number": number, "seconds": seconds, "work": work_of}
    environment.filters |= {"instead": instead}
    return environment


# ── text and numbers ─────────────────────────────────────────────────────────────────────────────


def exact(text: str) -> Markup:
    """Text that a browser reads back character by character; HTML cannot hold NUL, which becomes U+FFFD."""
    return escape(text.replace("\0", "\ufffd")).replace("\r", Markup("&#13;"))


def marked(text: str) -> Markup:
    """The same, with a place for a mark before every line end."""
    return exact(text).replace("\n", Markup('<i class="eol"></i>\n'))


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.0f} ms"


# ── what the templates show ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class MemberStyle:
    """A member as it is marked everywhere: its number, colour and line; and its part in the answer."""

    name: str
    number: int
    css: str
    won: int = 0
    score: float | None = None
    weight: float | None = None
    usage: MemberUsage | None = None
    left: str | None = None
    late: int = 0
    """Rounds that it sat out."""


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A stretch of the answer and the round that wrote it, the `number`th; None and 0 where no round is known."""

    text: str
    round: RoundRecord | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Card:
    """A round: its candidates, the winner first, in the eyes of its `verifiers`. `cut`: text that was not released."""

    number: int
    record: RoundRecord
    verdict: str
    candidates: Sequence[Candidate]
    verifiers: Sequence[str]
    cut: str
    exits: Sequence[str]
    absences: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """A part of a column; `start` and `size` are shares of the chart's height."""

    css: str
    start: float
    size: float


@dataclass(frozen=True, slots=True)
class Chart:
    """A column of bars for each round. `ticks`: rounds with a label; `top`: meaning of the height."""

    title: str
    note: str
    columns: Sequence[tuple[str, Sequence[ColumnPart]]]
    ticks: Sequence[int]
    top: str
    middle: str


def view(result: AnswerRecord, *, running: bool = False) -> dict[str, Any]:
    """Everything that the templates show. `running`: where members differ comes with the end of the answer."""
    members = _members(result)
    pieces = list(pieces_of(result.text, result.rounds))
    times = _times(result)
    return {
        "result": result,
        "members": members,
        "pieces": pieces,
        "cards": [_card(piece, piece.round) for piece in pieces if piece.round],
        "charts": list(_charts(result, members)),
        "stages": STAGES,
        "times": times,
        "time_bars": _bars(times, {stage: stage for stage in times}, sum(times.values()) or 1.0),
        "finish": _finish(result),
        "agreement": result.agreement,
        "differences": [] if running else [_placed(result.text, each) for each in result.differences],
        "fields": [] if running else result.fields,
        "shown": SHOWN,
        "most": MAX_DIFFERENCES,
        "group": "specfuse-" + sha256(repr(result).encode("utf-8", "replace")).hexdigest()[:12],
    }


def pieces_of(text: str, rounds: Sequence[RoundRecord]) -> Iterator[TextSpan]:
    """The answer cut at the rounds' offsets; the pieces joined are exactly `text`, every round has one (maybe "")."""
    at = 0
    for i, record in enumerate(rounds, 1):
        start, end = (min(max(at, offset), len(text)) for offset in (record.start, record.end))
        if start > at:
            yield TextSpan(text[at:start])
        yield TextSpan(text[start:end], record, i)
        at = max(start, end)
    if at < len(text):
        yield TextSpan(text[at:])


def _placed(text: str, difference: MemberDifference) -> tuple[MemberDifference, tuple[str, str, str]]:
    """A difference with its words in the answer, and the words before and after them."""
    return difference, in_context(text, difference.start, difference.end)


def _members(result: AnswerRecord) -> dict[str, MemberStyle]:
    members = {}
    for i, row in enumerate(result.summary()):
        members[row.member] = MemberStyle(
            name=row.member,
            number=i + 1,
            css=f"m{i % COLOURS} l{i % LINES}",
            won=row.segments_won,
            score=row.mean_score,
            weight=row.weight,
            usage=result.usage.members.get(row.member),
            left=next((_left(e) for r in result.rounds for e in r.exits if e.member == row.member), None),
            late=row.late_rounds,
        )
    return members


def _left(leaving: MemberExit) -> str:
    if leaving.reason == "retention":
        return f"left after round {leaving.round}: retention {number(leaving.retention)}"
    why = {"context": "its context was full", "fault": "it failed", "late": "it stayed late"}[leaving.reason]
    return f"left in round {leaving.round}: {why}"


def _finish(result: AnswerRecord) -> str:
    if result.stop_sequence is not None:
        return f"at the stop string {json.dumps(result.stop_sequence, ensure_ascii=False)}"
    return ENDS[result.finish_reason]


def _card(piece: TextSpan, record: RoundRecord) -> Card:
    ranked = sorted(record.candidates, key=lambda c: (record.winner not in c.drafters, -(c.score or 0.0)))
    return Card(
        number=piece.number,
        record=record,
        verdict=_verdict(record),
        candidates=ranked,
        verifiers=list(dict.fromkeys(name for c in record.candidates for name in c.scores)),
        cut=record.text[len(piece.text) :],
        exits=[f"{e.member} {_left(e)}" for e in record.exits],
        absences=absences_of(record),
    )


def _verdict(record: RoundRecord) -> str:
    """The judges of the candidates, or the reason why there was no vote."""
    if record.verified:
        return f"{len(record.candidates)} candidates, judged by {len(record.present)} members"
    if len(record.active) == 1:
        return "written alone, no vote was needed"
    if len(record.present) == 1:
        return "written by the only member that was on time, no vote was needed"
    drafters = {name for c in record.candidates for name in c.drafters}
    if len(record.candidates) == 1 and drafters == set(record.present):
        dictated = record.candidates[0].tokens == 0
        return "forced by the grammar" if dictated else f"all {len(record.present)} members agreed, no vote was needed"
    return "the only candidate, no vote was needed"


# ── charts ───────────────────────────────────────────────────────────────────────────────────────


def _charts(result: AnswerRecord, members: Mapping[str, MemberStyle]) -> Iterator[Chart]:
    def shares(of: Callable[[RoundRecord], Mapping[str, float]]) -> list[tuple[str, Sequence[ColumnPart]]]:
        css = {name: member.css for name, member in members.items()}
        return [_column(r.index, {n: of(r)[n] for n in members if n in of(r)}, css, 1.0, number) for r in result.rounds]

    ticks = _ticks(len(result.rounds))
    if len(members) > 1 and any(r.weights for r in result.rounds):
        note = "how much each member’s judgement counts"
        yield Chart("Weights", note, shares(lambda r: r.weights), ticks, "1", "½")
    if any(r.retention for r in result.rounds):
        note = "retention probability of each member; set after a verified round"
        yield Chart("Retention", note, shares(lambda r: r.retention), ticks, "1", "½")
    top = max((r.timing.total for r in result.rounds), default=0.0)
    if top > 0:
        spent = [(r.index, {s: getattr(r.timing, s) for s in STAGES}) for r in result.rounds]
        columns = [_column(i, times, {s: s for s in STAGES}, top, seconds) for i, times in spent]
        yield Chart("Time", "seconds of each round, by stage", columns, ticks, seconds(top), seconds(top / 2))


def _column(
    index: int, parts: Mapping[str, float], css: Mapping[str, str], top: float, formatted: Callable[[float], str]
) -> tuple[str, Sequence[ColumnPart]]:
    """The label of a round's column, and its bars from the bottom up."""
    title = ", ".join(f"{name} {formatted(part)}" for name, part in parts.items())
    return f"Round {index}: {title or UNKNOWN}", _bars(parts, css, top)


def _bars(parts: Mapping[str, float], css: Mapping[str, str], top: float) -> list[ColumnPart]:
    starts = itertools.accumulate(parts.values(), initial=0.0)
    return [
        ColumnPart(css[name], start / top, part / top)
        for (name, part), start in zip(parts.items(), starts, strict=False)
    ]


def _ticks(rounds: int) -> list[int]:
    """Rounds to name under a chart: every one, second, fifth, tenth, … so that there are few."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, rounds) if rounds <= s * TICKS)
    return [i for i in range(1, rounds + 1) if i % step == 0]


def _times(result: AnswerRecord) -> dict[str, float]:
    """Where the time went: stage → seconds, in the order in which a stage first runs."""
    spent = {"prefill": result.prefill_seconds}
    spent |= {stage: sum(getattr(r.timing, stage) for r in result.rounds) for stage in STAGES}
    return {**spent, "other": max(0.0, result.total_seconds - sum(spent.values()))}
