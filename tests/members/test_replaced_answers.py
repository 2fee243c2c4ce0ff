"""Branches that replace the whole answer, after prompts of any length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specfuse_shared import MemberConfig
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.members.local.sequence import new_sequence
from specfuse_shared.members.token_tree import Branch
from tests.support.tiny import byte_level_tokenizer, save_model


@torch.inference_mode()
@pytest.mark.parametrize("prompt", [[65], [65, 66, 67]])
@pytest.mark.parametrize("architecture", ["mamba", "llama"])
def test_a_branch_that_replaces_the_answer_is_scored_after_the_prompt(
    architecture: str, prompt: list[int], tmp_path: Path
) -> None:
    save_model(architecture, byte_level_tokenizer(), tmp_path)
    member = LocalMember(MemberConfig(str(tmp_path), dtype="float32"))
    sequence = new_sequence(member.runner)
    sequence.prefill(prompt)
    draft, rival, longer = Branch(0, (70, 71)), (80,), (80, 81)
    sequence.extend([draft])
    sequence.commit(draft)
    for tokens in (rival, longer):
        sequence.extend([Branch(0, tokens)])
        expected = member.runner.plain([*prompt, *tokens]).float().log_softmax(-1)
        values = [float(expected[len(prompt) - 1 + n, token]) for n, token in enumerate(tokens)]
        assert sequence.logprobs(Branch(0, tokens)) == pytest.approx(values, abs=1e-4)
    sequence.commit(Branch(0, longer))
    assert list(sequence.answer) == [80, 81]
    sequence.release()
