"""The parity probe: which cached path reproduces the model's own probabilities?

At load, a few short random branches are scored through each path that the architecture may allow and compared
with the model's plain forward. Windows are shrunk for the probe, so that a handful of tokens reaches beyond them.
Paged execution is probed in the same way, a draft included, and on a GPU its first steps are captured by that.
A path that passes also reads a prompt in several pieces, with the original windows, and drafts after it: other kernels
handle those, and some have masked from the wrong corner.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from specfuse_shared.config import SamplingParams
from specfuse_shared.errors import MemberLoadError, UnsupportedModelError
from specfuse_shared.loading.sources import untested_versions
from specfuse_shared.members.local.sequence import (
    PREFILL_CHUNK,
    ChosenTokens,
    DraftRequest,
    ForwardRequest,
    SequenceState,
    feed_together,
    new_sequence,
)
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.attention import MaskPlan, masks_lower_right, plans_for
from specfuse_shared.runtime.compiled_layers import compile_layers, leave_uncompiled
from specfuse_shared.runtime.cuda_graphs import Graphs
from specfuse_shared.runtime.cuda_streams import ModelStream
from specfuse_shared.runtime.kv_cache import Layer, slot_bytes
from specfuse_shared.runtime.model_runner import LongRope, ModelRunner, model_home
from specfuse_shared.runtime.out_of_memory import is_out_of_memory
from specfuse_shared.runtime.paged_attention import has_kernel
from specfuse_shared.runtime.sampler import Sampler

logger = logging.getLogger(__name__)

Known = dict[tuple[tuple[int, ...], int], torch.Tensor]
"""The model's own log-probabilities of a sequence's last tokens, by its ids and their number. All ways are measured on
the same sequences, so each sequence takes one plain forward."""

_WINDOW = 8
_WINDOWS = ("sliding_window", "attention_chunk_size")
_PROMPT, _FIRST, _SECOND = 21, 4, 5
_PIECE = {"cpu": 16}
"""Tokens of the first piece of a long prompt; elsewhere as many as a piece has, for kernels differ with the length."""
_MORE_PIECES = (11, 5)
_PAGES = 160
"""Pages of the probe's cache: its longest prompt and its branches."""
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.15, torch.bfloat16: 0.3}
"""Largest mean |Δ log p| taken for rounding. Half precision is not batch-invariant; a wrong mask costs nats."""
_COARSE = {torch.float16: 0.4, torch.bfloat16: 0.8}
"""The same if no path is better: a processor without bfloat16 instructions rounds at every step."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A way to score branches, and its mean |Δ log p| against the model's plain forward.

    `slots`: one cache slot of each layer; none for recurrent models, whose state does not grow. `graphs`: for
    paged execution. `dynamic`: why it is not used. `layers`:
    how layers run in packed steps. `stream`: where all
    attempts work, and the member after them.
    """

    plan: MaskPlan | None
    one_by_one: bool = False
    error: float = float("inf")
    slots: Mapping[int, Layer] = field(default_factory=dict)
    graphs: Graphs | None = None
    dynamic: str = "not asked for"
    layers: str = ""
    stream: ModelStream | None = None

    @property
    def verification(self) -> Literal["packed", "rows"]:
        return "packed" if self.plan else "rows"

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token."""
        return slot_bytes(self.slots)

    @property
    def execution(self) -> str:
        """ "captured", or "eager: " and why; graphs may give up later."""
        return self.graphs.report if self.graphs is not None else f"eager: dynamic execution ({self.dynamic})"

    def runner(self, model: Any) -> ModelRunner:
        return ModelRunner(model, self.plan, self.one_by_one, self.slots, self.graphs, self.stream, _PAGES)


def probe(model: Any, member: str, execution: str = "auto", compiled_code: Path | None = None) -> Attempt:
    """The packed way with the smallest error, else row by row. Raises `UnsupportedModelError` where none works, and
    `MemberLoadError` where there is no memory for it.

    `execution`: "auto" (paged on a CUDA device and on MPS), "paged" or "dynamic"; the first two only where packed steps
    are exact. `compiled_code`: folder for the code of compiled layers; None: they are not compiled.
    """
    try:
        tried, stream = Known(), ModelStream(model_home(model))
        with stream.entered():
            way = _best_way(model, member, stream, tried)
            return _executed(model, way, member, execution, compiled_code, tried)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemberLoadError(
            f"member {member!r}: memory ran out when it was checked ({str(error).splitlines()[0][:120]}): name a "
            "smaller model or a quantised GGUF file, or look at `specfuse-llm doctor --plan`"
        ) from error


def _best_way(model: Any, member: str, stream: ModelStream, results: Known) -> Attempt:
    config = model.config.get_text_config(decoder=True)
    tolerance = _TOLERANCE.get(model.dtype, 2e-3)
    problems = list[str]()
    start = Attempt(None, stream=stream)
    ways = [replace(start, plan=plan) for plan in plans_for(config) if _is_packable(model)]
    tried: list[Attempt] = []
    for group in (ways, [start], [replace(start, one_by_one=True)]):
        tried += [_attempt(model, way, problems, results) for way in group]
        best = min(tried, key=lambda way: way.error, default=None)
        if best is not None and best.error <= tolerance:
            logger.info("member %s verifies %s (off by %.2g nats)", member, best.verification, best.error)
            return best
    best = min(tried, key=lambda way: way.error)
    if best.error <= _COARSE.get(model.dtype, tolerance):
        dtype = str(model.dtype).removeprefix("torch.")
        logger.warning("member %s is off by %.2g nats in %s here; float32 is exact", member, best.error, dtype)
        return best
    raise UnsupportedModelError(_refusal(model, member, best.error, tolerance, problems))


def _refusal(model: Any, member: str, error: float, tolerance: float, problems: Sequence[str]) -> str:
    """The reason why no verification is exact, if known, and a remedy."""
    name = f"member {member!r} ({type(model).__name__})"
    if _sees_later_tokens(model):
        return f"{name} is an encoder: each token sees the tokens after it. Name a causal language model"
    advice = untested_versions() or "use another model, or dtype='float32' if the numbers are close"
    return (
        f"{name}: neither packed nor row-by-row verification reproduces the model's own probabilities within "
        f"{tolerance:g} nats (off by {error:.3g}). {advice[0].upper()}{advice[1:]}. {'; '.join(problems)}"
    )


@torch.inference_mode()
def _sees_later_tokens(model: Any) -> bool:
    """Whether probabilities after a prompt change with the tokens that follow it."""
    runner, ids = ModelRunner(model), _random_ids(model, 2 * _FIRST)
    alone, followed = runner.plain(ids[:_FIRST])[-1], runner.plain(ids)[_FIRST - 1]
    difference = alone.float().log_softmax(-1) - followed.float().log_softmax(-1)
    return bool(difference.abs().mean() > _COARSE.get(model.dtype, 0.1))


def _is_packable(model: Any) -> bool:
    """Only models built on the library's attention interface take a prepared mask in every layer."""
    return bool(getattr(model, "_supports_attention_backend", False))


