"""Holds the answers of one request to a grammar.

`AnswerConstraint` knows the answer as text: what the grammar dictates next, which part of a candidate is valid and
leaves room to finish within `max_tokens`, and how to finish. `MemberConstraint` knows one member's tokens: it masks
what the member may draft. Both advance by the committed text, whoever wrote it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from specfuse_shared.errors import ConfigError, GenerationError, RequestError, ValueTooLongError
from specfuse_shared.text.codec import Codec, Encoding
from specfuse_shared.text.grammar import Grammar, guidance
from specfuse_shared.types import FinishReason

_MOST_CLOSING_BYTES = 1024
_PATIENCE = 256
_MOST_FORCED = 4096
"""Characters of dictated text a round: a schema that requires itself dictates without end."""
_END = 256
"""The end of a text, behind the 256 bytes."""
_CLOSERS, _CLOSERS_IN_STRING = b'}])>"', b'"0'
_DETOURS = b"\\,.eE{[(<"


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

    `codec` and `max_tokens` are those of the reference member. Between calls at least one complete value that
    begins with the committed text fits into `max_tokens`, unless none was found at all.
    """

    def __init__(self, grammar: Grammar, codec: Codec, max_tokens: int) -> None:
        self._codec, self._limit, self._counted = codec, max_tokens, Encoding()
        self._matcher = guidance().LLMatcher(_byte_vocabulary(), grammar.compiled, log_level=0)
        self._start = self._matcher.deep_copy()
        shortest = _closing(self._matcher)
        self._can_finish = shortest is not None
        if shortest is not None and (needs := len(codec.encode(shortest))) > max_tokens:
            raise ValueTooLongError(
                f"max_tokens={max_tokens} cannot hold any value of this grammar: "
                f"{shortest[:80]!r} alone takes {needs} tokens"
            )

    @property
    def satisfied(self) -> bool:
        """The committed text is a complete value."""
        return bool(self._matcher.is_accepting())

    def forced(self) -> str:
        """What the grammar dictates next; white space at its end is left to the next draft, where words begin."""
        return bytes(self._matcher.compute_ff_bytes()).decode(errors="ignore")[:_MOST_FORCED].rstrip()

    def admit(self, text: str, ends: bool) -> Admitted:
        """The longest part of a draft that is valid and leaves room to finish; the finish itself if there is none."""
        after, text = _follow(self._matcher, text)
        if self._fits(after, text):
            reason = FinishReason.STOP if after.is_stopped() else None
            return Admitted(text, ends and after.is_accepting() and reason is None, reason)
        head = self._shortened(text)
        return Admitted(head, False, None) if head else Admitted(self.finish(), False, FinishReason.LENGTH)

    def _shortened(self, text: str) -> str:
        """The longest beginning of `text` behind which the value fits; empty if there is none."""
        if not self._can_finish:  # then only the count decides, and the text may be long
            return text[: bisect.bisect_right(range(1, len(text)), False, key=lambda n: not self._counts(text[:n]))]
        beginnings = (_follow(self._matcher, text[:size]) for size in range(len(text) - 1, 0, -1))
        return next((head for after, head in beginnings if self._fits(after, head)), "")

    def finish(self) -> str:
        """A short text that completes the value; empty if it is complete, or if none was found."""
        return _closing(self._matcher) or ""

    def accepts(self, text: str) -> bool:
        """Whether the answer is a complete value once `text` is added."""
        return self._is_complete(self._matcher, text)

    def is_value(self, text: str) -> bool:
        """Whether `text` by itself is a complete value."""
        return self._is_complete(self._start, text)

    def commit(self, text: str) -> None:
        """`text`, admitted before, is now part of the answer."""
        self._matcher, _ = _follow(self._matcher, text)
        self._counted = self._codec.extend(self._counted, text)

    def _is_complete(self, matcher: Any, text: str) -> bool:
        after, valid = _follow(matcher, text)
        return valid == text and bool(after.is_accepting())

    def _fits(self, after: Any, text: str) -> bool:
        """Whether the value can be finished behind `text`; one token stays free until it is."""
        closing = _closing(after) if self._can_finish else ""
        return self._counts(text, spare=bool(closing)) and (not closing or self._counts(text + closing))

    def _counts(self, text: str, spare: bool = False) -> bool:
        """Whether `max_tokens` hold the answer with `text`, with one token to spare if asked."""
        return len(self._codec.extend(self._counted, text).ids) <= self._limit - spare


