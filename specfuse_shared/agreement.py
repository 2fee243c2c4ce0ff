"""How far members agree: the share of an answer that each would have written, weighted by their votes.

The same for the places where they differ, with each member's own words, and for each field of JSON.

A member would have written a character of the chosen segment if its own draft has the same text up to that character.
Nothing is known after the end of a shorter draft. Text that a grammar forces and text with only one opinion do not
count.

For whole texts (`differences_of`), a number, name or longer word is a difference if another text lacks it; they come in
the text's order. `api_server/static/each.js` has the same rules. Within an answer (`differences_among`), numbers come
first, then names, longer words and short words.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Literal

from specfuse_shared.json_fields import Field, JsonText, parsed

if TYPE_CHECKING:
    from specfuse_shared.types import Candidate, RoundRecord

_SIGN = r"(?:(?<![^\W_])[-\u2212](?=\d))?"
_WORD = re.compile(rf"{_SIGN}[^\W_]+(?:[.,:'’\-][^\W_]+)*")
UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Chinese and Japanese characters, as a part of a class of a regular expression."""
_LETTERS = rf"(?:(?![{UNSPACED}])[^\W_])+"
_SINGLE_WORD = re.compile(rf"{_SIGN}{_LETTERS}(?:[.,:'’\-]{_LETTERS})*|[{UNSPACED}]|[+=×÷%°$€£]|[-*/\u2212](?=\s?\d)")
"""Words as above, except that each character of scripts without spaces and each sign of a sum is a word."""
_SENTENCE_ENDS = re.compile(r"[.!?:\n]")
_QUOTED = re.compile(r'"[^"\n]{1,80}"|“[^”\n]{1,80}”|„[^“”\n]{1,80}[“”]|«[^»\n]{1,80}»')
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DIGIT = re.compile(r"\d")
_WITHIN = re.compile(r"[.,:'’\-]")
_I = re.compile(r"I['’]")
LONG = 4
"""Characters of a word that counts: shorter ones are mostly grammar."""

