"""Count the kernels, bytes and attention calls of a step on a GPU, without a GPU, for the shapes of real models.

Tensors have a device and a shape but no data. Every operation that computes counts as a kernel that reads and writes
its tensors once. The attention over pages counts as two kernels that read the slots in use. The script needs a separate
process, since the device that it registers cannot be removed.

    python benchmarks/step_costs.py [MODEL …]      one line of JSON for each model and kind of step
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from bench_members import SHAPES, Shape
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoModelForCausalLM

from specfuse_shared import MemberConfig, SamplingParams
from specfuse_shared.loading.pretrained import prepared
from specfuse_shared.members.local.sequence import (
    DraftRequest,
    ForwardRequest,
    LogprobRequest,
    TreeSequence,
    feed_together,
)
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime import merged_products, paged_attention
from specfuse_shared.runtime.attention import plans_for
from specfuse_shared.runtime.cuda_graphs import Graphs
from specfuse_shared.runtime.fused_norms import fuse_norms
from specfuse_shared.runtime.merged_products import merge_products
from specfuse_shared.runtime.model_runner import ModelRunner
from specfuse_shared.runtime.sampler import Sampler

NAMES = ("llama-3-8b", "qwen2.5-7b", "gemma-2-9b")
CONTEXT, SEGMENT, CANDIDATES = 900, 10, 5
_FREE = (
    *(
        "view",
        "reshape",
        "transpose",
        "permute",
        "slice",
        "select",
        "expand",
        "unsqueeze",
        "squeeze",
        "split",
        "detach",
    ),
    *("alias", "t.", "empty", "as_strided", "unbind", "unflatten", "flatten", "chunk", "numpy_T", "sym_", "narrow"),
    *("_unsafe_view", "lift_fresh", "new_empty", "is_", "size", "resolve", "result_type"),
)
"""Operations that create a view or allocate memory, without a kernel."""


@dataclass
class Counts:
    """The costs of one step; `attention` has the number of calls by kind of mask."""

    kernels: int = 0
    bytes: int = 0
    matrix_bytes: int = 0
    attention: dict[str, int] = field(default_factory=dict)


class CostCounter(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts, self.muted = counts, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.specfuse.paged_attention.default:
            return self._attended(func(*args, **(kwargs or {})), *args[:3])
        if func.namespace != "aten":
            return func(*args, **(kwargs or {}))
        with self:
            output = func.decompose(*args, **(kwargs or {}))
        if output is not NotImplemented:
            return output
        output = func(*args, **(kwargs or {}))
        if not self.muted and not any(str(func).startswith(f"aten.{name}") for name in _FREE):
            self._count(func, args, kwargs, output)
        return output

    def _attended(self, output: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Count two kernels, one for parts of the slots and one to join them, which read the slots in use once."""
        counts = self.counts
        counts.attention["paged"] = counts.attention.get("paged", 0) + 1
        counts.kernels += 2
        counts.bytes += query.nbytes + output.nbytes + CONTEXT * (keys[0].nbytes + values[0].nbytes)
        return output

    def _count(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        tensors = [t for t in tree_leaves((args, kwargs, output)) if isinstance(t, torch.Tensor)]
        on_device = {(t.untyped_storage()._cdata, t.storage_offset()): t for t in tensors if t.device.type != "cpu"}
        if not on_device:
            return
        size = sum(_read_bytes(t) for t in on_device.values())
        if "embedding" in str(func) or "index" in str(func):  # only the rows that are looked up
            floats = [t for t in on_device.values() if t.is_floating_point()]
            size = 2 * min(map(_read_bytes, floats)) if floats else size
        self.counts.kernels += 1
        self.counts.bytes += size
        if any(name in str(func) for name in ("mm", "linear")):
            self.counts.matrix_bytes += size


class OneKernel(TorchFunctionMode):
    """Counts torch's norm as one kernel, as on CUDA."""

    def __init__(self, costs: CostCounter) -> None:
        super().__init__()
        self.costs = costs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.rms_norm:
            self.costs.counts.kernels += 1
            self.costs.counts.bytes += 2 * _read_bytes(args[0]) + _read_bytes(kwargs["weight"])
            return torch.empty_like(args[0])
        return func(*args, **kwargs)


def _read_bytes(tensor: torch.Tensor) -> int:
    """The bytes that a kernel reads of a tensor: expanded dimensions count once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.element_size()


class Noiseless(Sampler):
    """A sampler with constant noise: a generator cannot fill tensors without data."""

    def noise(self, ahead: int, size: int) -> torch.Tensor:
        return torch.ones(size, device=self.device)


@contextmanager
def counted() -> Iterator[Counts]:
    counts = Counts()
    costs = CostCounter(counts)
    with OneKernel(costs), costs:
        yield counts


def shape_of(name: str) -> Shape:
    return next(shape for shape in SHAPES if shape.name == name)


def chosen_models() -> list[str]:
    """The models on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [shape.name for shape in SHAPES]
    parser.add_argument("models", metavar="MODEL", nargs="*", default=NAMES, help=", ".join(names))
    models: list[str] = list(parser.parse_args().models)
    if unknown := set(models) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return models


def model_on(device: torch.device, config: Any) -> Any:
    """A model without data, prepared like a member's model."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    empty = torch.empty_like(tensor, device=device)
                    tensors[key] = torch.nn.Parameter(empty, False) if tensors is module._parameters else empty
    return prepared(model, MemberConfig(config.model_type))


@torch.inference_mode()
def costs_of(name: str, device: torch.device) -> Iterator[tuple[str, Counts]]:
    """Costs of a drafted token, of a verification of five candidates, and of the second piece of a long prompt."""
    model = model_on(device, shape_of(name).config(False))
    merge_products(model)
    text = model.config
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    slot = torch.empty(1, text.num_key_value_heads, 1, size, dtype=model.dtype, device=device)
    slots = dict.fromkeys(range(text.num_hidden_layers), (slot, slot))
    runner = ModelRunner(model, plans_for(text)[0], slots=slots, graphs=Graphs(device, name), pages=400)
    sequence = TreeSequence(runner)
    sequence.begin([5] * CONTEXT)
    feed_together([ForwardRequest(sequence, prompt=CONTEXT)])

    def drafted(count: int) -> Counts:
        draft = DraftRequest(Branch(0, ()), count, Noiseless(SamplingParams(), 0, name, device))
        with counted() as counts:
            feed_together([ForwardRequest(sequence, draft=draft)])
        sequence._row.used = CONTEXT  # type: ignore[union-attr]
        return counts

    few, many = drafted(3), drafted(4)
    yield (
        "draft",
        Counts(
            many.kernels - few.kernels,
            many.bytes - few.bytes,
            many.matrix_bytes - few.matrix_bytes,
            {kind: count - few.attention.get(kind, 0) for kind, count in many.attention.items()},
        ),
    )
    branches = [Branch(0, tuple(range(100 * n, 100 * n + SEGMENT))) for n in range(1, CANDIDATES + 1)]
    request = LogprobRequest([(branch, ()) for branch in branches])
    with counted() as counts:
        feed_together([ForwardRequest(sequence, tuple(branches), logprobs=request)])
    yield "verify", counts
    sequence.release()
    long = TreeSequence(runner)
    long.begin([5] * 3000)
    feed_together([ForwardRequest(long, prompt=1024)])
    with counted() as counts:
        feed_together([ForwardRequest(long, prompt=1024)])
    yield "prompt", counts


def weights(name: str) -> int:
    """Bytes of weights that a decoded token reads: all except the embedding, of which it reads one row."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_of(name).config(False), dtype=torch.bfloat16)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return int(model.get_memory_footprint()) - (0 if tied else model.get_input_embeddings().weight.nbytes)


if __name__ == "__main__":
    models = chosen_models()
    for chosen in models:
        sys.stdout.write(json.dumps({"model": chosen, "step": "weights", "bytes": weights(chosen)}) + "\n")
        fuse_norms(AutoModelForCausalLM.from_config(shape_of(chosen).config(True)))  # finding the formula needs data
    _setup_privateuseone_for_python_backend("absent")
    vars(paged_attention)["uses_kernel"] = lambda device: True  # as on CUDA
    vars(merged_products)["_is_plain"] = lambda layer: True  # weights without data have another class
    fake_tensor.CONSTANT_NUMEL_LIMIT = -1
    with FakeTensorMode(allow_non_fake_inputs=True):
        for chosen in models:
            for step, counts in costs_of(chosen, torch.device("absent")):
                sys.stdout.write(json.dumps({"model": chosen, "step": step, **vars(counts)}) + "\n")
