"""Branches, commits and releases in a context of llama.cpp, compared with reading each text anew."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from specfuse_shared.members.local.sequence import ForwardRequest
from specfuse_shared.members.token_tree import Branch
from tests.support.llamacpp import FILES, TOLERANCE, member_config, off

pytest.importorskip("llama_cpp")


@pytest.fixture(params=FILES)
def member(request: pytest.FixtureRequest, files: Mapping[str, Path], cache_dir: str) -> Iterator[Any]:
    from specfuse_shared.members.llamacpp.member import LlamaMember

    result = LlamaMember(member_config(files[request.param]), cache_dir=cache_dir)
    yield result
    result.close()


def some_branches(choose: random.Random, size: int, length: int) -> tuple[list[int], list[Branch]]:
    """A draft, a part of it, drafts with a common beginning, and branches inside the answer."""
    draft = [choose.randrange(10, size) for _ in range(6)]
    branches = [Branch(length, tuple(draft[: choose.randrange(1, 6)]))]
    for _ in range(3):
        base, shared = max(0, length - choose.randrange(0, 3)), choose.randrange(0, 4)
        more = [choose.randrange(10, size) for _ in range(choose.randrange(1, 5))]
        branches.append(Branch(base, tuple((draft[:shared] if base == length else []) + more)))
    return draft, branches


@pytest.mark.parametrize("keeps_speculative", [False, True])
@torch.inference_mode()
def test_branches_and_commits_equal_plain_reading(member: Any, keeps_speculative: bool) -> None:
    choose, tolerance = random.Random(1), TOLERANCE.get(member.name, 1e-4)
    contexts = [member.new_sequence(keeps_speculative and member.may_guess) for _ in range(2)]
    for context in contexts:
        context.prefill([choose.randrange(10, member.vocabulary_size) for _ in range(90)])
    for _ in range(12):
        requests = []
        for context in contexts:
            draft, branches = some_branches(choose, member.vocabulary_size, len(context.answer))
            for count in range(1, 6):
                context.extend([Branch(len(context.answer), tuple(draft[:count]))])
            guesses = (Branch(len(context.answer), (*draft, 5, 6, 7)),) if context.keeps_speculative else ()
            requests.append(ForwardRequest(context, tuple(branches), guesses=guesses))
        contexts[0].run_together(requests)
        for request in requests:
            context = request.sequence
            assert max(off(member, context, branch) for branch in request.branches) < tolerance
            context.commit(choose.choice(request.branches))
            plain = member.runner.context.plain([*context.prompt, *context.answer], 1)[0]
            assert torch.allclose(context._end.log_softmax(-1), plain.log_softmax(-1), atol=50 * tolerance)
    free = member.runner.context.sequences
    for context in contexts:
        context.release()
    assert len(member.runner.context._free) == free
    assert member.cache_use().cache_bytes == 0


@torch.inference_mode()
def test_a_batch_that_fails_changes_nothing(member: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    context = member.new_sequence(False)
    context.prefill(list(range(10, 40)))
    before, free = context._end.clone(), len(member.runner.context._free)
    real = member.runner.context._decode

    def failing(tokens: Any) -> None:
        real(tokens)
        raise MemoryError("no memory")

    monkeypatch.setattr(member.runner.context, "_decode", failing)
    with pytest.raises(MemoryError):
        context.extend([Branch(0, (11, 12)), Branch(0, (13,))])
    monkeypatch.undo()
    assert len(member.runner.context._free) == free
    assert context.computed_tokens == 0
    branches = [Branch(0, (11, 12)), Branch(0, (13,))]
    context.extend(branches)
    assert max(off(member, context, branch) for branch in branches) < 2e-3
    assert torch.equal(before, context._end)
    context.release()


@torch.inference_mode()
def test_a_cache_grows_and_keeps_its_content(member: Any) -> None:
    choose, tolerance = random.Random(2), TOLERANCE.get(member.name, 1e-4)
    cache = member.runner.context
    assert cache.allocated == 512  # one answer of its context; up to four fit
    contexts = [member.new_sequence(False) for _ in range(6)]
    for context in contexts:
        context.prefill([choose.randrange(10, member.vocabulary_size) for _ in range(200)])
        context.extend([Branch(0, (11, 12)), Branch(0, (11, 13))])
    assert cache.allocated == (512 if member.runner.is_recurrent else 1024)
    for context in contexts:
        branches = [Branch(0, (11, 12, 15)), Branch(0, (11, 13, 14))]
        context.extend(branches)
        assert max(off(member, context, branch) for branch in branches) < tolerance
        context.commit(branches[1])
        context.extend([Branch(3, (16,))])
        assert off(member, context, Branch(3, (16,))) < tolerance
    for context in contexts:
        context.release()
    assert len(cache._free) == cache.sequences
    member.use_cores(2)
    assert cache._lib.llama_n_threads(cache._pointer) == 2


@torch.inference_mode()
def test_a_full_cache_is_a_memory_error_and_the_answer_continues(files: Mapping[str, Path], cache_dir: str) -> None:
    from specfuse_shared.members.llamacpp.member import LlamaMember

    member = LlamaMember(member_config(files["llama"], cache_tokens=256), cache_dir=cache_dir)
    first, second = member.new_sequence(False), member.new_sequence(False)
    member.remember(1 << 30)
    first.prefill(list(range(10, 110)))
    first.release(remember=True)
    assert member.cache_use().prefix_bytes > 0
    second.prefill([12, *range(10, 440)])  # the remembered prefix is evicted
    assert member.cache_use().prefix_bytes == 0
    with pytest.raises(MemoryError, match="cache_tokens"):
        second.extend([Branch(0, tuple(range(10, 110)))])
    second.extend([Branch(0, (11,))])
    expected = second.logprobs(Branch(0, (11,)))
    second.release()
    third = member.new_sequence(False)
    third.prefill([12, *range(10, 440)])
    third.extend([Branch(0, (11,))])
    assert third.logprobs(Branch(0, (11,))) == pytest.approx(expected, abs=1e-4)
    member.close()
    member.close()