class MemberConstraint:
    """Keeps one member's drafts of one answer inside the grammar, over the member's own tokens."""

    def __init__(self, grammar: Grammar, vocabulary: Any, stop_ids: Sequence[int]) -> None:
        self._vocabulary, self._stop_ids = vocabulary, list(stop_ids)
        self._committed = guidance().LLMatcher(vocabulary, grammar.compiled, log_level=0)
        if self._committed.is_error():
            raise RequestError(f"this grammar cannot be used: {self._committed.get_error()}")
        self._draft = self._committed

    def start(self) -> None:
        """Begin a draft behind the committed answer."""
        self._draft = self._committed.deep_copy()

    @property
    def finished(self) -> bool:
        """Nothing can follow the draft."""
        return bool(self._draft.is_stopped())

    def allowed(self) -> bytes:
        """The tokens that may come next, a bit each, the lowest first; a stuck draft may only end."""
        bits: bytes = self._draft.compute_bitmask()
        if any(bits):
            return bits
        ends = bytearray(bits)
        for token in self._stop_ids:
            ends[token >> 3] |= 1 << (token & 7)
        return bytes(ends)

    def follows(self, ids: Sequence[int]) -> int:
        """How many of the ids, from the first on, may follow the draft."""
        return int(self._draft.validate_tokens(list(ids)))

    def advance(self, token: int) -> None:
        """The draft goes on with `token`, which the mask allowed."""
        self._draft.consume_token(token)

    def commit(self, text: str) -> None:
        """`text` is now part of the answer."""
        ids = self._vocabulary.greedy_tokenize(text)
        if not self._committed.consume_tokens(ids):
            # of the text only its length: what members say stays out of logs
            raise GenerationError(f"a text of {len(text)} characters does not follow the grammar", member="", text="")
        self._draft = self._committed


def token_vocabulary(tokenizer: Any, size: int, stop_ids: Sequence[int]) -> Any:
    """A member's tokens as bytes, for `MemberConstraint`; takes seconds for large vocabularies.

    `size`: rows of the logits. Raises `ConfigError` for tokenizers without a fast version.
    """
    import llguidance.hf

    try:
        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=max(size, len(tokenizer)), eos_token=list(stop_ids))
    except ValueError as error:
        raise ConfigError(f"grammars need a fast tokenizer: {error}") from error


class _Bytes:
    """Text as its UTF-8 bytes, in the form that llguidance wraps."""

    eos_token_id, bos_token_id = _END, None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (_END,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def _byte_vocabulary() -> Any:
    library = guidance()
    return library.LLTokenizer(library.TokenizerWrapper(_Bytes()), n_vocab=_END + 1, eos_token=_END, slices=[])


def _follow(matcher: Any, text: str) -> tuple[Any, str]:
    """The matcher behind the longest valid part of `text`, and that part, in whole characters."""
    after, data = matcher.deep_copy(), text.encode()
    valid = after.validate_tokens(list(data))
    if valid < len(data):
        text = data[:valid].decode(errors="ignore")
    after.consume_tokens(list(text.encode()))
    return after, text


def _closing(matcher: Any) -> str | None:
    """A short text that completes the value, found greedily; None if the way does not end soon."""
    after, found = matcher.deep_copy(), bytearray()
    while len(found) < _MOST_CLOSING_BYTES:
        if after.is_accepting():
            return found.decode()
        step = bytes(after.compute_ff_bytes()) or _shortest_step(after, max(0, len(found) - _PATIENCE))
        if not step or not after.consume_tokens(list(step)):
            return None
        found += step
    return None


def _shortest_step(matcher: Any, turn: int) -> bytes:
    """The allowed byte that most likely leads to the end: one that closes or is short, else one that gets on.

    Where that leads nowhere for long, the allowed bytes take turns.
    """
    allowed = _allowed(matcher)
    in_string = ord("x") in allowed and ord(" ") in allowed
    closers = [byte for byte in (_CLOSERS_IN_STRING if in_string else _CLOSERS) if byte in allowed]
    ranked = closers or sorted(allowed, key=lambda byte: _detour(matcher, byte, allowed))
    if turn:
        ranked = sorted(allowed)[turn % len(allowed) :]
    return bytes(ranked[:1])


def _detour(matcher: Any, byte: int, allowed: set[int]) -> tuple[bool | int, ...]:
    """Orders bytes: those that end the value, then those behind which something else is allowed, the shortest first."""
    after = matcher.deep_copy()
    after.consume_token(byte)
    unusual, idle = byte > 127, _allowed(after) == allowed
    dictated = len(after.compute_ff_bytes())
    return not after.is_accepting(), unusual, idle, byte in _DETOURS, byte not in b"0123456789", dictated, byte


def _allowed(matcher: Any) -> set[int]:
    packed = matcher.compute_bitmask()
    return {byte for byte in range(256) if packed[byte >> 3] >> (byte & 7) & 1}
