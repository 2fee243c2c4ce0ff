"""Long prompts: later pieces need no mask if a kernel aligns causal masks, and settings avoid plans for each length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import CausalBias

from specfuse_shared import MemberConfig
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.members.local.sequence import ForwardRequest, feed_together, new_sequence
from specfuse_shared.runtime import attention
from specfuse_shared.runtime.attention import choose_kernels
from tests.support.tiny import byte_level_tokenizer, save_model


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gemma3_text", "gpt_oss"])
@torch.inference_mode()
def test_pieces_without_a_mask_equal_the_plain_forward_pass(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded for each attention call: whether it has a mask, its queries and its slots."""
    save_model(kind, byte_level_tokenizer(), tmp_path)
    runner = LocalMember(MemberConfig(str(tmp_path))).runner
    monkeypatch.setattr(attention, "masks_lower_right", lambda device: True)
    masked: list[bool] = []
    attend = attention.Batch.attend

    def noted(batch: Any, kernel: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        def own(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
            masked.append(mask is not None and not isinstance(mask, CausalBias))
            return kernel(module, query, key, value, mask, **more)

        return attend(batch, own, *args, **kwargs)

    monkeypatch.setattr(attention.Batch, "attend", noted)
    prompt = torch.randint(10, 250, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    sequence = new_sequence(runner)
    sequence.begin(prompt)
    while sequence.prompt_remaining:
        feed_together([ForwardRequest(sequence, prompt=100)])
    expected = runner.plain(prompt)[-1]
    assert torch.allclose(sequence._logits_row(-1), expected, atol=2e-3)
    windows = {"qwen3": 0, "gemma2": 2, "gemma3_text": 2, "gpt_oss": 2}[kind]
    assert sum(masked) == 3 * windows, "only layers with a window need one"


def test_a_gpu_plans_no_attention_for_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", texts.append)
    choose_kernels(torch.device("cpu"))
    assert not texts
    choose_kernels(torch.device("cuda", 1))
    assert texts == [False]
