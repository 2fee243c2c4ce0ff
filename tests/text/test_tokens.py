"""Canonical encodings: exact for every cut of an answer, with the same bytes for every member."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specfuse_shared.runtime.kv_cache import common_length
from specfuse_shared.text.codec import Codec, Encoding, cut_candidate, whole_characters
from tests.support.tiny import byte_level_tokenizer

LATIN = [
    "the",
    "fox",
    "x = 1",
    ".",
    ",",
    "def f(x):",
    "return",
    "12.5",
    "don't",
    "\u2014",
    "\u00e9",
    "e\u0301",
    "\ufb01",
]
SPACES = ["\n", "\n\n", "    ", "\t", " ", "\r\n", "\u00a0"]
OTHERS = ["北京", "日本語", "👩\u200d🚀", "🎉", "☃", "<|im_end|>", "<eos>", "<bos>", "</s>"]
WORDS = st.sampled_from(LATIN + SPACES + OTHERS)
MIXED = st.lists(WORDS, max_size=14).map("".join)
REAL = ("smollm2-135m", "gemma3-270m")
TEXT = st.one_of(MIXED, st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
FAST = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FAST
@given(pieces=st.lists(TEXT, min_size=1, max_size=6))
def test_any_text_cut_anywhere_keeps_the_canonical_encoding(codecs: dict[str, Codec], pieces: list[str]) -> None:
    for name, codec in codecs.items():
        encoding = Encoding()
        for piece in pieces:
            encoding = codec.extend(encoding, piece)
        assert encoding.text == "".join(pieces)
        assert list(encoding.ids) == codec.encode("".join(pieces)), name


def readable(codecs: dict[str, Codec], text: str) -> str:
    """The text without characters that a real member's vocabulary lacks (SmolLM2 has no token for some bytes)."""
    real = [codecs[name] for name in REAL]
    return "".join(c for c in text if all(codec.decode(codec.encode(c)) == c for codec in real))


@FAST
@given(text=TEXT, data=st.data())
def test_every_member_reads_back_the_same_bytes(codecs: dict[str, Codec], text: str, data: st.DataObject) -> None:
    text = readable(codecs, text)
    cut = data.draw(st.integers(0, len(text)))
    for name in REAL:
        codec = codecs[name]
        encoding = codec.extend(codec.extend(Encoding(), text[:cut]), text[cut:])
        assert codec.decode(encoding.ids).encode() == text.encode(), name


@FAST
@given(text=TEXT, more=TEXT)
def test_the_text_of_further_ids_is_appended(codecs: dict[str, Codec], text: str, more: str) -> None:
    text, more = readable(codecs, text), readable(codecs, more)
    for name in REAL:
        codec = codecs[name]
        before, whole = codec.encode(text), codec.encode(text + more)
        shared = common_length(tuple(before), tuple(whole))
        shared_text = codec.decode(whole[:shared])
        if shared_text == whole_characters(shared_text):
            assert shared_text + codec.text_after(whole[:shared], whole[shared:]) == text + more


@FAST
@given(text=TEXT)
def test_a_cut_is_a_prefix_of_whole_characters_and_never_empty(text: str) -> None:
    cut = cut_candidate(text)
    assert text.startswith(cut)
    assert "\ufffd" not in cut[-1:]
    assert bool(cut) == bool(whole_characters(text))


@pytest.mark.parametrize(
    ("draft", "cut"),
    [
        ("the result is 4", "the result is"),
        ("Hello. Wor", "Hello."),
        ("Hello.\n\nWor", "Hello"),
        ("as follows:\n", "as follows"),
        ("so \\[ x = 3 \\]\n", "so \\[ x = 3"),
        ("go on __\r\n", "go on"),
        ("```\nx", "```\nx"),
        ("x\n    y = 3", "x\n    y ="),
        ("end. ", "end."),
        ("你好，世界很", "你好，世界很"),
        ("one 🎉", "one 🎉"),
        ("Donaudampf", "Donaudampf"),
        ("\n\n", "\n\n"),
        ("ab \ufffd", "ab"),
    ],
)
def test_cuts(draft: str, cut: str) -> None:
    assert cut_candidate(draft) == cut


def test_real_vocabularies_allow_windows(codecs: dict[str, Codec]) -> None:
    assert all(codec.windowed for codec in codecs.values())


def test_a_vocabulary_with_tokens_across_words_is_encoded_whole() -> None:
    """Superword tokens join words, so no window is safe: the codec must notice."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    vocab |= {"of": 27, "of ": 28, "of t": 29}
    tokenizer = Tokenizer(models.BPE(vocab, [("o", "f"), ("of", " "), ("of ", "t")]))
    tokenizer.decoder = decoders.Fuse()
    codec = Codec(PreTrainedTokenizerFast(tokenizer_object=tokenizer), frozenset())
    assert not codec.windowed
    encoding = Encoding()
    for piece in ("proof ", "of", " ", "the best of", " t", "hem"):
        encoding = codec.extend(encoding, piece)
    assert list(encoding.ids) == codec.encode("proof of the best of them")


def test_control_strings_are_text_and_other_added_tokens_keep_their_ids() -> None:
    import json

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    data = json.loads(byte_level_tokenizer().backend_tokenizer.to_str())
    first = max(data["model"]["vocab"].values()) + 1
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
    for number, content in enumerate(("<|call|>", "tide-table")):
        data["added_tokens"].append({"id": first + number, "content": content, **plain})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(data)))
    assert tokenizer.convert_tokens_to_ids("tide-table") == first + 1
    codec = Codec(tokenizer, frozenset({first, tokenizer.convert_tokens_to_ids("<|end|>")}))
    text = "a <|call|> of the tide-table<|end|> and <|turn|>"
    ids = codec.encode(text)
    assert ids.count(first + 1) == 1
    assert max(set(ids) - {first + 1}) < first
    assert not {tokenizer.convert_tokens_to_ids(name) for name in ("<|end|>", "<|turn|>")} & set(ids)
    assert codec.decode(ids) == text


def test_head_covers_exactly_the_first_tokens(codecs: dict[str, Codec]) -> None:
    text = "The café 🎉 serves 北京 duck."
    for name in REAL:
        codec = codecs[name]
        encoding = codec.extend(Encoding(), text)
        for count in range(len(encoding.ids) + 1):
            head = codec.head(encoding, count)
            assert text.startswith(head)
            assert len(codec.encode(head)) <= count
        assert codec.head(encoding, len(encoding.ids)) == text


def test_token_bytes_add_up(codecs: dict[str, Codec]) -> None:
    text = "naïve 北京 🎉 x" + unicodedata.lookup("SNOWMAN")
    for name in REAL:
        sizes = codecs[name].token_bytes(codecs[name].encode(text))
        assert min(sizes) >= 1
        assert sum(sizes) == len(text.encode())
