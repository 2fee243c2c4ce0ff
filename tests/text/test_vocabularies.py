"""Vocabularies as the grammar library wraps them: the same bytes and masks as its own reader of tokenizers gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llguidance
import llguidance.hf
import pytest
from transformers import PreTrainedTokenizerFast

from specfuse_shared import demo_members
from specfuse_shared.errors import ConfigError
from specfuse_shared.loading.pretrained import MemberFiles
from specfuse_shared.text.codec import Codec
from specfuse_shared.text.grammars.guidance import token_vocabulary
from tests.support.tiny import byte_level_tokenizer, metaspace_tokenizer

TEXT = '{"a": [1, -2.5e3], "b": "naïve 🎉\\n"}'
SOURCE = 'start: %json { "type": "object" }'


def marked() -> PreTrainedTokenizerFast:
    """A tokenizer with added tokens: control tokens, and one of text."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["<table>", "</table>", "  \n", "<not a mark>"])
    return tokenizer


TOKENIZERS: list[Callable[[], Any]] = [byte_level_tokenizer, metaspace_tokenizer, marked]
DEMO: list[Callable[[], Any]] = [
    lambda: MemberFiles(demo_members()[0]).tokenizer(),
    lambda: MemberFiles(demo_members()[1]).tokenizer(),
]


@pytest.mark.parametrize("made", TOKENIZERS)
def test_tokens_equal_the_librarys_tokens(made: Callable[[], Any]) -> None:
    check(made())


@pytest.mark.slow
@pytest.mark.parametrize("made", DEMO)
def test_tokens_of_real_members_equal_the_librarys_tokens(made: Callable[[], Any]) -> None:
    check(made())


def check(tokenizer: Any) -> None:
    size, end = len(tokenizer) + 5, tokenizer.eos_token_id
    vocabulary = token_vocabulary(tokenizer, Codec(tokenizer, ()).bytes_of, size, [end])
    theirs = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=[end])
    assert vocabulary.tokens.vocab_size == theirs.vocab_size == size
    for number in range(len(tokenizer)):
        assert vocabulary.tokens.is_special_token(number) == theirs.is_special_token(number), number
        if not theirs.is_special_token(number):
            assert vocabulary.tokens.decode_bytes([number]) == theirs.decode_bytes([number]), number
    assert vocabulary.tokens.greedy_tokenize(TEXT) == theirs.greedy_tokenize(TEXT)
    matchers = vocabulary.matcher(SOURCE), llguidance.LLMatcher(theirs, SOURCE, log_level=0)
    for token in theirs.greedy_tokenize(TEXT):
        masks = [matcher.compute_bitmask() for matcher in matchers]
        assert masks[0] == masks[1]
        assert [matcher.consume_token(token) for matcher in matchers] == [True, True]


def test_a_member_that_never_ends_a_turn_has_a_vocabulary() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.eos_token = None
    tokens = token_vocabulary(tokenizer, Codec(tokenizer, ()).bytes_of, len(tokenizer), []).tokens
    assert tokens.is_special_token(tokens.eos_token)
    assert tokens.greedy_tokenize(TEXT) == tokenizer.encode(TEXT, add_special_tokens=False)


def test_a_tokenizer_without_a_fast_version_is_named() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ConfigError, match="grammars need a fast tokenizer, and Slow is none"):
        token_vocabulary(Slow(), lambda number: b"", 10, [0])
