"""How far the members of an answer agree: the share of its text that all of them would have written, by their weights.

A member would have written a character of the chosen segment up to the place where its own draft leaves the segment,
and not behind it. Behind the end of a shorter draft nothing is known. Text that a grammar dictated, and text on which
only one member has an opinion, does not count."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specfuse_shared.types import RoundRecord


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Characters `start` to `end` of the answer, which only members with this `share` of the weights would have
    written."""

    start: int
    end: int
    share: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """`share`: mean over the known characters, in [0, 1]. `places`: where it is below 1."""

    share: float
    places: tuple[Disagreement, ...]


@dataclass(frozen=True, slots=True)
class _Opinion:
    """A member would have written the first `agrees` characters of a segment, and is known up to `reach`."""

    weight: float
    agrees: int
    reach: int


def agreement_of(rounds: Sequence[RoundRecord], size: int | None = None) -> Agreement | None:
    """Of an answer of `size` characters, which may end within its last round; None where nothing is known."""
    found = [part for record in rounds for part in _parts(record, record.end if size is None else size)]
    known = sum(part.end - part.start for part in found)
    if not known:
        return None
    share = sum(part.share * (part.end - part.start) for part in found) / known
    return Agreement(min(1.0, share), tuple(_joined(part for part in found if part.share < 1)))


def _parts(record: RoundRecord, size: int) -> Iterator[Disagreement]:
    """The known stretches of a round's segment, whatever their share."""
    segment = record.text[: max(0, size - record.start)]
    opinions = list(_opinions(record, segment))
    ends = sorted({0, len(segment), *(min(o.agrees, len(segment)) for o in opinions), *(o.reach for o in opinions)})
    for start, end in itertools.pairwise(ends):
        known = [o for o in opinions if o.reach > start]
        if len(known) > 1:
            share = sum(o.weight for o in known if o.agrees > start) / sum(o.weight for o in known)
            yield Disagreement(record.start + start, record.start + end, 1.0 if share > 1 - 1e-9 else share)


def _opinions(record: RoundRecord, segment: str) -> Iterator[_Opinion]:
    """Of each member that drafted; what a grammar dictated says nothing."""
    if all(candidate.tokens == 0 for candidate in record.candidates):
        return
    drafts = {name: candidate for candidate in record.candidates for name in candidate.drafters}
    for name in record.active:
        weight, draft = record.weights.get(name, 1.0), drafts.get(name)
        if draft is not None:
            agrees = _common(draft.text, segment)
            only_shorter = agrees == len(draft.text) and not draft.ends
            yield _Opinion(weight, agrees, agrees if only_shorter else len(segment))


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _joined(parts: Iterator[Disagreement]) -> Iterator[Disagreement]:
    """Neighbours of one share as one place."""
    last: Disagreement | None = None
    for part in parts:
        if last is not None and (last.end, last.share) == (part.start, part.share):
            last = Disagreement(last.start, part.end, part.share)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last
