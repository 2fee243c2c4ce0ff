"""Prompts of many answers in one context of llama.cpp: read once, and cached after an answer stops in its prefill."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleEngine, SamplingParams
from specfuse_shared.members.local.sequence import ForwardRequest
from specfuse_shared.members.token_tree import Branch
from tests.support.against_naive import local_members
from tests.support.llamacpp import FILES, TOLERANCE, member_config, off

pytest.importorskip("llama_cpp")

SYSTEM = "You know the sea and its tides. " * 6
PARAMS = SamplingParams(max_tokens=10)


@pytest.fixture(params=[name for name, (architecture, *_) in FILES.items() if architecture != "mamba"])
def member(request: pytest.FixtureRequest, files: Mapping[str, Path], cache_dir: str) -> Iterator[Any]:
    from specfuse_shared.members.llamacpp.member import LlamaMember

    result = LlamaMember(member_config(files[request.param]), cache_dir=cache_dir)
    if result.runner.is_recurrent:
        pytest.skip("its state cannot be cut")
    result.remember(1 << 24)
    yield result
    result.close()


def ids_of(member: Any, count: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(10, member.vocabulary_size) for _ in range(count)]


def read(context: Any, count: int) -> None:
    """Read `count` more tokens of its prompt."""
    context.run(ForwardRequest(context, prompt=count))


def is_exact(member: Any, context: Any) -> bool:
    length = len(context.answer)
    branches = [Branch(length, tuple(ids_of(member, 4, seed))) for seed in (5, 6)]
    context.extend(branches)
    return max(off(member, context, branch) for branch in branches) < TOLERANCE.get(member.name, 1e-4)


@torch.inference_mode()
def test_a_partly_read_prompt_stays_cached_when_its_answer_stops(member: Any) -> None:
    prompt = ids_of(member, 120, 1)
    stopped = member.new_sequence(False)
    stopped.begin(prompt)
    read(stopped, 40)
    read(stopped, 30)
    stopped.release(remember=True)
    for next_prompt, shared in ((prompt, 70), (prompt[:50] + ids_of(member, 40, 2), 50)):
        before = member.runner.reused_tokens
        context = member.new_sequence(False)
        context.prefill(next_prompt)
        assert member.runner.reused_tokens - before == shared
        assert is_exact(member, context)
        context.release()


@torch.inference_mode()
def test_a_running_answer_shares_its_prompt(member: Any) -> None:
    """This also works in pieces: a sequence shares tokens that another one reads after both began."""
    prompt = ids_of(member, 120, 1)
    first, second, third = (member.new_sequence(False) for _ in range(3))
    first.begin(prompt)
    second.begin(prompt[:100] + ids_of(member, 30, 3))
    read(first, 40)
    read(second, 10)
    assert member.runner.reused_tokens == 40
    read(first, 80)
    read(second, 10)
    assert member.runner.reused_tokens == 40 + 50
    third.prefill(prompt)
    assert member.runner.reused_tokens == 40 + 50 + 119
    while second.prompt_remaining:
        read(second, 10)
    first.commit(Branch(0, tuple(ids_of(member, 5, 4))))
    first.release()
    assert is_exact(member, second)
    assert is_exact(member, third)
    third.commit(Branch(0, tuple(ids_of(member, 5, 4))))
    assert is_exact(member, third)


@torch.inference_mode()
def test_the_cache_of_a_failed_answer_is_neither_shared_nor_kept(member: Any) -> None:
    prompt = ids_of(member, 80, 1)
    failed, healthy = member.new_sequence(False), member.new_sequence(False)
    failed.prefill(prompt)
    failed.is_sound = False
    healthy.prefill(prompt)
    failed.release(remember=True)
    assert member.runner.reused_tokens == member.runner.prefix_bytes == 0


def prompt_of(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def test_answers_with_a_common_prefix_read_it_once_and_are_unchanged(llama_engine: EnsembleEngine) -> None:
    texts = [f"What of {thing}?" for thing in ("tides", "moons", "rocks", "gulls")] * 2
    with EnsembleEngine(replace(llama_engine.config, reuse_prefixes=False)) as plain:
        expected = [plain.generate(prompt_of(text), PARAMS).text for text in texts]
    with EnsembleEngine(llama_engine.config) as engine:
        fed = []
        for member in local_members(engine.load()):
            decode = member.runner.context.decode  # type: ignore[attr-defined]

            def counted(tokens: Any, decode: Any = decode) -> Any:
                fed.append(len(tokens))
                return decode(tokens)

            member.runner.context.decode = counted  # type: ignore[attr-defined]
        results: list[Any] = engine.generate_batch([prompt_of(text) for text in texts], PARAMS)
        assert [result.text for result in results] == expected
        read_by_all = sum(result.usage.prompt_tokens for result in results)
        assert engine.metrics().reused_prompt_tokens > 0.5 * read_by_all
        assert fed
