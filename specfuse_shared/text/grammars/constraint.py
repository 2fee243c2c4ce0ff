"""Holds the answers of one request to a grammar.

`AnswerConstraint` follows the answer as text: the text that the grammar forces next, the part of a candidate that is
valid and can be finished within `max_tokens`, and the finish. `MemberConstraint` works on one member's tokens: it
masks invalid drafts. Both advance by the committed text of any author.

Grammars come from clients, and one step of some takes long. So every answer has an `Allowance` of seconds for them.

Texts that complete a value under a grammar, found within a budget.

A search is greedy, a byte at a time, and copies the matcher for each byte that is allowed, once for each set of them.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specfuse_shared.errors import GenerationError, UnfinishedValueError, ValueTooLongError
from specfuse_shared.text.codec import Codec, Encoding
from specfuse_shared.text.grammars.grammar import Grammar
from specfuse_shared.text.grammars.guidance import Vocabulary, byte_vocabulary, gave_up
from specfuse_shared.types import FinishReason

MOST_BYTES = 1024
MOST_TRIALS = 20_000
"""Copies of a matcher for one answer at once; a usual JSON object takes some hundred."""
MOST_SECONDS = 0.5
"""Of the processor, for searches at once; only grammars whose single steps are slow need as many."""
_TRIALS_A_ROUND, _SECONDS_A_ROUND = 1_000, 0.02
_PATIENCE = 256
_LOOKS_AHEAD, _LETTERS_AHEAD = 3, 3
_STRING_MARKS = b'"\\'
_DIGITS = b"0123456789"
_CLOSERS = b'}])>"'
_OF_TEXT = b"xqQ"
"""Letters that occur in text only: if one of them is allowed, a bracket may be text, too."""
_DETOURS = b"\\,.eE{[(<"


class Closings:
    """Searches the closings of one answer, within a budget that every round refills a little."""

    def __init__(self) -> None:
        self._trials = MOST_TRIALS
        self._seconds = MOST_SECONDS
        self._stops_at = 0.0
        self._steps: dict[bytes, bytes] = {}
        self._idle: dict[bytes, bool] = {}
        self._looks: Counter[bytes] = Counter()
        self._last = b""

    @property
    def spent(self) -> bool:
        """No budget is left for this round."""
        return self._trials <= 0 or self._seconds <= 0

    def refill(self) -> None:
        """A round is over."""
        self._trials = min(MOST_TRIALS, max(0, self._trials) + _TRIALS_A_ROUND)
        self._seconds = min(MOST_SECONDS, max(0.0, self._seconds) + _SECONDS_A_ROUND)

    def shortest(self, matcher: Any) -> str | None:
        """A short text that completes the value; None if none was found."""
        if matcher.is_accepting():
            return ""
        began = time.thread_time()
        self._stops_at = began + self._seconds
        closing = self._search(matcher)
        self._seconds -= time.thread_time() - began
        try:
            return None if closing is None else closing.decode()
        except UnicodeDecodeError:
            return None

    @property
    def _is_over(self) -> bool:
        return self._trials <= 0 or time.thread_time() >= self._stops_at

    def _search(self, matcher: Any) -> bytes | None:
        after, closing, self._last = matcher.deep_copy(), bytearray(), b""
        while len(closing) < MOST_BYTES and not self._is_over:
            if after.is_accepting():
                return bytes(closing)
            step = bytes(after.compute_ff_bytes()) or self._step(after, max(0, len(closing) - _PATIENCE))
            if not step or not after.consume_tokens(list(step)):
                return None
            closing += step
        return None

    def _step(self, matcher: Any, turn: int) -> bytes:
        """The allowed bytes that most probably lead to the end: closing bytes, short ones, then progress.

        If that does not end for long, the allowed bytes alternate. States that allow the same bytes are equal.
        """
        self._trials -= 1
        mask: bytes = matcher.compute_bitmask()
        allowed = _bytes_of(mask)
        if not allowed:
            return b""
        if turn:
            return bytes([allowed[turn % len(allowed)]])
        closers = [byte for byte in _CLOSERS if byte in allowed]
        if closers and not any(letter in allowed for letter in _OF_TEXT):
            return bytes(closers[:1])
        if mask not in self._steps:
            self._steps[mask] = self._best(matcher, mask, allowed)
        idle, self._last = self._idle[mask] or mask == self._last, mask
        if idle and self._looks[mask] < _LOOKS_AHEAD:
            self._looks[mask] += 1
            ways = [way for byte in allowed if (way := self._ahead(matcher, byte, mask))]
            if ways:
                self._steps[mask], self._idle[mask] = (
                    min(ways, key=lambda way: (len(way), way[0] not in _DIGITS)),
                    False,
                )
        return self._steps[mask]

    def _best(self, matcher: Any, mask: bytes, allowed: Sequence[int]) -> bytes:
        tried: list[tuple[bool | int, ...]] = []
        for byte in allowed:
            if self._is_over:
                break
            self._trials -= 1
            tried.append(_detour(matcher, byte, mask))
        *_, idle, _is_detour, _is_other, _dictated, byte = min(tried, default=(False, False, False, 0, allowed[0]))
        self._idle[mask] = bool(idle)
        return bytes([byte])

    def _ahead(self, matcher: Any, byte: int, mask: bytes) -> bytes:
        """The byte, and the fewest letters after it that change the allowed bytes, as in the end of a mail address."""
        if byte > 127 or byte in _STRING_MARKS:
            return b""
        after, way = matcher.deep_copy(), bytes([byte])
        while len(way) <= _LETTERS_AHEAD and not self._is_over and after.consume_token(way[-1]):
            self._trials -= 1
            bitmask: bytes = after.compute_bitmask()
            if after.is_accepting() or bitmask != mask:
                return way
            way += b"a"
        return b""


def _detour(matcher: Any, byte: int, mask: bytes) -> tuple[bool | int, ...]:
    """Orders bytes: bytes that end the value, then bytes that change the allowed ones, the shortest first.

    Within text, a quote that changes the allowed bytes ends a string; any other quote is a normal character.
    """
    after = matcher.deep_copy()
    after.consume_token(byte)
    unusual, idle = byte > 127 or byte == ord("\\"), after.compute_bitmask() == mask
    dictated = len(after.compute_ff_bytes())
    ends = after.is_accepting() or (byte == ord('"') and not idle)
    return not ends, unusual, idle, byte in _DETOURS, byte not in _DIGITS, dictated, byte


def completes(matcher: Any, closing: str) -> bool:
    """Whether the value is complete after `closing`."""
    data = list(closing.encode())
    if matcher.validate_tokens(data) < len(data):
        return False
    after = matcher.deep_copy()
    return bool(after.consume_tokens(data) and after.is_accepting())


def _bytes_of(mask: bytes) -> list[int]:
    return [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]


_LARGE_SIZE = MOST_BYTES + 32
_MOST_FORCED = 4096
"""Maximum characters of forced text a round: a schema that requires itself forces text without end."""


@dataclass(slots=True)
class Allowance:
    """Seconds of the processor that the grammar of one answer may take: some at once, and some for every call.

    Usual grammars take a hundredth of that, so it decides nothing but that no grammar stalls other answers.
    """

    most: float = 0.5
    per_call: float = 0.004
    left: float = 0.5

    @property
    def spent(self) -> bool:
        return self.left < 0

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Takes what happens inside from the allowance."""
        began = time.thread_time()  # not what passes while other threads run
        try:
            yield
        finally:
            self.left = min(self.most, self.left + self.per_call - (time.thread_time() - began))