def _executed(
    model: Any, way: Attempt, member: str, execution: str, compiled_code: Path | None, tried: Known
) -> Attempt:
    """The path with its requirements for paged execution, or the reason why it runs dynamically."""
    if reason := _unfit(model, way, execution):
        return replace(way, dynamic=reason)
    uncompiled = ""
    if compiled_code is not None:
        uncompiled = "their class is not known, or something else has changed them"
        if compile_layers(model, compiled_code):
            packed, uncompiled = _packed(model, way, member, tried)
            if not uncompiled:
                return replace(packed, layers="compiled")
            leave_uncompiled(model)
        logger.warning("member %s runs without compiled layers: %s", member, uncompiled)
        uncompiled = f"not compiled: {uncompiled}"
    packed, reason = _packed(model, way, member, tried)
    if not reason:
        return replace(packed, layers=uncompiled)
    logger.warning("member %s runs dynamically: %s", member, reason)
    return replace(way, dynamic=reason)


def _packed(model: Any, way: Attempt, member: str, tried: Known) -> tuple[Attempt, str]:
    """The path in paged execution, and the reason why it is not exact, if it is not."""
    tolerance, problems = _TOLERANCE.get(model.dtype, 2e-3), list[str]()
    paged = replace(way, error=float("inf"), graphs=Graphs(model.device, member, _no_graphs(model)))
    packed = _attempt(model, paged, problems, tried)
    assert packed.graphs is not None
    packed.graphs.drop()  # what was captured belongs to the probe's windows; whether capturing works is known now
    if packed.error <= tolerance:
        return packed, ""
    return packed, "; ".join(problems) or f"packed steps are off by {packed.error:.2g} nats"


