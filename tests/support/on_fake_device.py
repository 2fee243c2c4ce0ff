"""Paged execution on a simulated device: its tensors have a device and a shape, but no data.

An operation on tensors of the device and of the host raises, and so does a read from the device. The script needs a
separate process, since a registered device cannot be removed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from step_costs import Noiseless, model_on

from specfuse_shared import SamplingParams
from specfuse_shared.members.local.sequence import (
    ChosenTokens,
    DraftRequest,
    ForwardRequest,
    LogprobRequest,
    TreeSequence,
    feed_together,
)
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.attention import plans_for
from specfuse_shared.runtime.cuda_graphs import Graphs
from specfuse_shared.runtime.fused_norms import fuse_norms
from specfuse_shared.runtime.model_runner import ModelRunner
from specfuse_shared.runtime.sampler import PendingLogprobs
from tests.support.tiny import ARCHITECTURES

RULES = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.1),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1),
)


def config_of(kind: str) -> Any:
    return AutoConfig.for_model(kind, vocab_size=100, bos_token_id=1, eos_token_id=2, **ARCHITECTURES[kind])


@torch.inference_mode()
def run(kind: str, device: torch.device) -> None:
    model = model_on(device, config_of(kind))
    plan = plans_for(model.config)[0]
    text = model.config
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    slots = {
        n: (torch.zeros(1, heads, 1, size, dtype=model.dtype, device=device),) * 2
        for n in range(text.num_hidden_layers)
    }
    answer_with(ModelRunner(model, plan, slots=slots, graphs=Graphs(device, kind), pages=40), kind, device)


@torch.inference_mode()
def answer_with(runner: ModelRunner, kind: str, device: torch.device) -> None:
    sequences = [TreeSequence(runner) for _ in RULES]
    for n, sequence in enumerate(sequences):
        sequence.begin(list(range(20 + n)))
    feed_together([ForwardRequest(sequence, prompt=99) for sequence in sequences])
    blocked = torch.zeros(3, dtype=torch.long, device=device)
    drafts = [DraftRequest(Branch(0, ()), 4, Noiseless(params, 1, kind, device), blocked) for params in RULES]
    result = feed_together([ForwardRequest(c, draft=draft) for c, draft in zip(sequences, drafts, strict=True)])
    chosen = [each for each in result if isinstance(each, ChosenTokens)]
    must_wait(lambda: sequences[0].drafted(drafts[0], chosen[0], ()))
    for sequence, draft, each in zip(sequences, drafts, chosen, strict=True):
        each.run._rows = [[5] * len(RULES)] * 4  # simulates the read
        sequence.drafted(draft, each, ())
    asking = [LogprobRequest([(Branch(0, (5, 5, 5, 5)), ()), (Branch(0, (1, 2)), (3, 4))]) for _ in sequences]
    branches = Branch(0, (5, 5, 5, 5, 7)), Branch(0, (1, 2, 3))
    judged = feed_together(
        [ForwardRequest(c, branches, logprobs=request) for c, request in zip(sequences, asking, strict=True)]
    )
    for sequence, judgement in zip(sequences, judged, strict=True):
        assert isinstance(judgement, PendingLogprobs)
        must_wait(judgement.read)
        sequence.commit(Branch(0, (1, 2, 3)))
        assert sequence.logits(Branch(3, ())).device.type == device.type


def must_wait(read: Callable[[], object]) -> None:
    """Only a read needs the device's data."""
    try:
        read()
    except DataDependentOutputException:
        return
    raise AssertionError("nothing was read from the device")


KINDS = ("llama", "gemma2", "gemma3_text", "cohere2", "gpt2")

if __name__ == "__main__":
    for name in KINDS:  # finding the formula of its norms needs data
        fuse_norms(AutoModelForCausalLM.from_config(config_of(name)))
    _setup_privateuseone_for_python_backend("absent")
    fake_tensor.CONSTANT_NUMEL_LIMIT = -1
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name in KINDS:
            run(name, torch.device("absent"))
            sys.stdout.write(f"{name}\n")