@dataclass(frozen=True, slots=True)
class Admitted:
    """The part of a draft that may become a segment.

    `ends`: the member ended its turn where the grammar allows it. `reason`: the answer is over with this text, since
    its value is complete (STOP) or had to be finished within `max_tokens` (LENGTH).
    """

    text: str
    ends: bool
    reason: FinishReason | None


class AnswerConstraint:
    """The grammar along one answer. Raises `ValueTooLongError` if no value fits into `max_tokens`.

    `codec` and `max_tokens`: the reference member's. Between calls at least one complete value that begins with the
    committed text fits into `max_tokens`, unless none was found. The search is skipped while every possible value
    fits. If a step of the grammar takes more than its library or the `Allowance` allows, every method raises
    `UnfinishedValueError`.
    """

    def __init__(self, grammar: Grammar, codec: Codec, max_tokens: int) -> None:
        self._codec = codec
        self._limit = max_tokens
        self._counted = Encoding()
        self._allowance = Allowance()
        self._closings = Closings()
        self._matcher = byte_vocabulary().matcher(grammar.compiled)
        self._start = self._matcher.deep_copy()
        self._closing = self._closings.shortest(self._matcher)
        self._found_closings: dict[str, str | None] = {}
        self._can_finish = self._closing is not None
        if self._closing is not None and (needs := len(codec.encode(self._closing))) > max_tokens:
            raise ValueTooLongError(
                f"max_tokens={max_tokens} cannot hold any value of this grammar: "
                f"{self._closing[:80]!r} alone takes {needs} tokens"
            )

    def forced(self) -> str:
        """Text that the grammar forces next, without white space at its end, where words of the next draft begin."""
        with self._allowance.metered():
            dictated = bytes(self._matcher.compute_ff_bytes())
        return dictated.decode(errors="ignore")[:_MOST_FORCED].rstrip()

    def admit(self, text: str, ends: bool) -> Admitted:
        """The longest part of a draft that is valid and can be finished; the finish itself if there is none."""
        after, text = self._follow(self._matcher, text)
        if self._fits(after, text):
            reason = FinishReason.STOP if after.is_stopped() else None
            return Admitted(text, ends and after.is_accepting() and reason is None, reason)
        head = self._shortened(text)
        return Admitted(head, False, None) if head else Admitted(self.finish(), False, FinishReason.LENGTH)

    def _shortened(self, text: str) -> str:
        """The longest beginning of `text` after which the value still fits.

        Empty if there is none.
        """

        def is_too_long(size: int) -> bool:
            if not self._can_finish:  # then only the count decides
                return not self._counts(text[:size])
            after, head = self._follow(self._matcher, text[:size])
            return not self._fits(after, head)

        return text[: bisect.bisect_left(range(1, len(text)), True, key=is_too_long)]

    def finish(self) -> str:
        """A short text that completes the value; empty if it is complete, or if none was found."""
        if self._closing is None and self._can_finish:
            self._closing = self._closings.shortest(self._matcher)
        return self._closing or ""

    def finish_after(self, text: str) -> str | None:
        """A short text that completes the value after `text` within `max_tokens`; None if none was found."""
        after, valid = self._follow(self._matcher, text)
        closing = self._closing_after(after, text) if valid == text else None
        return closing if closing is not None and self._leaves_room(text, closing) else None

    def accepts(self, text: str) -> bool:
        """Whether the answer is a complete value once `text` is added."""
        return self._is_complete(self._matcher, text)

    def is_value(self, text: str) -> bool:
        """Whether `text` by itself is a complete value."""
        return self._is_complete(self._start, text)

    def commit(self, text: str) -> None:
        """`text`, admitted before, is now part of the answer."""
        self._matcher, _ = self._follow(self._matcher, text)
        if self._can_finish:
            look = self._known if self._is_roomy(text) else self._closing_after
            self._closing = look(self._matcher, text)
        self._found_closings.clear()
        self._closings.refill()
        self._counted = self._codec.extend(self._counted, text)

    def _is_complete(self, matcher: Any, text: str) -> bool:
        after, valid = self._follow(matcher, text)
        return valid == text and bool(after.is_accepting())

    def _fits(self, after: Any, text: str) -> bool:
        """Whether the value can be finished after `text`; one token stays free for its end."""
        if not self._can_finish:
            return self._counts(text)
        if self._is_roomy(text) or self._leaves_room(text, self._known(after, text)):
            return True
        closing = self._closing_after(after, text)
        if closing is None and (self._closing is None or self._closings.spent):  # nothing is known: the count decides
            return self._counts(text, spare=1)
        return self._leaves_room(text, closing)

    def _is_roomy(self, text: str) -> bool:
        """Whether every closing that the search can find would fit."""
        return self._counts(text, spare=_LARGE_SIZE)

    def _leaves_room(self, text: str, closing: str | None) -> bool:
        if closing is None:
            return False
        return self._counts(text, spare=int(bool(closing))) and (not closing or self._counts(text + closing))

    def _closing_after(self, after: Any, text: str) -> str | None:
        """The completion of the value after a text of this round; searched for once."""
        if text not in self._found_closings:
            cached = self._known(after, text)
            self._found_closings[text] = self._closings.shortest(after) if cached is None else cached
        return self._found_closings[text]

    def _known(self, after: Any, text: str) -> str | None:
        """The closing of the answer so far, or its rest after `text`, if it still completes the value."""
        closing = self._closing or ""
        with self._allowance.metered():
            return next((each for each in (closing[len(text) :], closing) if completes(after, each)), None)

    def _counts(self, text: str, spare: int = 0) -> bool:
        """Whether `max_tokens` allow the answer with `text` and this number of further tokens."""
        return len(self._codec.extend(self._counted, text).ids) <= self._limit - spare

    def _follow(self, matcher: Any, text: str) -> tuple[Any, str]:
        """The matcher after the longest valid part of `text`, and that part, in whole characters."""
        with self._allowance.metered():
            after, data = matcher.deep_copy(), text.encode()
            valid = after.validate_tokens(list(data))
            if valid < len(data):
                text = data[:valid].decode(errors="ignore")
            after.consume_tokens(list(text.encode()))
        if self._allowance.spent or gave_up(after):
            message = "the grammar takes too long to follow: simplify it, its ambiguous rules first"
            raise UnfinishedValueError(message, member=None, text=self._counted.text)
        return after, text


