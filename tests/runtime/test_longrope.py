"""Models with two sets of rotary frequencies: a long text changes nothing for concurrent short ones."""

from __future__ import annotations

import pytest
import torch

from specfuse_shared import MemberConfig
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.members.local.sequence import ForwardRequest, SequenceState, feed_together, new_sequence
from specfuse_shared.members.token_tree import Branch
from tests.support.tiny import byte_level_tokenizer, save_model

LIMIT = 200
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
    "original_max_position_embeddings": LIMIT,
}


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> LocalMember:
    folder = tmp_path_factory.mktemp("phi3")
    shape = {"rope_parameters": ROPE, "sliding_window": None, "original_max_position_embeddings": LIMIT}
    save_model("phi3", byte_level_tokenizer(), folder, **shape)
    return LocalMember(MemberConfig(str(folder)))


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(10, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(member: LocalMember, sequence: SequenceState, branch: Branch) -> list[float]:
    """Logits of one forward pass of the model over the whole text."""
    start = sequence.length
    whole = [*sequence.prompt, *sequence.answer, *branch.tokens]
    logprobs = member.runner.plain(whole).float().log_softmax(-1)
    return [float(logprobs[start - 1 + n, token]) for n, token in enumerate(branch.tokens)]


@torch.inference_mode()
def test_texts_on_both_sides_of_the_limit_share_no_frequencies(member: LocalMember) -> None:
    sequences = [new_sequence(member.runner) for _ in range(3)]
    for n, (sequence, size) in enumerate(zip(sequences, (40, 300, 90), strict=True)):
        sequence.begin(ids(size, n))
    for pieces in (50, 1000):  # the long prompt's first piece is below the limit
        feed_together([ForwardRequest(c, prompt=pieces) for c in sequences if c.prompt_remaining])
    branch = Branch(0, tuple(ids(6, 9)))
    feed_together([ForwardRequest(sequence, (branch,)) for sequence in sequences])
    for sequence in sequences:
        assert sequence.logprobs(branch) == pytest.approx(expected(member, sequence, branch), abs=2e-3)
        sequence.release()


@torch.inference_mode()
def test_an_answer_that_outgrows_the_limit_is_read_again(member: LocalMember) -> None:
    sequence, compared = new_sequence(member.runner), new_sequence(member.runner)
    sequence.prefill(ids(LIMIT - 90, 3))
    compared.prefill(ids(30, 4))
    for number in range(12):
        branch, longer = Branch(len(sequence.answer), tuple(ids(10, number))), Branch(len(compared.answer), (11, 12))
        feed_together([ForwardRequest(sequence, (branch,)), ForwardRequest(compared, (longer,))])
        assert compared.logprobs(longer) == pytest.approx(expected(member, compared, longer), abs=2e-3)
        if not LIMIT - 64 < sequence.length + 10 <= LIMIT:  # there the long set is used before the limit
            assert sequence.logprobs(branch) == pytest.approx(expected(member, sequence, branch), abs=2e-3), number
        sequence.commit(branch)
        compared.commit(longer)
    assert sequence.length > LIMIT + 10
    sequence.release()
    compared.release()
