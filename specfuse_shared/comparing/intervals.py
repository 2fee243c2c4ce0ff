"""Differences with their intervals, and the smallest difference that the rows can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specfuse_shared.comparing.libraries import library

POWER = 0.8
"""A difference "can be shown" if its 95 % interval excludes zero in this share of samples."""
RESAMPLES = 10_000
_AT_ONCE = 1 << 20
"""Numbers drawn at a time: all resamples at once would take 80 MB per thousand rows."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean or share with its 95 % interval, from this number of `rows`. `least_seen`: the smallest difference that
    the rows can show."""

    mean: float
    low: float
    high: float
    rows: int
    least_seen: float = 0.0

    @property
    def above(self) -> bool:
        """Whether the interval lies above zero."""
        return self.low > 0

    @property
    def below(self) -> bool:
        return self.high < 0

    def to_dict(self) -> dict[str, Any]:
        """The interval as plain JSON.

        Returns:
            The fields; None instead of infinity, which JSON does not have.

        Example:
            ```python
            from specfuse_shared.comparing import Interval

            print(Interval(1.0, -0.5, 2.5, rows=100).to_dict())
            ```
        """
        return {name: value if isfinite(value) else None for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Mean of the paired differences and its 95 % bootstrap interval, which is infinite for a single row."""
    gaps = np.subtract(ours, theirs)
    rows = len(gaps)
    if rows < 2:
        return Interval(float(gaps.mean()) if rows else 0.0, -np.inf, np.inf, rows, np.inf)
    if not gaps.any():
        return Interval(0.0, 0.0, 0.0, rows)
    interval = library("scipy.stats").bootstrap(
        (gaps,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=max(1, _AT_ONCE // rows),
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = interval.confidence_interval
    return Interval(float(gaps.mean()), float(low), float(high), rows, least_seen(gaps))


def least_seen(gaps: Sequence[float] | NDArray[np.float64]) -> float:
    """The true mean at which paired differences with this spread have a 95 % interval above zero in `POWER` of all
    samples of this size: (z₀.₉₇₅ + z_POWER) · s / √n."""
    norm = library("scipy.stats").norm
    return float((norm.ppf(0.975) + norm.ppf(POWER)) * np.std(gaps, ddof=1) / np.sqrt(len(gaps)))


def share(won: int, of: int) -> Interval:
    """A share of `of` with its interval (Wilson), in per cent."""
    if of == 0:
        return Interval(50.0, 0.0, 100.0, 0)
    low, high = library("scipy.stats").binomtest(won, of).proportion_ci(method="wilson")
    return Interval(100.0 * won / of, 100.0 * float(low), 100.0 * float(high), of)
