"""Thoughts: what a member writes for itself before it answers, between two markers of its chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MARKERS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""What templates put around thoughts."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The strings around a member's thoughts; `wanted`: it shall think."""

    start: str
    end: str
    wanted: bool

    def opened(self, prompt: str) -> str:
        """The prompt with thoughts begun or, where the template begins them unasked, ended at once."""
        begun = prompt.rstrip().endswith(self.start)
        if self.wanted:
            return prompt if begun else f"{prompt}{self.start}\n"
        return f"{prompt.rstrip()}\n\n{self.end}\n\n" if begun else prompt

    @property
    def closing(self) -> str:
        """What stands between the thoughts and the answer."""
        return f"{self.end}\n\n"


def find_markers(template: str, thinking: bool | Sequence[str]) -> Markers | None:
    """The markers that are given, or those that the template knows; None if there are none."""
    if not isinstance(thinking, bool):
        start, end = thinking
        return Markers(start, end, True)
    known = next(((start, end) for start, end in MARKERS if start in template or end in template), None)
    return Markers(*known, thinking) if known else None


def end_of_thoughts(ids: Sequence[int], marker: Sequence[int], text: str, decode: Callable[[Any], str]) -> int | None:
    """How many of `ids` come before the closing marker, written as the ids `marker` or as `text`; None without it."""
    size = len(marker)
    for start in range(len(ids) - size + 1):
        if size and list(ids[start : start + size]) == list(marker):
            return start
    place = decode(ids).find(text)
    if place < 0:
        return None
    return next(count for count in range(len(ids), -1, -1) if len(decode(ids[:count])) <= place)
