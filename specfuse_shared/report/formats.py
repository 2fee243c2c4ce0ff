"""How scores, shares and what is not known are written, in the terminal and in reports."""

from __future__ import annotations

from specfuse_shared.types import MemberUsage, RoundRecord

UNKNOWN = "–"


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
