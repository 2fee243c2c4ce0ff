"""Paged execution gives the same results as dynamic execution, with one wait for the device a draft or verification."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, MemberConfig, Message, SamplingParams
from specfuse_shared.errors import ConfigError
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.members.local.probe import probe
from specfuse_shared.members.local.sequence import (
    ChosenTokens,
    DraftRequest,
    ForwardRequest,
    SequenceState,
    feed_together,
    new_sequence,
)
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime import paged_attention
from specfuse_shared.runtime.cuda_graphs import NoWaiting
from specfuse_shared.runtime.kv_cache import CachePool
from specfuse_shared.runtime.model_runner import ModelRunner
from specfuse_shared.runtime.packed_layout import PAGE
from specfuse_shared.runtime.packed_steps import DraftInput, DraftRun, PackedStep
from specfuse_shared.runtime.pages import PageArena
from specfuse_shared.runtime.sampler import NotFiniteError, Sampler
from tests.support.against_naive import answer_of, local_members
from tests.support.captured import paged_runner
from tests.support.many_requests import requests
from tests.support.tiny import byte_level_tokenizer, save_model

RULES = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=1.4, top_k=20, top_p=0.8, min_p=0.02, seed=2),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.7, repetition_penalty=1.2, seed=3),
)
LENGTHS = (7, 120, 250, 31, 400, 18)


@pytest.fixture(scope="module")
def member(paged_engine: EnsembleEngine) -> LocalMember:
    return local_members(paged_engine)[0]


@pytest.fixture
def runner(member: LocalMember) -> ModelRunner:
    """A runner over pages with an empty cache."""
    return paged_runner(member.runner.model, member.runner)


def prompts(member: LocalMember) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(10, member.vocabulary_size, (n,), generator=generator).tolist() for n in LENGTHS]


def opened(runner: ModelRunner, prompt: list[int]) -> SequenceState:
    sequence = new_sequence(runner)
    sequence.prefill(prompt)
    return sequence


def one_by_one(sequence: SequenceState, sampler: Sampler, count: int) -> list[int]:
    """The draft of dynamic execution."""
    ids: list[int] = []
    for _ in range(count):
        branch = Branch(0, tuple(ids))
        sequence.extend([branch])
        ids.append(sampler.pick(sequence.logits(branch), (*sequence.prompt, *ids)))
    return ids


def drafted_by(sequences: list[SequenceState], drafts: list[DraftRequest]) -> list[ChosenTokens]:
    """Runs drafts together."""
    questions = [ForwardRequest(sequence, draft=draft) for sequence, draft in zip(sequences, drafts, strict=True)]
    return [chosen for chosen in feed_together(questions) if isinstance(chosen, ChosenTokens)]


def drafts_of(
    sequences: list[SequenceState], counts: list[int], rules: Sequence[SamplingParams] = RULES
) -> list[DraftRequest]:
    results = []
    for n, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        runner: Any = sequence.runner
        sampler = Sampler(rules[n % len(rules)], n, "tiny", runner.device)
        sampler.start(3)
        results.append(DraftRequest(Branch(0, ()), count, sampler))
    return results


@torch.inference_mode()
@pytest.mark.parametrize("rule", [0, 1])
def test_a_short_draft_batched_with_a_long_one_stays_within_the_context(rule: int, tmp_path: Path) -> None:
    """Greedy drafts, whose choice is part of the step, and sampled ones."""
    save_model("gpt2", byte_level_tokenizer(), tmp_path, n_positions=64)
    loaded = LocalMember(MemberConfig(str(tmp_path))).runner
    runner = paged_runner(loaded.model, loaded)
    sequences = [opened(runner, list(range(20, 20 + length))) for length in (61, 12, 62)]
    counts, rules = [3, 12, 1], RULES[rule : rule + 1]
    drafts, samplers = drafts_of(sequences, counts, rules), [d.sampler for d in drafts_of(sequences, counts, rules)]
    chosen = drafted_by(sequences, drafts)
    for sequence, draft, sampler, tokens in zip(sequences, drafts, samplers, chosen, strict=True):
        ids, _ = sequence.drafted(draft, tokens, ())
        assert ids == one_by_one(opened(runner, list(sequence.prompt)), sampler, draft.count)


@pytest.mark.parametrize("rules", [RULES, RULES[:1]])
@torch.inference_mode()
def test_drafts_of_many_answers_equal_tokens_chosen_one_by_one(
    member: LocalMember, runner: ModelRunner, rules: Sequence[SamplingParams]
) -> None:
    counts = [6, 9, 9, 1, 4, 9]
    sequences = [opened(runner, prompt) for prompt in prompts(member)]
    drafts, samplers = drafts_of(sequences, counts, rules), [d.sampler for d in drafts_of(sequences, counts, rules)]
    result = drafted_by(sequences, drafts)
    plain = ModelRunner(runner.model, runner.plan)
    for sequence, draft, chosen, prompt in zip(sequences, drafts, result, prompts(member), strict=True):
        ids, ended = sequence.drafted(draft, chosen, ())
        reference = opened(plain, prompt)
        assert ids == one_by_one(reference, samplers[sequences.index(sequence)], draft.count)
        assert not ended
        assert sequence.computed_tokens == reference.computed_tokens == draft.count - 1
        assert sequence._row.used == reference._row.used  # type: ignore[attr-defined]
        branch = Branch(0, tuple(ids))
        assert sequence.logprobs(branch) == pytest.approx(reference.logprobs(branch), abs=1e-4)
        sequence.commit(branch)
        reference.commit(branch)
        later = (Branch(draft.count, (11, 12)), Branch(max(0, draft.count - 2), (13,)))
        sequence.extend(later)
        reference.extend(later)
        for each in later:
            assert sequence.logprobs(each) == pytest.approx(reference.logprobs(each), abs=1e-4)


@pytest.mark.parametrize("place", [0, 2, 8])
@torch.inference_mode()
def test_a_draft_ends_at_a_stop_token_and_keeps_nothing_after_it(
    member: LocalMember, runner: ModelRunner, place: int
) -> None:
    prompt = prompts(member)[0]
    reference = opened(ModelRunner(runner.model, runner.plan), prompt)
    whole = one_by_one(reference, drafts_of([reference], [9])[0].sampler, 9)
    stop = next(token for token in whole[place:] if token not in whole[:place])
    sequence = opened(runner, prompt)
    [draft] = drafts_of([sequence], [9])
    ids, ended = sequence.drafted(draft, drafted_by([sequence], [draft])[0], (0, stop))
    assert (ids, ended) == (whole[: whole.index(stop)], True)
    assert sequence._row.used == len(prompt) + len(ids)  # type: ignore[attr-defined]
    assert sequence.computed_tokens == len(ids)


@torch.inference_mode()
def test_nan_logits_fail_only_their_own_draft(member: LocalMember, runner: ModelRunner) -> None:
    def drafted(poisoned: int | None) -> tuple[list[SequenceState], list[tuple[DraftRequest, ChosenTokens]]]:
        sequences = [opened(runner, prompt) for prompt in prompts(member)[:3]]
        drafts = drafts_of(sequences, [5, 5, 5])
        if poisoned is not None:
            row = sequences[poisoned]._row  # type: ignore[attr-defined]
            for pair in row.arena.layers.values():
                for cached in pair:
                    cached[row.places(0, row.used)] = float("nan")
        return sequences, list(zip(drafts, drafted_by(sequences, drafts), strict=True))

    (sequences, drafts), (healthy, expected) = drafted(poisoned=1), drafted(None)
    with pytest.raises(NotFiniteError):
        sequences[1].drafted(*drafts[1], ())
    for n in (0, 2):
        assert sequences[n].drafted(*drafts[n], ()) == healthy[n].drafted(*expected[n], ())


@torch.inference_mode()
def test_drafts_are_the_same_after_steps_were_dropped(member: LocalMember, runner: ModelRunner) -> None:
    prompt, texts = prompts(member)[0], list[list[list[int]]]()
    for _ in range(3):
        sequences = [opened(runner, prompt) for _ in range(len(texts) + 1)]
        drafts = [DraftRequest(Branch(0, ()), 5, Sampler(SamplingParams(), 0, "", runner.device)) for _ in sequences]
        result = zip(sequences, drafts, drafted_by(sequences, drafts), strict=True)
        texts.append([sequence.drafted(draft, chosen, ())[0] for sequence, draft, chosen in result])
        for sequence in sequences:
            sequence.release()
        assert runner.pool.memory_bytes == 0
        runner.free_spare()
        runner.drop_steps()
    assert {tuple(ids) for drafted in texts for ids in drafted} == {tuple(texts[0][0])}


def test_a_row_keeps_its_content_when_others_are_added_and_removed() -> None:
    pool = CachePool(torch.device("cpu"))
    rows = [pool.row(10) for _ in range(3)]
    for n, row in enumerate(rows):
        row.reserve(4)
        keys, values = row.block.layer(0, torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4, 5))
        keys[row.index, :, :4], values[row.index, :, :4], row.used = n + 1, -n - 1, 4
    assert len(rows[0].block.stacks) == 2, "keys and values of different sizes are separate"
    assert rows[0].block.size == 4, "three rows need a block of four"
    rows[0].free()
    rows[1].reserve(257)
    assert [row.block.capacity for row in rows[1:]] == [512, 256]
    for row, value in ((rows[1], 2), (rows[2], 3)):
        keys, values = row.block.layers[0]
        assert (keys[row.index, :, :4] == value).all()
        assert (values[row.index, :, :4] == -value).all()
    rows[2].keep(1, [3])
    assert rows[2].used == 2
    for row in rows[1:]:
        row.free()
    assert pool.memory_bytes == 0


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_answers_of_all_executions_are_the_same(tiny_engine: EnsembleEngine, speculation: str) -> None:
    questions, results = requests(12), []
    for execution in ("dynamic", "paged"):
        with EnsembleEngine(replace(tiny_engine.config, execution=execution, speculation=speculation)) as engine:
            results.append(
                engine.generate_batch([question for question, _ in questions], [params for _, params in questions])
            )
    for answers in results[1:]:
        assert [answer_of(result) for result in results[0]] == [answer_of(result) for result in answers]
        for one, second in zip(results[0], answers, strict=True):
            if speculation == "off":  # the leader and the savings of speculation depend on concurrent answers
                assert one.usage == second.usage


def test_answers_that_start_at_different_times_draft_together(paged_engine: EnsembleEngine) -> None:
    config = replace(paged_engine.config, reuse_prefixes=False, speculation="off")
    with EnsembleEngine(config) as engine:
        streams = [engine.stream(f"Speak {n}", SamplingParams(max_tokens=60)) for n in range(4)]
        sizes: list[int] = []
        packed = local_members(engine)[0].runner.packed
        assert packed is not None
        draft = packed.draft
        packed.draft = lambda drafts: sizes.append(len(drafts)) or draft(drafts)  # type: ignore[method-assign, func-returns-value]
        for stream in streams:
            list(stream)
    assert max(sizes) == 4
    assert sum(size == 4 for size in sizes) > 2


def test_a_failed_batch_is_repeated_row_by_row(paged_engine: EnsembleEngine) -> None:
    questions = [(f"Write about {n}", SamplingParams(max_tokens=20, temperature=0.9, seed=n)) for n in range(4)]
    with EnsembleEngine(replace(paged_engine.config, reuse_prefixes=False)) as engine:
        expected = [engine.generate(*each).text for each in questions]
        packed = local_members(engine)[0].runner.packed
        assert packed is not None
        plain, refused = packed.draft, []

        def draft(drafts: Sequence[DraftInput]) -> DraftRun:
            if len(drafts) > 1:
                refused.append(len(drafts))
                raise torch.OutOfMemoryError("injected: out of memory")
            return plain(drafts)

        packed.draft = draft  # type: ignore[method-assign]
        results = engine.generate_batch([question for question, _ in questions], [params for _, params in questions])
    assert [result.text for result in results] == expected
    assert refused


def test_members_report_their_execution(
    tiny_engine: EnsembleEngine, paged_engine: EnsembleEngine, tmp_path: Path
) -> None:
    assert {r.graphs for r in tiny_engine.describe()} == {"eager: dynamic execution (no GPU with packed steps)"}
    assert {r.graphs for r in paged_engine.describe()} == {"eager: paged execution without a CUDA device"}
    save_model("mamba", byte_level_tokenizer(), tmp_path)
    with EnsembleEngine(EnsembleConfig([MemberConfig(str(tmp_path))], execution="paged")) as engine:
        assert engine.describe()[0].graphs == "eager: dynamic execution (the model runs row by row)"
        assert engine.generate("x", SamplingParams(max_tokens=3)).usage.completion_tokens
    with pytest.raises(ConfigError, match="execution is 'fast': use one of 'auto', 'paged', 'dynamic'"):
        EnsembleConfig(["x"], execution="fast")


def test_a_model_whose_packed_steps_are_off_runs_dynamically(
    member: LocalMember, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    advance = PackedStep.advance
    monkeypatch.setattr(PackedStep, "advance", lambda step, slots, active: advance(step, slots // 2, active))
    with caplog.at_level(logging.WARNING):
        way = probe(member.runner.model, "tiny", "paged")
    assert way.graphs is None
    assert way.execution.startswith("eager: dynamic execution (packed steps are off by")
    assert "member tiny runs dynamically" in caplog.text


def test_grammars_and_single_members_work_in_either_execution(
    tiny_engine: EnsembleEngine, paged_engine: EnsembleEngine
) -> None:
    params = SamplingParams(max_tokens=20, grammar=Grammar.regex("[a-f]{3,9}"))
    texts = {engine.generate("Letters?", params).text for engine in (tiny_engine, paged_engine)}
    assert len(texts) == 1
    alone = replace(tiny_engine.config, members=[tiny_engine.config.members[1]])
    answers = []
    for execution in ("dynamic", "paged"):
        with EnsembleEngine(replace(alone, execution=execution)) as engine:
            answers.append(engine.generate([Message("user", "Alone?")], SamplingParams(max_tokens=40)))
    assert answers[0].text == answers[1].text
    assert answers[0].usage == answers[1].usage


@torch.inference_mode()
def test_operations_that_break_a_capture_are_refused_before_it(member: LocalMember, runner: ModelRunner) -> None:
    sequences = [opened(runner, prompt) for prompt in prompts(member)]
    drafts = drafts_of(sequences, [4] * len(sequences))
    with NoWaiting(runner.device):
        drafted_by(sequences, drafts)
    row = sequences[0].logits(Branch(0, ()))
    waiting: list[Callable[[], object]] = [
        lambda: row.max().item(),
        lambda: bool(row[0] > 0),
        lambda: torch.where(row > 0),
        lambda: row[row > 0],
        row.unique,
    ]
    for work in waiting:
        with pytest.raises(RuntimeError, match="makes the host wait"), NoWaiting(runner.device):
            work()


@pytest.mark.slow
def test_on_a_device_a_step_waits_for_nothing_and_mixes_no_devices() -> None:
    script = Path(__file__).parents[1] / "support" / "on_fake_device.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["llama", "gemma2", "gemma3_text", "cohere2", "gpt2"]


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_answers_are_the_same_with_shapes_that_are_rounded_up(
    tiny_engine: EnsembleEngine, speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on MPS: slots beyond a token's own have no effect, even if an earlier answer left NaN in them."""
    monkeypatch.setattr(paged_attention, "_EXACT_SHAPES", set())
    questions = requests(8)
    prompts, params = [question for question, _ in questions], [params for _, params in questions]
    expected = [answer_of(result) for result in tiny_engine.generate_batch(prompts, params)]
    with EnsembleEngine(replace(tiny_engine.config, execution="paged", speculation=speculation)) as engine:
        for member in local_members(engine.load()):
            pool = member.runner.pool
            assert isinstance(pool, PageArena)
            for keys, values in pool.layers.values():
                keys[PAGE:], values[PAGE:] = float("nan"), float("nan")
        assert [answer_of(result) for result in engine.generate_batch(prompts, params)] == expected
