"""A model in parts on several devices: no tensor of a forward pass is on another device than its layer.

Real devices are not needed: torch's fake tensors have a device and a shape but no numbers, and any operation between
two devices raises. The type of the device that replaces an accelerator cannot be reset, so this runs in another
process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = '''
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from transformers import AutoConfig, AutoModelForCausalLM

from specfuse_shared.runtime.attention import EAGER, GROUPED
from specfuse_shared.members.local.sequence import ForwardRequest
from specfuse_shared.members.local.sequence import TreeSequence, feed_together
from specfuse_shared.runtime.attention import plans_for
from specfuse_shared.runtime.model_runner import ModelRunner
from specfuse_shared.members.token_tree import Branch
from tests.support.tiny import ARCHITECTURES


class Accelerator(backend_registration._DummyBackendModule):
    def device_count(self):
        return 3


backend_registration._setup_privateuseone_for_python_backend("accel", backend_module=Accelerator())


class InPlace(AlignDevicesHook):
    """The library's own hook, without its moving of weights, which fake ones do not take."""

    def init_hook(self, module):
        return module


class NoConstants(TorchFunctionMode):
    """A tensor made of numbers would be made on the real device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is not torch.tensor:
            return func(*args, **kwargs)
        device = kwargs.pop("device", None)
        with unset_fake_temporarily():
            real = func(*args, **kwargs)
        return torch.empty(real.shape, dtype=real.dtype, device=device)


def placed(model, part, device):
    for module in part.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                module._parameters[name] = torch.nn.Parameter(weight.detach().to(device), requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = buffer.to(device)
    skipped = model._skip_keys_device_placement
    add_hook_to_module(part, InPlace(torch.device(device), io_same_device=part is model, skip_keys=skipped))


def run(kind, attention):
    config = AutoConfig.for_model(kind, vocab_size=300, bos_token_id=0, eos_token_id=1, **ARCHITECTURES[kind])
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation(attention)
    body, layers = ("transformer", "h") if kind == "gpt2" else ("model", "layers")
    places = {f"{body}.{name}": "accel:0" for name, _ in getattr(model, body).named_children() if name != layers}
    places |= {f"{body}.{layers}.{n}": f"accel:{n}" for n in range(3)} | {"lm_head": "accel:0"}
    placed(model, model, "accel:0")
    for name, device in places.items():
        placed(model, model.get_submodule(name), device)
    model.hf_device_map = places

    runner = ModelRunner(model, plans_for(config)[0])
    one, other = TreeSequence(runner), TreeSequence(runner)
    one.prefill(range(20))
    other.prefill(range(50))
    branches = Branch(0, (1, 2, 3)), Branch(0, (1, 5))
    feed_together([ForwardRequest(one, branches), ForwardRequest(other, branches[:1])])
    assert one.logits(branches[0]).device == runner.device == torch.device("accel:0")
    saved = one._row.save(20)
    one._row.keep(20, [20, 23])
    other._row.load(saved, 20)
    one.release()
    blocks = list(runner.pool._blocks.values())
    where = {str(k.device) for block in blocks for k, _ in block.layers.values()}
    print(kind, *sorted(where))


with FakeTensorMode(allow_non_fake_inputs=True), NoConstants(), torch.inference_mode():
    for kind, attention in {"llama": GROUPED, "gemma2": EAGER, "gemma3_text": GROUPED, "gpt2": GROUPED}.items():
        run(kind, attention)
'''


@pytest.mark.slow
def test_a_forward_pass_of_a_split_model_keeps_every_tensor_with_its_layer() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    caches = "accel:0 accel:1 accel:2"
    assert run.stdout.splitlines() == [f"{kind} {caches}" for kind in ("llama", "gemma2", "gemma3_text", "gpt2")]