def _no_graphs(model: Any) -> str | None:
    """Why no step can be captured, if that is known beforehand."""
    return "Triton is not installed" if model.device.type == "cuda" and not has_kernel() else None


def _unfit(model: Any, way: Attempt, execution: str) -> str | None:
    """Why paged execution is out of the question."""
    if execution == "dynamic":
        return "as configured"
    if way.plan is None:
        return "the model runs row by row"
    if LongRope(model).limit is not None:
        return "its rotary frequencies depend on the length of the text"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model lies on several devices"
    if execution == "paged":
        return None
    if model.device.type == "cuda" and not has_kernel():
        return "Triton is not installed"
    # MPS compiles and keeps a kernel for each shape that it meets
    return None if model.device.type in ("cuda", "mps") else "no GPU with packed steps"


def _attempt(model: Any, way: Attempt, problems: list[str], tried: Known) -> Attempt:
    """The path with its error measured while windows are shrunk, then after a longer prompt; infinite if it does
    not run."""
    try:
        with _small_windows(model.config.get_text_config(decoder=True)) as shrunk:
            plan = way.plan and replace(
                way.plan,
                window=way.plan.window and shrunk["sliding_window"],
                chunk=way.plan.chunk and shrunk["attention_chunk_size"],
            )
            runner = replace(way, plan=plan).runner(model)
            error = _measure(runner, tried)
        if error <= _COARSE.get(model.dtype, _TOLERANCE.get(model.dtype, 2e-3)):
            error = max(error, _measure_pieces(way.runner(model), tried))
        return replace(way, error=error, slots=runner.pool.slots)
    except Exception as error:  # compilers of kernels have their own classes
        if is_out_of_memory(error) and way.graphs is None:
            raise  # which says nothing of the way
        problems.append(f"{way.verification}: {type(error).__name__}: {error}"[:200])
        return way


@torch.inference_mode()
def _measure(runner: ModelRunner, tried: Known) -> float:
    """Mean |Δ log p| of two branches, a committed winner, and a branch after an inner position of the trunk, while a
    shorter answer is fed in the same batch; then of drafts of both, if the runner drafts ahead."""
    ids = _random_ids(runner.model, _PROMPT + _FIRST + 2 * _SECOND)
    prompt, first = ids[:_PROMPT], tuple(ids[_PROMPT : _PROMPT + _FIRST])
    second, third = tuple(ids[-2 * _SECOND : -_SECOND]), tuple(ids[-_SECOND:])
    neighbour, sequence = new_sequence(runner), new_sequence(runner)
    neighbour.prefill(third)
    sequence.prefill(prompt)
    for size in range(1, _FIRST):
        sequence.extend([Branch(0, first[:size])])
    branches, twin = (Branch(0, first), Branch(0, second)), Branch(0, first)
    feed_together([ForwardRequest(sequence, branches), ForwardRequest(neighbour, (twin,))])
    deltas = [_deltas(runner, sequence, b, tried) for b in branches]
    deltas.append(_deltas(runner, neighbour, twin, tried))
    sequence.commit(branches[1])
    later = (Branch(len(second), third), Branch(len(second) - 2, third[:3]))
    feed_together([ForwardRequest(neighbour, (Branch(0, second),)), ForwardRequest(sequence, later)])
    deltas += [_deltas(runner, sequence, b, tried) for b in later]
    if sequence.drafts_ahead:
        sequence.commit(later[0])
        neighbour.commit(Branch(0, second))
        deltas += _draft_deltas(runner, [sequence, neighbour], tried)
    sequence.release()
    neighbour.release()
    return float(torch.cat(deltas).mean())


