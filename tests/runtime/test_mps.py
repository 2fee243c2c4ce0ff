"""Differences between MPS and other devices, simulated on a CPU."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torchgen
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams, mps_lock
from specfuse_shared.errors import MemberLoadError
from specfuse_shared.loading import pretrained
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.members.local.sequence import new_sequence
from specfuse_shared.placement.plan import Assignment, MemoryNeed
from specfuse_shared.runtime import mps, paged_attention, sampler
from specfuse_shared.runtime.cuda_streams import ModelStream
from specfuse_shared.runtime.model_runner import ModelForward
from specfuse_shared.runtime.sampler import NOT_FINITE, Sampler
from tests.support.against_naive import open_session
from tests.support.tiny import MESSAGES, byte_level_tokenizer, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", byte_level_tokenizer(), tmp_path_factory.mktemp("tiny"))


# ── noise ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bad", [-0.0, 0.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("where", ["filtered and blocked", "everywhere"])
def test_noise_never_selects_a_filtered_or_blocked_token(bad: float, where: str) -> None:
    """MPS draws -0.0 once in 3e7 numbers: 0 / -0.0 is NaN, which some implementations of max treat as the largest."""
    sampler = Sampler(SamplingParams(temperature=0.7, top_k=2), 1, "tiny", torch.device("cpu"))
    logits = torch.tensor([[5.0, 4.0, 3.0, 1.0, 9.0, float("-inf")]])
    noise = torch.ones(1, 6)
    noise[:, [2, 3, 4, 5]] = bad
    if where == "everywhere":
        noise[:] = bad
    chosen = sampler.choose(logits, torch.empty(1, 0, dtype=torch.long), torch.tensor([4]), noise)
    assert int(chosen) in (0, 1)


def test_usual_noise_gives_the_same_choices() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0), 1, "tiny", torch.device("cpu"))
    logits, history = torch.randn(64, 500), torch.empty(64, 0, dtype=torch.long)
    noise = torch.empty(64, 500).exponential_()
    expected = (logits.softmax(-1) / noise).argmax(-1)
    assert torch.equal(sampler.choose(logits, history, None, noise), expected)
    logits[3] = float("nan")
    assert int(sampler.choose(logits, history, None, torch.ones(64, 500))[3]) == NOT_FINITE


# ── uploads ──────────────────────────────────────────────────────────────────────────────────────


class _Gpu:
    """A queued copy to MPS, which reads its source when the device executes it."""

    type = "mps"

    def __str__(self) -> str:
        return "mps"


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    sources: list[weakref.ref[torch.Tensor]] = []
    plainly = torch.Tensor.to

    def to(tensor: torch.Tensor, device: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(device, _Gpu):
            sources.append(weakref.ref(tensor))
            return torch.empty(tensor.shape)
        return plainly(tensor, device, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return sources


def test_sources_of_copies_live_until_the_next_synchronisation(
    queued: list[weakref.ref[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.upload([1, 2, 3], _Gpu())
    sampler.upload(np.arange(4), _Gpu())
    gc.collect()
    assert all(source() is not None for source in queued)
    monkeypatch.setattr(sampler, "is_mps", lambda device: True)
    assert sampler.Download(torch.tensor([1.0])).read() == [1.0]
    gc.collect()
    assert [source() for source in queued] == [None, None]


def test_changes_after_an_upload_do_not_reach_the_copy(queued: list[weakref.ref[torch.Tensor]]) -> None:
    numbers = np.arange(4)
    sampler.upload(numbers, _Gpu())
    numbers[:] = 7
    source = queued[0]()
    assert source is not None
    assert source.tolist() == [0, 1, 2, 3]
    mps.forget_read()


def test_sources_are_not_kept_without_end(
    queued: list[weakref.ref[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[None] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append(None))
    for _ in range(20):
        sampler.upload(torch.zeros(2**20), _Gpu())
    gc.collect()
    assert len(waited) == 1
    assert sum(source() is not None for source in queued) <= 18
    mps.forget_read()


# ── pieces, seconds, operations ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("used", "heads", "piece"), [(0, 32, 1024), (7 * 1024, 32, 1024), (8 * 1024, 32, 512), (32 * 1024, 32, 128)]
)
def test_scores_of_a_piece_stay_below_metals_limit(used: int, heads: int, piece: int) -> None:
    assert mps.piece_on_mps(1024, used, heads) == piece
    assert 4 * heads * piece * (used + piece) <= 2**30


@torch.inference_mode()
def test_a_prompt_in_pieces_equals_a_prompt_read_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = LocalMember(MemberConfig(str(folder))).runner
    prompt = torch.randint(10, 250, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    pieces: list[int] = []

    def piece(length: int, used: int) -> int:
        pieces.append(used)
        return min(length, 40)

    monkeypatch.setattr(runner, "piece", piece)
    sequence = new_sequence(runner)
    sequence.prefill(prompt)
    assert pieces == [0, 40, 80, 120]
    assert torch.allclose(sequence._logits_row(-1), runner.plain(prompt)[-1], atol=2e-3)


def test_seconds_on_mps_are_measured_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        recorded: ClassVar[list[object]] = []

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.recorded.append(self)

        def query(self) -> bool:
            return len(self.recorded) > 2

        def elapsed_time(self, end: object) -> float:
            assert [self, end] == self.recorded[:2]
            return 250.0

    monkeypatch.setattr(torch.mps, "Event", Event)
    watch = ModelStream(torch.device("mps")).timed()
    watch.stop()
    assert watch.seconds is None
    Event.recorded.append(None)
    assert watch.seconds == 0.25


class OperationRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.wide: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(func.name().removeprefix("aten::"))
        if any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tree_leaves((args, kwargs, result))):
            self.wide.add(func.name())
        return result


def kernels_of_mps() -> set[str]:
    """Operations that have a kernel for MPS in torch's table, or are composed of others."""
    file = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    table = yaml.safe_load(file.read_text("utf-8"))
    by_name = {entry["func"].partition("(")[0]: entry for entry in table}

    def has(entry: dict[str, Any]) -> bool:
        if "structured_delegate" in entry:
            return has(by_name[entry["structured_delegate"]])
        dispatch = entry.get("dispatch")
        keys = {key.strip() for name in dispatch for key in name.split(",")} if dispatch else set()
        return not keys or any(key == "MPS" or key.startswith("Composite") for key in keys)

    return {name for name, entry in by_name.items() if has(entry)}


