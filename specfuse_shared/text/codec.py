"""One member's view of text: canonical ids of the answer, the text of drafted ids, token sizes, candidate cuts.

The answer is one text; every member keeps its own encoding of it. The *canonical* encoding of a text is the
tokenizer's encoding of the complete text, with control strings kept as plain text. It is extended without
encoding the whole text again: text is settled up to an *anchor* (a single space between a non-space and a
letter or digit), which no token of a well-behaved vocabulary spans. `Codec` proves this for its
tokenizer on the tokens that could span it, and otherwise encodes the whole text each time.
"""

from __future__ import annotations

import copy
import itertools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

REPLACEMENT = "\ufffd"
_ANCHOR = re.compile(r"(?<=\S)(?= [^\W_])")
_CROSSING = re.compile(r"[^\sĠ▁][ Ġ▁]")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_LAST_SPACES = re.compile(r"(?<=\S)\s+\S*\Z")
_MARKS = re.compile(r" ?(?:[^\w\s]|_)+\Z")
_GUARD = "a"
_TAIL_IDS = 8
_MOST_CROSSING_PROBES = 500
_PROBES = (
    'The quick brown fox, at 12.5 km/h, didn\'t stop!  It ran on.\n\nThen: 3 more (or 4) came. "Well" - done.',
    "def f(x):\n    if x > 1:\n        return x ** 2  # square\n\n    return None\n\nprint(f(10))\n",
    "北京是中国的首都。 It has 21 million people，日本語のテキスト mixed in. Ещё текст, и ещё.",
    "👩\u200d👩\u200d👧 family 🎉 a\u0301 e\u0301 ﬁne ½ ① \u00a0nbsp\t\ttabs  two spaces\r\nline",
)


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write for bytes: printable ones for themselves, others from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [value for value in range(256) if value not in plain]
    return {chr(value): value for value in plain} | {chr(0x100 + n): value for n, value in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Encoding:
    """Canonical encoding of a text: `ids` = `settled` ids of all before the tail + ids of the `tail` text.

    The first tail begins with the codec's `lead`, which is no part of `text`.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()
    tail: str = ""


class Codec:
    """Encodes and decodes answer text for one tokenizer of transformers.

    `control_ids`: ids that text must never become (special tokens and markers of the chat template). `lead`: blanks
    that the chat template writes in front of an answer: they belong to its first token, and not to its text.
    """

    def __init__(self, tokenizer: Any, control_ids: frozenset[int]) -> None:
        self.lead = ""
        self._tokenizer = tokenizer
        self._text_encoder = _text_encoder(tokenizer, control_ids)
        self._byte_level = "ByteLevel" in repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        self._guard_length = len(self.encode(_GUARD))
        self._encode_window = lru_cache(maxsize=4096)(self._window_ids)  # candidates continue the same last words
        self._token_size = lru_cache(maxsize=65536)(self._count_bytes)
        self.windowed = all(self._windows_agree(text) for text in self._probe_texts())

    def after(self, lead: str) -> Self:
        """The codec of answers that follow these blanks."""
        answers = copy.copy(self)
        answers.lead = lead
        return answers

    @property
    def adds_blank(self) -> bool:
        """Whether the tokenizer puts a blank before every text, like the Llama 2 family."""
        return b"".join(map(self.bytes_of, self._plain_ids(_GUARD))) == f" {_GUARD}".encode()

    def encode(self, text: str) -> list[int]:
        """Canonical ids of a whole text: no special tokens added, none recognised."""
        return self._plain_ids(self.lead + text) if text else []

    @property
    def lead_ids(self) -> list[int]:
        """The blanks in front of an answer by themselves, where nothing but text may follow them."""
        return self._plain_ids(self.lead) if self.lead else []

    def _plain_ids(self, text: str) -> list[int]:
        if self._text_encoder is not None:
            return list(self._text_encoder.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def extend(self, encoding: Encoding, addition: str) -> Encoding:
        """Canonical encoding of `encoding.text + addition`, at the cost of the last few words."""
        text, settled = encoding.text + addition, encoding.settled
        if not text:
            return Encoding()
        if not self.windowed:
            return Encoding(text, tuple(self.encode(text)), (), text)
        tail = (encoding.tail if encoding.text else self.lead) + addition
        first = len(tail) == len(self.lead) + len(text)
        if end := _last_but_one_anchor(tail):
            settled += self._encode_window(tail[:end], first)
            tail, first = tail[end:], False
        return Encoding(text, settled + self._encode_window(tail, first), settled, tail)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens have none, unfinished characters read as U+FFFD."""
        decoded = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(decoded)

    def text_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Text that `ids` add after the ids `before` (which end with a whole character)."""
        tail = list(before[-_TAIL_IDS:])
        before_text, whole = self.decode(tail), self.decode([*tail, *ids])
        if not whole.startswith(before_text):
            tail, before_text, whole = list(before), self.decode(before), self.decode([*before, *ids])
        if self.lead and len(tail) == len(before):
            before_text, whole = self._after_lead(before_text), self._after_lead(whole)
        return whole[len(before_text) :]

    def _after_lead(self, decoded: str) -> str:
        """The text of an answer's ids from the first on, without as much of the lead as they begin with."""
        same = next((n for n, pair in enumerate(zip(self.lead, decoded, strict=False)) if pair[0] != pair[1]), None)
        return decoded[min(len(self.lead), len(decoded)) if same is None else same :]

    def token_bytes(self, ids: Sequence[int]) -> list[int]:
        """UTF-8 bytes of each token, at least 1."""
        return [self._token_size(i) for i in ids]

    def pieces(self, text: str) -> list[bytes]:
        """The UTF-8 bytes of each token of a text's canonical encoding; joined, they are the text."""
        ids = self.encode(text)
        return self.pieces_after((), ids, text)

    def pieces_after(self, before: Sequence[int], ids: Sequence[int], text: str) -> list[bytes]:
        """The UTF-8 bytes of each of the `ids` that end in `text`, after the ids `before`; joined, they are the text.

        Bytes before the text do not count: a blank that tokenizers put before every text, or the share of a token that
        begins in the previous text.
        """
        pieces, encoded = [self.bytes_of(token_id) for token_id in ids], text.encode()
        over = sum(map(len, pieces)) - len(encoded)
        if over < 0 or b"".join(pieces)[over:] != encoded:
            return self._pieces_as_read(before, ids, text)
        for n, piece in enumerate(pieces):
            pieces[n], over = piece[max(over, 0) :], over - len(piece)
        return pieces

    def _pieces_as_read(self, before: Sequence[int], ids: Sequence[int], text: str) -> list[bytes]:
        """The text that each token adds; bytes that are no characters become U+FFFD."""
        heads = [""]
        for count in range(1, len(ids)):
            head = whole_characters(self.text_after(before, ids[:count]))
            heads.append(head if text.startswith(head) and len(head) > len(heads[-1]) else heads[-1])
        return [head[len(one) :].encode() for one, head in itertools.pairwise([*heads, text])]

    def spelled(self, places: Sequence[Sequence[int]]) -> list[list[bytes]]:
        """The UTF-8 bytes of alternative tokens in each of these positions."""
        return [[self.bytes_of(token_id) for token_id in ids] for ids in places]

    def alternatives(self, text: str, places: Sequence[Sequence[int]]) -> list[list[bytes]]:
        """The UTF-8 bytes of alternative tokens in each position of a text; a control token is its name."""
        spelled = self.spelled(places)
        ids, pieces = self.encode(text), self.pieces(text)
        if ids and self.bytes_of(ids[0]) == b" " + pieces[0]:  # the space that the tokenizer puts before every text
            spelled[:1] = [[piece.removeprefix(b" ") for piece in first] for first in spelled[:1]]
        return spelled

    def head(self, encoding: Encoding, count: int) -> str:
        """The whole characters of the text that its first `count` tokens cover."""
        if count >= len(encoding.ids):
            return encoding.text
        text = whole_characters(self.text_after((), encoding.ids[:count]))
        if encoding.text.startswith(text):
            return text
        size = next(n for n in range(len(encoding.text), -1, -1) if len(self.encode(encoding.text[:n])) <= count)
        return encoding.text[:size]

    def _window_ids(self, text: str, first: bool) -> tuple[int, ...]:
        """Ids of a piece that starts at an anchor; the guard keeps tokenizers from treating it as a text's start."""
        return tuple(self._plain_ids(text) if first else self._plain_ids(_GUARD + text)[self._guard_length :])

    def _windows_agree(self, text: str) -> bool:
        """Whether the text's encoding falls apart at every anchor."""
        pieces = _ANCHOR.split(text)
        return self.encode(text) == [i for n, piece in enumerate(pieces) for i in self._encode_window(piece, n == 0)]

    def _probe_texts(self) -> list[str]:
        """Fixed texts, and one around each token that holds a non-space followed by a space."""
        crossing = [token for token in self._tokenizer.get_vocab() if _CROSSING.search(token)]
        readable = (t.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n") for t in crossing[:_MOST_CROSSING_PROBES])
        return [*_PROBES, *(f"a b{token}c d e f" for token in readable)]

    def bytes_of(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token; a control token is its name."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF[char] for char in token) if set(token) <= _BYTE_OF.keys() else str(token).encode()
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("▁", " ").encode()

    def _count_bytes(self, token_id: int) -> int:
        return max(1, len(self.bytes_of(token_id)))


def _last_but_one_anchor(text: str) -> int:
    """Its index after the text's beginning; 0 if there is none. The search starts at the end, where it is near."""
    anchors, at = 0, text.rfind(" ")
    while at > 0:
        anchors += not text[at - 1].isspace() and text[at + 1 : at + 2].isalnum()
        if anchors == 2:
            return at
        at = text.rfind(" ", 0, at)
    return 0


def _text_encoder(tokenizer: Any, control_ids: frozenset[int]) -> Any:
    """A second face of the fast tokenizer, in which every control string is plain text; None for slow tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    encoder = _twin(backend, control_ids)
    encoder.encode_special_tokens = True
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _twin(backend: Any, control_ids: frozenset[int]) -> Any:
    """The tokenizer with these ids as special ones, over the same vocabulary: a copy of that takes up to 100 MB."""
    from tokenizers import AddedToken, Tokenizer

    twin, added = Tokenizer(backend.model), backend.get_added_tokens_decoder()
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (component := getattr(backend, part)) is not None:
            setattr(twin, part, component)
    special = [(token.special or i in control_ids, token) for i, token in sorted(added.items())]
    for is_special, tokens_alike in itertools.groupby(
        special, key=lambda pair: pair[0]
    ):  # in their order, which gives their ids
        if is_special:
            twin.add_special_tokens(
                [AddedToken(t.content, special=True, normalized=t.normalized) for _, t in tokens_alike]
            )
        else:
            twin.add_tokens([token for _, token in tokens_alike])
    return twin


def whole_characters(text: str) -> str:
    """`text` without the unfinished character at its end."""
    return text.rstrip(REPLACEMENT)


def cut_candidate(text: str) -> str:
    """Cut an unfinished draft where every member can follow: before the last run of white space.

    The last word may be incomplete, and encodings join cleanly before white space but rarely after it. If the white
    space begins with a line break, marks before it are cut, too: for many vocabularies ".\\n" is one token, and after
    "." alone they hardly ever break a line. A draft with no such position, or that ends in a script without spaces
    (Chinese, Japanese, Thai) or in an emoji, is kept.
    """
    text = whole_characters(text)
    if not text or _unspaced(text[-1]):
        return text
    if (last := _LAST_SPACES.search(text)) is None:
        return text
    head = text[: last.start()]
    return (_MARKS.sub("", head) or text) if text[len(head)] in "\r\n" else head


@lru_cache(maxsize=4096)
def _unspaced(char: str) -> bool:
    if unicodedata.east_asian_width(char) in "WF" or char in "\u200d\ufe0f":
        return True
    return unicodedata.name(char, "").startswith(("THAI ", "LAO ", "KHMER ", "MYANMAR ", "TIBETAN "))