class MemberConstraint:
    """Keeps one member's drafts of one answer inside the grammar, over the member's own tokens.

    If a step takes more than the library or the `Allowance` allows, drafts end at once; the `AnswerConstraint` decides
    about the answer.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary, stop_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary.tokens
        self._stop_ids = list(stop_ids)
        self._allowance = Allowance()
        self._committed = vocabulary.matcher(grammar.compiled)
        self._draft = self._committed

    def start(self) -> None:
        """Begin a draft after the committed answer."""
        self._draft = self._committed.deep_copy()

    @property
    def finished(self) -> bool:
        """Nothing can follow the draft."""
        return bool(self._draft.is_stopped())

    def allowed(self) -> bytes:
        """The tokens that may come next, a bit each, the lowest first; a stuck draft may only end."""
        with self._allowance.metered():
            bits: bytes = self._draft.compute_bitmask()
        if any(bits) and not self._allowance.spent:
            return bits
        ends = bytearray(len(bits))
        for token in self._stop_ids:
            ends[token >> 3] |= 1 << (token & 7)
        return bytes(ends)

    def dictated(self) -> str:
        """Text that the grammar forces after the draft, in whole characters."""
        with self._allowance.metered():
            return bytes(self._draft.compute_ff_bytes()).decode(errors="ignore")[:_MOST_FORCED]

    def follows(self, ids: Sequence[int]) -> int:
        """How many of the ids, from the first on, may follow the draft."""
        with self._allowance.metered():
            return int(self._draft.validate_tokens(list(ids)))

    def advance(self, token: int) -> None:
        """Extend the draft by `token`, which the mask allowed."""
        with self._allowance.metered():
            self._draft.consume_token(token)

    def commit(self, text: str) -> None:
        """`text` is now part of the answer."""
        ids = self._vocabulary.greedy_tokenize(text)
        with self._allowance.metered():
            followed = self._committed.consume_tokens(ids)
        if not followed and not gave_up(self._committed):
            # only the length of the text: logs contain no output of members
            raise GenerationError(f"a text of {len(text)} characters does not follow the grammar", member="", text="")
        self._draft = self._committed
