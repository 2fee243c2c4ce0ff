"""Checks of a loaded file: its tokenizer gives llama.cpp's ids, and a tree of branches after one prefix has the
probabilities of plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from specfuse_shared.errors import UnsupportedModelError
from specfuse_shared.members.llamacpp.context import LlamaRunner
from specfuse_shared.members.llamacpp.library import LlamaModel
from specfuse_shared.members.llamacpp.sequence import LlamaSequence, new_sequence
from specfuse_shared.members.local.sequence import ForwardRequest
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.text.codec import Codec

_TEXTS = (
    'The quick brown fox, at 12.5 km/h, didn\'t stop!  It ran on.\n\nThen: 3 more (or 4) came. "Well" - done.',
    "def f(x):\n    if x > 1:\n\treturn x ** 2  # square\n\n    return None\n\nprint(f(10))\n",
    "北京是中国的首都。 It has 21 million people，日本語のテキスト mixed in. Ещё текст, и ещё. ¿Qué? Straße",
    '{"name": "tide", "at": [1, 2.50, -3e8], "ok": true, "why": null}\n| a | b |\n|---|---|\n- [x] *done*',
    "👩\u200d👩\u200d👧 family 🎉 ½ ① \u00a0nbsp\t\ttabs  two spaces\r\nline's we'll I'd THEY'RE 1234567 $9.99 a@b.org",
    "ภาษาไทย العربية עברית हिन्दी 한국어 ελληνικά",
)
_DIFFERENT = 0.1
"""A share of the texts whose ids may differ: rare marks that some tokenizers split otherwise."""
_PROMPT, _BRANCH = 21, 4
TOLERANCE = 0.5
"""Largest mean |Δ log p| that is the noise of kernels for one row and for many over quantised weights; a wrong mask
costs nats."""


def texts() -> list[str]:
    """A few hundred: each sample, its words, and pieces from all its places."""
    return list(dict.fromkeys(piece for text in _TEXTS for piece in _pieces(text) if piece))


def _pieces(text: str) -> Iterator[str]:
    yield text
    yield from text.split()
    yield from (text[start : start + 24] for start in range(0, len(text), 5))
    yield from ("".join(pair) for pair in itertools.pairwise(text.split(" ")))


def check_tokenizer(member: str, codec: Codec, model: LlamaModel) -> None:
    """Raises `UnsupportedModelError` for a tokenizer that is not the file's: the ids of some texts differ."""
    compared = [(text, codec.encode(text), model.tokenize(text)) for text in texts()]
    different = [ids for ids in compared if ids[1] != ids[2]]
    if len(different) > _DIFFERENT * len(compared):
        text, own_ids, file_ids = different[0] if different else ("", [], [])
        raise UnsupportedModelError(
            f"member {member!r}: its tokenizer does not match the file: ids of {len(different)} of {len(compared)} "
            f"texts differ from llama.cpp's, such as {text!r} ({own_ids[:8]} and {file_ids[:8]}): leave "
            "MemberConfig(tokenizer=…) out, or name the one of this very model"
        )


@torch.inference_mode()
def probe(member: str, runner: LlamaRunner) -> float:
    """Mean |Δ log p| of branches after one prefix, of a committed one and of one after an inner position, against plain
    decoding of each. Raises `UnsupportedModelError`."""
    count = _PROMPT + 3 * _BRANCH
    generator, size = torch.Generator().manual_seed(0), runner.context.model.vocabulary_size
    ids = [int(i) for i in torch.randint(size // 8, size, (count,), generator=generator)]
    prompt, rest = ids[:_PROMPT], ids[_PROMPT:]
    first, second, third = (tuple(rest[n : n + _BRANCH]) for n in range(0, len(rest), _BRANCH))
    context = new_sequence(runner)
    try:
        context.prefill(prompt)
        context.extend([Branch(0, first[:1])])
        branches = [Branch(0, first), Branch(0, first[:2] + third), Branch(0, second)]
        context.run(ForwardRequest(context, tuple(branches)))
        errors = [_off(runner, context, branch) for branch in branches]
        context.commit(branches[2])
        later = [Branch(len(second), third), Branch(len(second) - 2, first)]
        context.run(ForwardRequest(context, tuple(later)))
        errors += [_off(runner, context, branch) for branch in later]
    finally:
        context.release()
    error = float(torch.tensor(errors).mean())
    if not error <= TOLERANCE:
        raise UnsupportedModelError(
            f"member {member!r}: llama.cpp's probabilities of branches after one prefix are off by {error:.3g} nats "
            'from plain decoding: use MemberConfig(backend="transformers") or another model'
        )
    return error


def _off(runner: LlamaRunner, context: LlamaSequence, branch: Branch) -> float:
    """Mean |Δ log p| of a branch's tokens."""
    whole: Sequence[int] = [*context.prompt, *context.answer[: branch.base], *branch.tokens]
    rows = runner.context.plain(whole, len(branch.tokens) + 1)[:-1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(branch.tokens)[:, None])[:, 0]
    return float((torch.tensor(context.logprobs(branch)) - expected).abs().mean())
