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
    return " · all members agreed" if len(record.active) > 1 else " · one member left, nothing to verify"
