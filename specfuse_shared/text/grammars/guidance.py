"""The grammar library, llguidance (https://github.com/guidance-ai/llguidance): vocabularies, compilation, limits.

Compiling descends as deep as a grammar refers, about 10 KiB of native stack for each reference of a JSON schema and 3
for each rule of a Lark grammar. An overflow ends the process, so grammars compile in a thread whose stack holds
any grammar within `specfuse_shared.text.grammars.bounds`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

from specfuse_shared.errors import ConfigError, EngineBusyError, GrammarError, MissingExtraError

T = TypeVar("T")

STACK_BYTES = 256 * 2**20
"""Reserved, not used: pages of a stack take memory when they are touched."""
STEP_ITEMS = 10_000
"""Parser items of one step; the library's own 50,000 let an ambiguous grammar take 40 ms a token."""
ROW_ITEMS = 8_000
"""Parser items in one place, which is about 340 objects to choose from: there a first mask takes 40 ms, and 160 ms for
twice as many. The library's own 2,000 end at 87."""
BYTE_END = 256
"""The end of a text, after the 256 bytes."""
_COMPILED = 16
"""Grammars that a vocabulary keeps compiled."""
_TOO_COMPLEX = ("ParserTooComplex", "LexerTooComplex")
_TOO_MANY = re.compile(r"row has \d+ items")
"""The library's message about too many alternatives in one position, for which it has no stop reason."""
_TRIED_BYTES = 16
"""Of those that may come first."""
_STACK_LOCK = threading.Lock()
_BEFORE = "\x02"
"""A prefix for texts whose tokens are looked up; no token contains it together with other text."""
_MARK = re.compile(r"<.*>", re.DOTALL)
"""Added tokens that look like marks are control tokens, whether or not their tokenizer says so."""


def guidance() -> Any:
    """The library. Raises `MissingExtraError` without the extra."""
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError("A grammar, tool calls or structured output", "grammar") from error
    return llguidance


class Vocabulary:
    """Tokens as the library reads them, and the grammars that were compiled for them lately."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens
        self._compiled = lru_cache(maxsize=_COMPILED)(partial(_compile, tokens))

    def matcher(self, source: str) -> Any:
        """A matcher at the start of a grammar, given as the library takes it. Raises `GrammarError`."""
        return self._compiled(source).deep_copy()


@lru_cache(maxsize=32)
def problem_of(source: str) -> str | None:
    """Why the library cannot use a grammar; None if it can."""
    return on_deep_stack(lambda: validated(source))


def validated(source: str) -> str | None:
    """`problem_of` for those who are on a deep stack already."""
    failed, messages = guidance().LLMatcher.validate_grammar_with_warnings(source)
    return str(messages[0]).strip() if failed else None


def check_beginning(source: str) -> None:
    """Raises `GrammarError` for a grammar with more alternatives at its beginning than the library takes.

    Its first mask is computed, and the masks after every possible first byte.
    """
    start = _compile(byte_vocabulary().tokens, source)
    mask: bytes = start.compute_bitmask()
    allowed = [byte for byte in range(BYTE_END) if mask[byte >> 3] >> (byte & 7) & 1]
    for byte in allowed[:_TRIED_BYTES]:
        after = start.deep_copy()
        after.consume_token(byte)
        after.compute_bitmask()
        if start.is_error() or after.is_error():
            raise GrammarError(
                "it has too many alternatives in one place: offer fewer choices of objects, or objects with fewer "
                "optional properties"
            )


def gave_up(matcher: Any) -> bool:
    """Whether the matcher is broken because a step cost more than the library's limits allow."""
    if not matcher.is_error():
        return False
    return str(matcher.stop_reason()) in _TOO_COMPLEX or bool(_TOO_MANY.search(matcher.get_error()))


def token_vocabulary(
    tokenizer: Any, token_bytes: Callable[[int], bytes], size: int, stop_ids: Sequence[int]
) -> Vocabulary:
    """A member's tokens as bytes (`token_bytes` of an id), with control tokens apart; seconds for large vocabularies.

    `size`: rows of the logits. The library's own reader of tokenizers gives the same, but holds the interpreter for
    four times as long, in one piece. Raises `ConfigError` for tokenizers without a fast version.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"grammars need a fast tokenizer, and {type(tokenizer).__name__} is none")
    library = guidance()
    wrapped = library.TokenizerWrapper(_Tokens(tokenizer, token_bytes, max(size, len(tokenizer))))
    # in two pieces, between which other threads run: a trie of all tokens, and slices of it that make masks fast
    # (a member without an end of turn has no stop ids: the library then takes `eos_token_id`)
    plain = library.LLTokenizer(wrapped, eos_token=list(stop_ids) or None, slices=[])
    return Vocabulary(plain.with_slices(library.LLTokenizer.general_slices()))


class _Tokens:
    """A vocabulary in the form that the library wraps. It marks control tokens by a byte 0xFF, which no text has."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, token_bytes: Callable[[int], bytes], size: int) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        tokens = [token_bytes(number) for number in range(len(tokenizer))]
        controls = {number for number, token in added.items() if token.special or _MARK.fullmatch(token.content)}
        controls |= {number for number, token in enumerate(tokens) if token[:1] == b"\xff"}
        self.special_token_ids = sorted(controls)
        self.tokens = [b"<0xFF>" if token[:1] == b"\xff" else token for token in tokens]
        self.tokens += [b""] * (size - len(tokens))  # rows of the logits that no token has
        self._before = self._encoded(_BEFORE)
        self.eos_token_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else max(controls, default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of a text within another one: some tokenizers put a blank before the first word."""
        inner = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return list(self._encoded(_BEFORE + inner)[len(self._before) :])

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


@cache
def byte_vocabulary() -> Vocabulary:
    """The 256 bytes, and the end of a text."""
    library = guidance()
    wrapped = library.TokenizerWrapper(_Bytes())
    return Vocabulary(library.LLTokenizer(wrapped, n_vocab=BYTE_END + 1, eos_token=BYTE_END, slices=[]))


def on_deep_stack(work: Callable[[], T]) -> T:
    """The result of `work`, run in a separate thread with a stack of `STACK_BYTES`."""
    outcome: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="specfuse-grammar", daemon=True)
    with _STACK_LOCK:  # the size holds for every thread that starts meanwhile, which then has more than it needs
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise EngineBusyError("no thread could be started to compile a grammar: try again later") from error
        finally:
            threading.stack_size(before)
    thread.join()
    if failures:
        raise failures[0]
    return outcome[0]


class _Bytes:
    """Text as its UTF-8 bytes, in the form that the library wraps."""

    eos_token_id, bos_token_id = BYTE_END, None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (BYTE_END,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _compile(tokens: Any, source: str) -> Any:
    library = guidance()
    limits = library.LLParserLimits(step_max_items=STEP_ITEMS, max_items_in_row=ROW_ITEMS)
    matcher = on_deep_stack(lambda: library.LLMatcher(tokens, source, log_level=0, limits=limits))
    if matcher.is_error():
        raise GrammarError(f"this grammar cannot be used: {_first_line(matcher.get_error())}")
    return matcher


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0]
