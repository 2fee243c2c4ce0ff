"""How scores, shares, differences and what is not known are written, in the terminal and in reports."""

from __future__ import annotations

from specfuse_shared.agreement import MemberWords
from specfuse_shared.types import MemberUsage, RoundRecord

UNKNOWN = "–"
NOTHING = "∅"
_AROUND, _LONGEST = 32, 120


def number(value: float | None) -> str:
    """Three digits behind the point; a score that would vanish there keeps one digit (probabilities of whole texts)."""
    if value is None:
        return UNKNOWN
    return f"{value:.0e}" if 0 < value < 0.0005 else f"{value:.3f}"


def work_of(usage: MemberUsage) -> str:
    """How many forwards a token of the answer took a member, and how many guesses were right; empty if unknown."""
    if not usage.forwards or not usage.answer:
        return ""
    guesses = f", {usage.accepted} of {usage.guessed} guesses right" if usage.guessed else ""
    return f"{usage.forwards / usage.answer:.2f} forwards a token{guesses}"


def lead_of(record: RoundRecord) -> str:
    """Who drafted first in a round; empty if nobody did."""
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
    """Characters `start` to `end` of a text on one line, with some words before and behind them."""
    before, behind = text[max(0, start - _AROUND) : start], text[end : end + _AROUND]
    if start > _AROUND:
        before = "…" + before.partition(" ")[2]
    if end + _AROUND < len(text):
        behind = behind.rpartition(" ")[0] + "…"
    return _on_one_line(before), _on_one_line(_shortened(text[start:end])) or NOTHING, _on_one_line(behind)


def instead(other: MemberWords) -> str:
    """What a member would have written."""
    if not other.words:
        return "the end" if other.ends else "nothing"
    words = _on_one_line(_shortened(other.words) + "…" * other.is_cut)
    return (words if words.startswith('"') else f"“{words}”") + " and the end" * other.ends


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _on_one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")
