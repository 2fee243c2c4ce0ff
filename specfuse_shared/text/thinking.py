"""Thoughts: what a member writes for itself before it answers, between two markers of its chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Markers:
    """The strings around a member's thoughts, and what stands between them and the answer.

    `before` and `begin`: written around `start` where the template does not begin the thoughts itself. `empty`: what
    ends them at once, where it does. `wanted`: the member shall think.
    """

    start: str
    end: str
    closing: str
    before: str = ""
    begin: str = "\n"
    empty: str = ""
    wanted: bool = False

    def opened(self, prompt: str) -> str:
        """The prompt with thoughts begun or, where the template begins them unasked, ended at once."""
        begun = prompt.rstrip().endswith(self.start)
        if self.wanted:
            return prompt if begun else f"{prompt}{self.before}{self.start}{self.begin}"
        return f"{prompt.rstrip()}{self.empty or f'{chr(10) * 2}{self.closing}'}" if begun else prompt

    def in_border(self, mark: str) -> Markers:
        """The same where the template writes `mark` in front of answers: it has empty thoughts, or follows thoughts."""
        if self.start in mark:
            before, _, rest = mark.partition(self.start)
            return replace(self, before=before, closing=f"{self.end}{rest.rpartition(self.end)[2]}")
        return self if not mark.strip() else replace(self, closing=f"{self.closing.rstrip()}{mark}")


def _between(start: str, end: str) -> Markers:
    return Markers(start, end, closing=f"{end}\n\n")


KNOWN = (
    _between("<think>", "</think>"),
    _between("<thinking>", "</thinking>"),
    _between("<thought>", "</thought>"),
    _between("<seed:think>", "</seed:think>"),
    _between("[THINK]", "[/THINK]"),
    _between("<|START_THINKING|>", "<|END_THINKING|>"),
    Markers("<|channel>thought", "<channel|>", closing="<channel|>", empty="\n<channel|>"),
    Markers("<|channel|>analysis<|message|>", "<|end|>", closing="<|end|><|start|>assistant", begin=""),
)
"""What templates put around thoughts: Gemma 4 and gpt-oss name a channel."""
_SHARED_ENDS = ("<|end|>",)
"""Ends of thoughts that also end turns, and so say nothing of a template."""


def find_markers(template: str, thinking: bool | Sequence[str]) -> Markers | None:
    """The markers that are given, or those that the template knows; None if there are none."""
    if not isinstance(thinking, bool):
        start, end = thinking
        return replace(_between(start, end), wanted=True)
    known = next((markers for markers in KNOWN if _knows(template, markers)), None)
    return replace(known, wanted=thinking) if known else None


def _knows(template: str, markers: Markers) -> bool:
    return markers.start in template or (markers.end in template and markers.end not in _SHARED_ENDS)


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
