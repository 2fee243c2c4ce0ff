"""Members on llama.cpp in an engine: settings, the choice of backend, named errors, cancellation, memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from specfuse_shared import (
    ConfigError,
    EnsembleConfig,
    EnsembleEngine,
    MemberConfig,
    MemberLoadError,
    Message,
    PromptTooLongError,
    SamplingParams,
    Tool,
    UnsupportedModelError,
)
from specfuse_shared.events import SegmentEvent
from specfuse_shared.loading.planning import Backend, backend_of, plan_ensemble
from tests.support.llamacpp import member_config, members_of
from tests.support.tiny import CHAT_TEMPLATE, byte_level_tokenizer

pytest.importorskip("llama_cpp")

QUESTION = "How do the tides follow the moon?"


# ── which engine ─────────────────────────────────────────────────────────────────────────────────


def test_auto_chooses_the_backend_for_the_file(files: Mapping[str, Path], tmp_path: Path) -> None:
    import shutil

    whole = str(files["llama"])
    assert backend_of(MemberConfig(whole)).reason == "its weights are not quantised"
    assert backend_of(MemberConfig(whole, backend="llama.cpp")).name == "llama.cpp"
    assert backend_of(MemberConfig(whole, threads=2)).name == "llama.cpp"
    assert backend_of(MemberConfig("some/repository")) == Backend("transformers", "")
    quantised = tmp_path / "quantised.gguf"
    shutil.copy(whole, quantised)
    data = bytearray(quantised.read_bytes())
    at = data.find(b"general.file_type") + len("general.file_type") + 4
    data[at : at + 4] = (15).to_bytes(4, "little")
    quantised.write_bytes(data)
    result = backend_of(MemberConfig(str(quantised)))
    assert (result.name, result.reason) == ("llama.cpp", "weights in Q4_K_M, and llama-cpp-python is here")
    assert backend_of(MemberConfig(str(quantised), adapter="a/folder")).reason == "its adapter is no LoRA in GGUF form"
    assert backend_of(MemberConfig(str(quantised), quantization="8bit")).reason == "quantization needs transformers"
    assert backend_of(MemberConfig(str(quantised), backend="transformers")).reason == "as configured"
    on_card = backend_of(MemberConfig(str(quantised), device="cuda"))
    assert (on_card.name, on_card.reason[:46]) == ("transformers", "its build here computes on the processor alone")


def test_a_member_on_an_accelerator_without_a_build_of_llama_cpp_runs_on_transformers(
    files: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("specfuse_shared.loading.gguf._WHOLE", {})
    result = backend_of(MemberConfig(str(files["llama"])))
    assert (result.name, "no use for the accelerator" in result.reason) == ("transformers", True)
    assert backend_of(MemberConfig(str(files["llama"]), device="cpu")).name == "llama.cpp"


def test_without_the_library_auto_reports_its_savings(files: Mapping[str, Path], monkeypatch: Any) -> None:
    monkeypatch.setattr("specfuse_shared.loading.planning.has_llama_cpp", lambda: False)
    monkeypatch.setattr("specfuse_shared.loading.gguf._WHOLE", {})
    result = backend_of(MemberConfig(str(files["llama"])))
    assert result.name == "transformers"
    assert "MiB of weights: pip install" in result.reason
    with pytest.raises(ConfigError, match=r'needs the "llamacpp" extra'):
        backend_of(MemberConfig(str(files["llama"]), backend="llama.cpp"))


def test_a_model_that_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemberLoadError, match=r"asks for llama\.cpp, but 'a/model' is no GGUF file"):
        EnsembleEngine([MemberConfig("a/model", backend="llama.cpp")]).load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "llamacpp"}, "did you mean 'llama.cpp'"),
        ({"backend": "llama.cpp", "quantization": "8bit"}, "quantization goes with backend"),
        ({"backend": "llama.cpp", "dtype": "bfloat16"}, "dtype goes with backend"),
        ({"backend": "transformers", "gpu_layers": 3}, "gpu_layers goes with backend"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"gpu_layers": -1}, "gpu_layers must be at least 0"),
        ({"cache_tokens": 10}, "cache_tokens must be at least 256"),
        ({"cache_type": "q2"}, "cache_type is 'q2'"),
        ({"server": "http://127.0.0.1:1", "threads": 2}, "threads is decided by the server"),
    ],
)
def test_incompatible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemberConfig("model.gguf", **settings)


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


def test_settings_take_effect(files: Mapping[str, Path], cache_dir: str) -> None:
    file = files["llama"]
    settings: dict[str, Any] = {"cache_tokens": 700, "cache_type": "f16", "threads": 2, "max_context": 300}
    with EnsembleEngine([member_config(file, **settings)], cache_dir=cache_dir) as engine:
        [report] = engine.describe()
        assert (report.backend, report.why, report.context) == ("llama.cpp", "as configured", 300)
        assert "700 tokens in f16" in report.attention
        runner: Any = members_of(engine)[0].runner
        lib = runner.context.model.lib
        assert lib.llama_n_threads(runner.context._pointer) == 2
        assert lib.llama_n_ctx(runner.context._pointer) >= 700
    with EnsembleEngine([member_config(file)], cache_dir=cache_dir) as engine:
        assert "2,048 tokens in f32" in engine.describe()[0].attention  # four answers of its 512 tokens


def test_the_plan_counts_the_files_bytes(files: Mapping[str, Path]) -> None:
    file = files["llama"]
    config = EnsembleConfig([member_config(file, cache_tokens=1000, cache_type="f16")])
    [result] = plan_ensemble(config).assignments
    assert result.need.weights == file.stat().st_size
    assert result.need.caches == 1000 * 3 * 2 * 2 * 16 * 2  # layers, keys and values, groups, head size, bytes
    assert result.number_format == "float32"


def test_a_gguf_lora_changes_the_answer(files: Mapping[str, Path], cache_dir: str, tmp_path: Path) -> None:
    import gguf
    import numpy as np

    lora, random = tmp_path / "lora.gguf", np.random.default_rng(5)
    writer = gguf.GGUFWriter(lora, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name, rows in (("blk.0.attn_q.weight", 64), ("blk.1.ffn_up.weight", 96)):
        writer.add_tensor(f"{name}.lora_a", random.normal(0, 1, (8, 64)).astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", random.normal(0, 1, (rows, 8)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    texts = []
    for adapter in (None, str(lora)):
        with EnsembleEngine([member_config(files["llama"], adapter=adapter)], cache_dir=cache_dir) as engine:
            texts.append(engine.generate(QUESTION, SamplingParams(max_tokens=12)).text)
    assert texts[0] != texts[1]
    with pytest.raises(MemberLoadError, match="no LoRA in GGUF form"):
        EnsembleEngine([member_config(files["llama"], adapter=str(files["qwen2"]))], cache_dir=cache_dir).load()
    with pytest.raises(MemberLoadError, match="no LoRA file"):
        EnsembleEngine([member_config(files["llama"], adapter="nowhere.gguf")], cache_dir=cache_dir).load()


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────


def test_a_broken_file_is_a_named_error(files: Mapping[str, Path], cache_dir: str, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files["llama"].read_bytes()[:-1000])
    with pytest.raises(MemberLoadError, match=r"llama\.cpp cannot read"):
        EnsembleEngine([member_config(cut)], cache_dir=cache_dir).load()
    cut.write_bytes(b"no model")
    with pytest.raises(MemberLoadError, match=r"no whole GGUF file|no GGUF file"):
        EnsembleEngine([member_config(cut)], cache_dir=cache_dir).load()


def test_another_tokenizer_is_refused(files: Mapping[str, Path], cache_dir: str, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="its tokenizer does not match the file"):
        EnsembleEngine([member_config(files["spoken"], tokenizer=str(tmp_path))], cache_dir=cache_dir).load()
    config = member_config(files["llama"], tokenizer=str(tmp_path), chat_template=CHAT_TEMPLATE)
    with EnsembleEngine([config], cache_dir=cache_dir) as engine:
        assert engine.describe()[0].template == "given"


def test_a_cache_that_fits_nowhere_is_refused_before_it_is_taken(files: Mapping[str, Path], cache_dir: str) -> None:
    with pytest.raises(MemberLoadError, match="no device has enough memory"):
        EnsembleEngine([member_config(files["llama"], cache_tokens=10**9)], cache_dir=cache_dir).load()


def test_answers_wait_for_capacity_in_the_cache(files: Mapping[str, Path], cache_dir: str) -> None:
    members = [member_config(files["llama"], cache_tokens=400), member_config(files["spoken"])]
    with EnsembleEngine(EnsembleConfig(members, cache_dir=cache_dir, segment_tokens=6)) as engine:
        assert engine.context_limit == 400
        with pytest.raises(PromptTooLongError):
            engine.generate(QUESTION * 50)
        alone = engine.generate(QUESTION, SamplingParams(max_tokens=60)).text
        many = engine.generate_batch([QUESTION] * 6, SamplingParams(max_tokens=60))
        assert [getattr(result, "text", result) for result in many] == [alone] * 6


# ── cancellation and memory ──────────────────────────────────────────────────────────────────────


def test_a_cancelled_answer_leaves_the_others_of_its_batch(llama_engine: EnsembleEngine) -> None:
    expected = llama_engine.generate(QUESTION, SamplingParams(max_tokens=60)).text
    results: list[str] = []
    thread = threading.Thread(
        target=lambda: results.append(llama_engine.generate(QUESTION, SamplingParams(max_tokens=60)).text)
    )
    stream = llama_engine.stream("Go on for ever", SamplingParams(max_tokens=400, ignore_eos=True))
    next(event for event in stream if isinstance(event, SegmentEvent))
    thread.start()
    stream.close()  # type: ignore[attr-defined]
    thread.join(60)
    assert results == [expected]
    limit = time.monotonic() + 30
    while llama_engine.metrics().running:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert llama_engine.metrics().cache_bytes == 0


def test_closing_frees_memory(files: Mapping[str, Path], cache_dir: str) -> None:
    process, sizes = psutil.Process(), []
    for _ in range(4):
        with EnsembleEngine([member_config(files["qwen2"], cache_tokens=200_000)], cache_dir=cache_dir) as engine:
            engine.generate(QUESTION, SamplingParams(max_tokens=8))
            used_bytes = process.memory_info().rss
        gc.collect()
        sizes.append(process.memory_info().rss)
    assert used_bytes - sizes[-1] > 100 * 2**20  # the cache has 150 MB
    assert sizes[-1] - sizes[1] < 30 * 2**20


# ── what members do in answers ───────────────────────────────────────────────────────────────────


def test_forced_tool_calls_are_made(llama_engine: EnsembleEngine) -> None:
    tool = Tool("tide", "When the tide comes", {"type": "object", "properties": {"port": {"enum": ["Ryde", "Cowes"]}}})
    result = llama_engine.generate(QUESTION, SamplingParams(max_tokens=120), tools=[tool], tool_choice="any")
    assert '"tide"' in result.text


def test_members_think_before_they_answer(files: Mapping[str, Path], cache_dir: str) -> None:
    thinker = member_config(files["llama"], thinking=["<think>", "</think>"])
    with EnsembleEngine([thinker, member_config(files["spoken"])], cache_dir=cache_dir) as engine:
        result = engine.generate([Message("user", QUESTION)], SamplingParams(max_tokens=12, max_thinking_tokens=9))
        assert result.thinking["llama"]
        assert result.usage.members["llama"].thinking > 0


async def test_streams_on_an_event_loop(llama_engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=7)
    text = "".join([e.text async for e in llama_engine.astream(QUESTION, params) if isinstance(e, SegmentEvent)])
    assert text == llama_engine.generate(QUESTION, params).text
