"""How scores, shares and what is not known are written, in the terminal and in reports."""

from __future__ import annotations

UNKNOWN = "–"


def number(value: float | None) -> str:
    """Three digits behind the point; a score that would vanish there keeps one digit (probabilities of whole texts)."""
    if value is None:
        return UNKNOWN
    return f"{value:.0e}" if 0 < value < 0.0005 else f"{value:.3f}"