@torch.inference_mode()
def _measure_pieces(runner: ModelRunner, tried: Known) -> float:
    """Mean |Δ log p| after a prompt that was read in pieces: of a branch, and of a draft, if the runner drafts
    ahead. Zero on a processor, where pieces use the same masks as branches."""
    if runner.device.type == "cpu" and not masks_lower_right(runner.device):
        return 0.0
    text = runner.model.config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None) or PREFILL_CHUNK * 2
    first = min(_PIECE.get(runner.device.type, PREFILL_CHUNK), limit - sum(_MORE_PIECES) - 4 * _SECOND)
    if first < 1:
        return 0.0
    pieces = (first, *_MORE_PIECES)
    ids = _random_ids(runner.model, sum(pieces) + _SECOND)
    sequence = new_sequence(runner)
    sequence.begin(ids[: sum(pieces)])
    for piece in pieces:
        if sequence.prompt_remaining:
            sequence.run(ForwardRequest(sequence, prompt=piece))
    branch = Branch(0, tuple(ids[sum(pieces) :]))
    sequence.extend([branch])
    deltas = [_deltas(runner, sequence, branch, tried)]
    if sequence.drafts_ahead:
        sequence.commit(branch)
        deltas += _draft_deltas(runner, [sequence], tried)
    sequence.release()
    return float(torch.cat(deltas).mean())


def _draft_deltas(runner: ModelRunner, sequences: Sequence[SequenceState], tried: Known) -> list[torch.Tensor]:
    drafts = [
        DraftRequest(Branch(len(sequence.answer), ()), _FIRST + n, Sampler(SamplingParams(), 0, "", runner.device))
        for n, sequence in enumerate(sequences)
    ]
    drafted = feed_together(
        [ForwardRequest(sequence, draft=draft) for sequence, draft in zip(sequences, drafts, strict=True)]
    )
    deltas = []
    for sequence, draft, chosen in zip(sequences, drafts, drafted, strict=True):
        assert isinstance(chosen, ChosenTokens)
        ids, _ = sequence.drafted(draft, chosen, ())
        deltas.append(_deltas(runner, sequence, Branch(draft.branch.base, tuple(ids)), tried))
    return deltas


def _deltas(runner: ModelRunner, sequence: SequenceState, branch: Branch, tried: Known) -> torch.Tensor:
    ids, count = (*sequence.prompt, *sequence.answer[: branch.base], *branch.tokens), len(branch.tokens)
    if (ids, count) not in tried:
        plain = runner.plain(ids, count + 1)[:-1].float().log_softmax(-1).cpu()
        tried[ids, count] = plain.gather(1, torch.tensor(branch.tokens)[:, None])[:, 0]
    return (torch.tensor(sequence.logprobs(branch)) - tried[ids, count]).abs()


def _random_ids(model: Any, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    size = model.get_input_embeddings().num_embeddings
    return [int(i) for i in torch.randint(size // 8, size, (count,), generator=generator)]


@contextmanager
def _small_windows(config: Any) -> Iterator[dict[str, int]]:
    """Shrink the configured windows, from which the model makes its own masks, while the probe runs."""
    real = {name: getattr(config, name) for name in _WINDOWS if getattr(config, name, None)}
    shrunk = {name: min(_WINDOW, size) for name, size in real.items()}
    for name, size in shrunk.items():
        setattr(config, name, size)
    try:
        yield shrunk
    finally:
        for name, size in real.items():
            setattr(config, name, size)