Kind = Literal["number", "name", "word"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Characters `start` to `end` of an answer, which another answer lacks."""

    start: int
    end: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a text. `key`: the word without case and marks. `kind`: None for a short word."""

    start: int
    end: int
    key: str
    kind: Kind | None


def words_of(text: str, since: int = 0, *, single: bool = False) -> list[Word]:
    """Words that begin at or after `since`, in order. `single`: characters of scripts without spaces and signs of a
    sum are separate words."""
    matches = list((_SINGLE_WORD if single else _WORD).finditer(text))
    ends = [0, *(match.end() for match in matches)]
    quotes = deque(match.span() for match in _QUOTED.finditer(text))
    words: list[Word] = []
    for match, end in zip(matches, ends, strict=False):
        if match.start() < since:
            continue
        while quotes and quotes[0][1] <= match.start():
            quotes.popleft()
        begins = match is matches[0] or _SENTENCE_ENDS.search(text, end, match.start()) is not None
        in_quotes = bool(quotes) and quotes[0][0] < match.start()
        words.append(Word(match.start(), match.end(), _key(match[0]), _kind(match[0], begins, in_quotes)))
    return words


def differences_of(texts: Sequence[str]) -> list[tuple[Difference, ...]]:
    """For each text its differences to the others, in their order in the text."""
    words = [words_of(text) for text in texts]
    keys = [{word.key for word in mine} for mine in words]
    results = []
    for number, mine in enumerate(words):
        rest = keys[:number] + keys[number + 1 :]
        lacking = [word for word in mine if any(word.key not in theirs for theirs in rest)]
        results.append(tuple(Difference(word.start, word.end, word.kind) for word in lacking if word.kind is not None))
    return results


def _key(word: str) -> str:
    if _DIGIT.search(word):
        return _THOUSANDS.sub("", word).replace("\u2212", "-").casefold()
    return _WITHIN.sub("", word).casefold() or word


def _kind(word: str, begins: bool, in_quotes: bool) -> Kind | None:
    """A word with a digit is a number; one with a capital is a name, unless it `begins` a sentence; so is a quoted one
    that is long enough."""
    if _DIGIT.search(word):
        return "number"
    capitals = word[1:] if begins else word
    if len(word) > 1 and not capitals.islower() and any(map(str.isupper, capitals)) and not _I.match(word):
        return "name"
    if len(word) < LONG:
        return None
    return "name" if in_quotes else "word"


_MOST_WORDS = 40
"""Words of a draft that are compared."""
_JOINED = 3
"""Number of equal words that separate two differences, however short the words are."""
_NEAR = 64
"""Characters on each side of a segment in which the rest of a word is looked for."""
_BEFORE = 100
"""Characters before a draft that show whether it begins a sentence or is inside quotes."""
_TAIL = re.compile(rf"[^\s{UNSPACED}]*\Z")


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
class MemberWords:
    """The words that `member` would have written in a position: `words`, or nothing.

    `is_cut`: its draft ended inside the last word. `ends`: its answer would have ended after them. `weight`: of its
    vote in that round. `score`: the votes for its draft, as in `Candidate`; `own_score`: its own score. Both are None
    if nothing was verified.
    """

    member: str
    words: str
    weight: float
    score: float | None = None
    own_score: float | None = None
    is_cut: bool = False
    ends: bool = False


@dataclass(frozen=True, slots=True)
class MemberDifference:
    """Characters `start` to `end` of the answer, the words `text`, in whose place `others` would have written theirs.

    `kind`: the difference is in a "number", a "name" or another "word", in this order of importance. `share`: the
    weight of members that would have written `text`, among members with an opinion. `round`: the first difference.
    """

    start: int
    end: int
    text: str
    kind: Kind
    share: float
    round: int
    others: tuple[MemberWords, ...]


@dataclass(frozen=True, slots=True)
class FieldAgreement:
    """A field of JSON in the answer: characters `start` to `end`, `text`, hold the value at `path` ("$.days[0]").

    `value`: number of the JSON value in the answer (0; of several calls 0, 1, …). `share`: the weights of the members
    that would have written the whole field, among members with an opinion; None: the grammar forced it, or only one
    member had an opinion. `others`: their alternatives. A field that only they have has no `text`.
    """

    value: int
    path: str
    start: int
    end: int
    text: str
    share: float | None
    others: tuple[MemberWords, ...]


@dataclass(frozen=True, slots=True)
class _Opinion:
    """A member would have written the first `agrees` characters of a segment, and is known up to `reach`."""

    weight: float
    agrees: int
    reach: int


def agreement_of(rounds: Sequence[RoundRecord], size: int | None = None) -> Agreement | None:
    """Of an answer of `size` characters, which may end within its last round; None where nothing is known."""
    parts = [part for record in rounds for part in _parts(record, record.end if size is None else size)]
    length = sum(part.end - part.start for part in parts)
    if not length:
        return None
    share = sum(part.share * (part.end - part.start) for part in parts) / length
    return Agreement(min(1.0, share), tuple(_joined(part for part in parts if part.share < 1)))


def _parts(record: RoundRecord, size: int) -> Iterator[Disagreement]:
    """Stretches of a round's segment on which at least two members have an opinion, with the share that agrees."""
    segment = record.text[: max(0, size - record.start)]
    opinions = list(_opinions(record, segment))
    ends = sorted({0, len(segment), *(min(o.agrees, len(segment)) for o in opinions), *(o.reach for o in opinions)})
    for start, end in itertools.pairwise(ends):
        judged = [o for o in opinions if o.reach > start]
        if len(judged) > 1:
            share = sum(o.weight for o in judged if o.agrees > start) / sum(o.weight for o in judged)
            yield Disagreement(record.start + start, record.start + end, 1.0 if share > 1 - 1e-9 else share)


def _opinions(record: RoundRecord, segment: str) -> Iterator[_Opinion]:
    """Of each member that drafted."""
    for _, weight, draft in _drafts(record):
        agrees = _common(draft.text, segment)
        only_shorter = agrees == len(draft.text) and not draft.ends
        yield _Opinion(weight, agrees, agrees if only_shorter else len(segment))


def _drafts(record: RoundRecord) -> Iterator[tuple[str, float, Candidate]]:
    """Each member that drafted, with its weight; empty if a grammar forced the text."""
    if all(candidate.tokens == 0 for candidate in record.candidates):
        return
    drafts = {name: candidate for candidate in record.candidates for name in candidate.drafters}
    for name in record.active:
        if name in drafts:
            yield name, record.weights.get(name, 1.0), drafts[name]


def _common(one: str, two: str) -> int:
    """Characters that both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


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


# ── what others would have written ───────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Votes:
    """Who is known in a place, with its weight, and who would have written something else there."""

    known: dict[str, float] = field(default_factory=dict)
    others: dict[str, MemberWords] = field(default_factory=dict)

    def add(self, votes: Mapping[str, float], words: Iterable[MemberWords]) -> None:
        """The first entry wins."""
        self.known = {**votes, **self.known}
        self.others = {**{each.member: each for each in words}, **self.others}

    def words(self) -> tuple[MemberWords, ...]:
        """The members' alternatives, by weight."""
        return tuple(sorted(self.others.values(), key=lambda each: -each.weight))

    @property
    def share(self) -> float | None:
        """Share of members that would have written the text; None if only one member has an opinion."""
        if len(self.known) < 2 or not (whole := sum(self.known.values())):
            return None
        return max(0.0, 1.0 - sum(self.known.get(name, 0.0) for name in self.others) / whole)


def differences_among(rounds: Sequence[RoundRecord], text: str) -> tuple[MemberDifference, ...]:
    """Where members would have written other words than `text`, the most important first: numbers, names, longer words,
    short words; of each those where most of the votes differ, then those that come first.

    Differences of case, of spaces and of punctuation are left out: both sides say the same.
    """
    words = words_of(text, single=True)
    starts = [word.start for word in words]
    by_span: dict[tuple[int, int], tuple[int, _Votes]] = {}
    ranks: dict[tuple[int, int], int] = {}
    for record in _chosen_freely(rounds, text):
        if len(record.candidates) > 1:
            for rank, place, weights, member_words in _ComparedRound(record, text, words, starts).differences():
                ranks[place] = min(rank, ranks.get(place, rank))
                by_span.setdefault(place, (record.index, _Votes()))[1].add(weights, member_words)
    results = [
        (
            ranks[place],
            MemberDifference(*place, text[slice(*place)], _KINDS[ranks[place]], share, index, votes.words()),
        )
        for place, (index, votes) in by_span.items()
        if (share := votes.share) is not None
    ]
    return tuple(difference for _, difference in sorted(results, key=lambda e: (e[0], e[1].share, e[1].start)))


def _chosen_freely(rounds: Sequence[RoundRecord], text: str) -> Iterator[RoundRecord]:
    """Rounds within the text whose segment a member drafted. Text that closes a loop has no author."""
    for record in rounds:
        won = next((c for c in record.candidates if record.winner in c.drafters), None)
        if record.start <= len(text) and won is not None and won.text.startswith(record.text):
            yield record


_KINDS: Sequence[Kind] = ("number", "name", "word", "word")
_SHORT = 3


def _rank(words: Iterable[Word]) -> int:
    """How important the most important one is; the lower, the more."""
    return min((_SHORT if word.kind is None else _KINDS.index(word.kind) for word in words), default=_SHORT)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Words `first` to `last` of the segment, in whose place a draft has its words `draft_first` to `draft_last`."""

    first: int
    last: int
    draft_first: int
    draft_last: int


@dataclass(frozen=True, slots=True)
class _Draft:
    """A member's draft in a round. The segment begins with `agrees` characters of it.

    `text`: the draft and the text before it; `words`: words that may differ; `stretches`: positions of differences.
    """

    member: str
    weight: float
    candidate: Candidate
    agrees: int
    text: str = ""
    words: Sequence[Word] = ()
    stretches: Sequence[_Stretch] = ()

    @property
    def is_cut(self) -> bool:
        """Whether the draft may end inside a word."""
        return not self.candidate.ends and bool(self.words) and self.words[-1].end == len(self.text)

    def wrote(self, words: str, *, at_end: bool) -> MemberWords:
        """`at_end`: the words are its last ones."""
        score = self.candidate.scores.get(self.member)
        is_cut, ends = at_end and self.is_cut, at_end and self.candidate.ends
        return MemberWords(self.member, words, self.weight, self.candidate.score, score, is_cut, ends)


class _ComparedRound:
    """A round whose drafts are compared with the answer, word by word."""

    def __init__(self, record: RoundRecord, text: str, words: Sequence[Word], starts: Sequence[int]) -> None:
        self._record = record
        self._text = text
        self._start, self._end = record.start, min(record.end, len(text))
        won = next(c for c in record.candidates if record.winner in c.drafters)
        tail = _TAIL.search(text, max(0, self._start - _NEAR), self._start)
        self._base = self._start - (len(tail[0]) if tail else 0)
        first, last = bisect_left(starts, self._base), bisect_left(starts, self._end)
        is_endless = first > 0 and words[first - 1].end > self._start  # a word that begins long before the draft
        if first and not is_endless:
            self._base = max(self._base, words[first - 1].end)
        self._next = words[last : last + 1]
        self._own = words[first:last][:_MOST_WORDS]
        self._is_over = won.ends and record.end == len(text) and last - first <= _MOST_WORDS
        self._drafts = [] if is_endless else [self._read(*drafted) for drafted in _drafts(record)]

    def differences(self) -> Iterator[tuple[int, tuple[int, int], dict[str, float], list[MemberWords]]]:
        """Of each place its rank, where it is, who is known there, and who would have written something else."""
        for first, last in self._places():
            differing = [draft for draft in self._drafts if self._within(draft, first, last)]
            member_words = [self._alternative(draft, first, last) for draft in differing]
            place = self._place(first, last)
            votes = {draft.member: draft.weight for draft in self._drafts if self._knows(draft, place[0])}
            votes |= {draft.member: draft.weight for draft in differing}
            yield min(rank for rank, _ in member_words), place, votes, [words for _, words in member_words]
        ending = [draft for draft in self._drafts if self._ends_here(draft)]
        if ending:
            votes = {draft.member: draft.weight for draft in self._drafts if draft.agrees == self._end - self._start}
            yield _SHORT, (self._end, self._end), votes, [draft.wrote("", at_end=True) for draft in ending]

    # ── one draft ────────────────────────────────────────────────────────────────────────────────

    def _read(self, member: str, weight: float, candidate: Candidate) -> _Draft:
        agrees = _common(candidate.text, self._text[self._start : self._end])
        draft = _Draft(member, weight, candidate, agrees)
        is_shorter = agrees == len(candidate.text) and not candidate.ends
        is_same = agrees == self._end - self._start and not self._is_over
        if is_shorter or is_same or (agrees == len(candidate.text) and candidate.ends and self._is_over):
            return draft
        before = max(0, self._start - _BEFORE)
        text = self._text[before : self._start] + candidate.text
        words = words_of(text, self._base - before, single=True)[:_MOST_WORDS]
        draft = replace(draft, text=text, words=words)
        return replace(draft, stretches=list(self._stretches(draft)))

    def _stretches(self, draft: _Draft) -> Iterator[_Stretch]:
        """Positions of different words, within the part that both have."""
        ours, theirs = [word.key for word in self._own], [word.key for word in draft.words]
        goes_on = not draft.candidate.ends or len(theirs) == _MOST_WORDS
        any_before = False
        for i1, i2, j1, j2 in self._unlike(ours, theirs):
            if goes_on and j2 == len(theirs):
                shift = i1 + j2 - j1 - 1
                if draft.is_cut and i1 <= shift < i2 and ours[shift].startswith(theirs[j2 - 1]):
                    j2 -= 1  # the draft's last word may continue like ours
                if j1 == j2:
                    continue
                i2 = min(i2, i1 + j2 - j1)
            if i1 == i2 == len(ours) and not self._is_over:
                same = bool(self._next) and self._next[0].key.startswith(theirs[j1])
                if any_before or same:  # after a different word or punctuation the next word is unknown
                    continue
            any_before = True
            yield _Stretch(i1, i2, j1, j2)

    def _unlike(self, ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[int, int, int, int]]:
        """Stretches that differ. A few short words between two of them, such as "the", join them, unless each of the
        two replaces words by equally many words."""
        spans: list[tuple[int, int, int, int]] = []
        for tag, i1, i2, j1, j2 in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            if tag == "equal":
                continue
            if spans and self._are_joined(spans[-1], (i1, i2, j1, j2)):
                spans[-1] = (spans[-1][0], i2, spans[-1][2], j2)
            else:
                spans.append((i1, i2, j1, j2))
        return spans

    def _are_joined(self, one: tuple[int, int, int, int], two: tuple[int, int, int, int]) -> bool:
        between = self._own[one[1] : two[0]]
        same_size = all(i2 - i1 == j2 - j1 for i1, i2, j1, j2 in (one, two))
        return not same_size and len(between) < _JOINED and all(word.kind is None for word in between)

    def _ends_here(self, draft: _Draft) -> bool:
        """Whether the draft would have ended the answer after the segment, while the answer continues."""
        return (
            draft.candidate.ends
            and draft.agrees == self._end - self._start == len(draft.candidate.text)
            and (self._end < len(self._text))
        )

    def _knows(self, draft: _Draft, at: int) -> bool:
        return draft.candidate.ends or self._start + len(draft.candidate.text) > at

    # ── all of them ──────────────────────────────────────────────────────────────────────────────

    def _places(self) -> list[tuple[int, int]]:
        """Stretches of all drafts, those that overlap as one."""
        places: list[tuple[int, int]] = []
        for first, last in sorted({(s.first, s.last) for draft in self._drafts for s in draft.stretches}):
            if places and (first < places[-1][1] or first == places[-1][0]):
                places[-1] = (places[-1][0], max(last, places[-1][1]))
            else:
                places.append((first, last))
        return places

    @staticmethod
    def _within(draft: _Draft, first: int, last: int) -> list[_Stretch]:
        return [
            s for s in draft.stretches if first <= s.first and s.last <= last and (s.first < last or s.first == first)
        ]

    def _alternative(self, draft: _Draft, first: int, last: int) -> tuple[int, MemberWords]:
        """The draft's alternative to these words of the segment, and its importance."""
        text = self._within(draft, first, last)
        begin = text[0].draft_first - (text[0].first - first)
        end = min(text[-1].draft_last + (last - text[-1].last), len(draft.words))
        theirs, ours = draft.words[begin:end], self._own[first:last]
        keys = {word.key for word in theirs} ^ {word.key for word in ours}
        words = draft.text[theirs[0].start : theirs[-1].end] if theirs else ""
        rank = _rank(word for word in (*theirs, *ours) if word.key in keys)
        return rank, draft.wrote(words, at_end=end == len(draft.words))

    def _place(self, first: int, last: int) -> tuple[int, int]:
        """Position of these words, or the position after the previous word if there are none."""
        if last > first:
            return self._own[first].start, self._own[last - 1].end
        at = self._own[first - 1].end if first else self._start
        return at, at


# ── fields of JSON ───────────────────────────────────────────────────────────────────────────────


def fields_among(rounds: Sequence[RoundRecord], text: str) -> tuple[FieldAgreement, ...]:
    """How far members agree on each field of the JSON in `text`, in their order; () where there is none.

    JSON that is cut or broken has the fields before that point.
    """
    answer = JsonText(text)
    our_fields: dict[tuple[int, str], Field] = {}
    for each in answer.fields:
        our_fields.setdefault((each.value, each.path), each)
    if not our_fields:
        return ()
    votes = {at: _Votes() for at in our_fields}
    added: dict[tuple[int, str], tuple[int, _Votes]] = {}
    for record in _chosen_freely(rounds, text):
        drafts = [_Draft(*drafted, _common(drafted[2].text, record.text)) for drafted in _drafts(record)]
        for draft in drafts:
            for theirs, words in answer.fields_after(record.start, draft.candidate.text):
                at = (theirs.value, theirs.path)
                if at in our_fields:
                    dissent = (
                        [_field_words(draft, theirs, words)] if _differs(text, our_fields[at], theirs, words) else []
                    )
                    votes[at].add({draft.member: draft.weight}, dissent)
                elif theirs.whole and theirs.value < answer.whole_values:
                    place = min(record.start + draft.agrees, len(text))
                    weights = {each.member: each.weight for each in drafts}
                    added.setdefault(at, (place, _Votes()))[1].add(weights, [_field_words(draft, theirs, words)])
    results = [
        FieldAgreement(*at, each.start, each.end, text[each.start : each.end], votes[at].share, votes[at].words())
        for at, each in our_fields.items()
    ]
    results += [
        FieldAgreement(*at, place, place, "", votes_on.share, votes_on.words())
        for at, (place, votes_on) in added.items()
    ]
    return tuple(sorted(results, key=lambda field: field.start))


def _field_words(draft: _Draft, field: Field, words: str) -> MemberWords:
    score = draft.candidate.scores.get(draft.member)
    return MemberWords(draft.member, words, draft.weight, draft.candidate.score, score, not field.whole)


def _differs(text: str, our_field: Field, theirs: Field, words: str) -> bool:
    """Whether a field surely has another value; `words`, which may lack its beginning, are all that is known of it."""
    left_out = theirs.end - theirs.start - len(words)
    ours = text[our_field.start + left_out : our_field.end]
    if not theirs.whole:
        return not ours.startswith(words) and not (not our_field.whole and words.startswith(ours))
    if not our_field.whole:
        return not words.startswith(ours)
    if ours == words or left_out:
        return ours != words
    one, two = parsed(ours), parsed(words)
    return one is None or isinstance(one, bool) or isinstance(two, bool) or one != two