@pytest.mark.parametrize("execution", ["dynamic", "paged"])
def test_every_operation_of_an_answer_has_a_kernel_on_mps(
    execution: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes the branches for GPUs: the CPU is treated as another device if that makes a difference."""
    monkeypatch.setattr(paged_attention, "_EXACT_SHAPES", set())
    member = LocalMember(MemberConfig(str(folder)), execution=execution)
    params = SamplingParams(max_tokens=12, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    with OperationRecorder() as recorder:
        session = open_session(EnsembleConfig([MemberConfig(str(folder))]), [member], MESSAGES, params)
        for _ in session.events():
            pass
        session.release()
    mps_names = {"_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_attention_math_for_mps"}
    names = {mps_names.get(name, name) for name in recorder.names}
    assert len(names) > 40
    assert names - kernels_of_mps() == set()
    assert not recorder.wide, "MPS has no float64"


# ── one thread at a time ─────────────────────────────────────────────────────────────────────────


def test_forward_passes_of_two_engines_never_overlap_on_mps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that use MPS at once end the process."""
    monkeypatch.setattr(mps, "is_mps", lambda device: str(device).startswith("cpu"))
    inside, peak = 0, 0
    call = ModelForward.__call__

    def counted(self: ModelForward, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal inside, peak
        inside += 1
        peak = max(peak, inside)
        time.sleep(0.002)
        result = call(self, *args, **kwargs)
        inside -= 1
        return result

    monkeypatch.setattr(ModelForward, "__call__", counted)

    def answer() -> None:
        with EnsembleEngine(EnsembleConfig([MemberConfig(str(folder))])) as engine:
            engine.generate("Where is the moon?", SamplingParams(max_tokens=12))

    threads = [threading.Thread(target=answer) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peak == 1


def test_an_engine_waits_for_the_holder_of_the_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users take this lock for their embeddings."""
    monkeypatch.setattr(mps, "is_mps", lambda device: str(device).startswith("cpu"))
    with EnsembleEngine(EnsembleConfig([MemberConfig(str(folder))])) as engine:
        engine.load()
        results: list[str] = []
        thread = threading.Thread(
            target=lambda: results.append(engine.generate("Where?", SamplingParams(max_tokens=3)).text)
        )
        with mps_lock:
            thread.start()
            thread.join(0.5)
            assert thread.is_alive()
        thread.join(60)
        assert len(results) == 1


def test_other_devices_wait_for_no_lock(folder: Path) -> None:
    with mps_lock, EnsembleEngine(EnsembleConfig([MemberConfig(str(folder))] * 1)) as engine:
        assert engine.generate("Where is it?", SamplingParams(max_tokens=3)).usage.completion_tokens
    assert isinstance(mps.mps_turn(["cuda:0", "cpu"]), type(mps.mps_turn(["xpu:0"])))


# ── loading ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("before", [None, "0"])
def test_numbers_are_converted_by_one_thread_on_the_way_to_mps(
    monkeypatch: pytest.MonkeyPatch, before: str | None, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(pretrained._ONE_THREAD_ENV, raising=False)
    if before is not None:
        monkeypatch.setenv(pretrained._ONE_THREAD_ENV, before)
    recorded: list[str | None] = []

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        recorded.append(os.environ.get(pretrained._ONE_THREAD_ENV))
        raise RuntimeError("stop here")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", from_pretrained)
    mps.warn_untested.cache_clear()
    for device in ("mps", "mps", "cpu"):
        place = Assignment("tiny", "float32", None, MemoryNeed(1, 0, 0), {"": device}, {device: 1}, {device: 1.0})
        with pytest.raises(MemberLoadError, match="stop here"):
            LocalMember(MemberConfig(str(folder)), place=place)
    assert recorded == ["1", "1", before]
    assert os.environ.get(pretrained._ONE_THREAD_ENV) == before
    assert [r.message for r in caplog.records if "MPS is untested" in r.message] == [caplog.records[0].message]
