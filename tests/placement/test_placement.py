"""Placement of members: five of 7–9 B by configuration on simulated hardware, and tiny ones on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams
from specfuse_shared.errors import ConfigError, MemberLoadError, MissingExtraError, PlacementError
from specfuse_shared.loading.planning import plan_ensemble
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.placement.plan import ANY_PRECISION, Device, MemberSpec, Plan, Split, Workload, place
from specfuse_shared.placement.sizing import ModelSizes, find_devices, planned_devices
from specfuse_shared.runtime.int8_products import Int8Linear
from tests.support.against_naive import local_members
from tests.support.cuda import needs_cuda
from tests.support.shapes import SHAPES, write_shape
from tests.support.tiny import byte_level_tokenizer, metaspace_tokenizer, save_model

FIVE = tuple(SHAPES)
ROUND = Workload(draft_tokens=EnsembleConfig(FIVE).max_candidate_tokens * len(FIVE))
LINEAR = 6_979_321_856
"""Weights of the linear layers of Llama-3-8B, without its output layer."""


@cache
def shape_sizes(name: str) -> ModelSizes:
    from transformers import AutoConfig

    kind, shape = SHAPES[name]
    return ModelSizes(AutoConfig.for_model(kind, **shape))


def five(**settings: Any) -> list[MemberSpec]:
    return [MemberSpec(name, shape_sizes(name), "bfloat16", **settings) for name in FIVE]


def on(devices: str, specs: list[MemberSpec]) -> Plan:
    plan = place(specs, planned_devices(devices), ROUND)
    for device in plan.devices:
        assert plan.used(device.name) <= device.free
    return plan


def precisions(plan: Plan) -> dict[str, str | None]:
    return {a.member: a.quantization for a in plan.assignments}


def places(plan: Plan) -> dict[str, str]:
    return {a.member: a.place for a in plan.assignments}


# ── the budget ───────────────────────────────────────────────────────────────────────────────────


def test_the_budget_is_weights_caches_logits_and_ten_percent() -> None:
    device = planned_devices("80GB")[0]
    need = five()[0].need(device, None, Workload(answers=3, context=1000, draft_tokens=50))
    assert need.weights == pytest.approx(2 * 8_030_261_248, rel=1e-6)
    assert need.caches == 3 * 1000 * (2 * 32 * 8 * 128 * 2)
    assert need.logits == 3 * 50 * 128_256 * 4
    assert need.total == int(1.1 * (need.weights + need.caches + need.logits))


@pytest.mark.parametrize(
    ("name", "parameters", "kv_values"),
    [
        ("qwen2.5-7b", 7_615_616_512, 2 * 28 * 4 * 128),
        ("mistral-7b", 7_248_023_552, 2 * 32 * 8 * 128),
        (
            "gemma-2-9b",
            9_241_705_984,
            2 * 42 * 8 * 256,
        ),  # tied embeddings count once, windows as whole layers
        ("glm-4-9b", 9_399_951_360, 2 * 40 * 2 * 128),
    ],
)
def test_sizes_equal_the_published_models_sizes(name: str, parameters: int, kv_values: int) -> None:
    sizes = shape_sizes(name)
    assert (sizes.parameters, sizes.kv_values) == (parameters, kv_values)
    assert sizes.weights("bfloat16", None) == pytest.approx(2 * parameters, rel=1e-6)
    assert sizes.weights("float32", None) == pytest.approx(4 * parameters, rel=1e-6)


def test_context_is_the_members_own_limit_where_it_has_one() -> None:
    device = planned_devices("80GB")[0]
    workload = Workload(context=16_384)
    assert five()[0].need(device, None, workload).caches == 8192 * 131_072, "more than the model can hold"
    assert five(max_context=512)[0].need(device, None, workload).caches == 512 * 131_072


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8 + 24 / 32),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4 + 32 / 64),
        ({"quant_method": "fp8"}, 8 + 24 / 128),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}},
                "ignore": ["lm_head"],
            },
            4 + 20 / 128,
        ),
        ({"quant_method": "unheard of"}, 16),
    ],
)
def test_checkpoints_that_are_quantised_count_their_bits_and_scales(settings: dict[str, Any], bits: float) -> None:
    from transformers import AutoConfig

    kind, shape = SHAPES["llama-3-8b"]
    sizes = ModelSizes(AutoConfig.for_model(kind, **shape, quantization_config=settings))
    rest = 2 * (sizes.parameters - LINEAR)
    assert sizes.weights("bfloat16", None) == pytest.approx(rest + LINEAR * bits / 8)
    assert sizes.quantised


def test_modules_that_a_checkpoint_leaves_alone_count_whole() -> None:
    from transformers import AutoConfig

    kind, shape = SHAPES["llama-3-8b"]
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["layers.*.self_attn"]}
    sizes = ModelSizes(AutoConfig.for_model(kind, **shape, quantization_config=settings))
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    expected = 2 * (sizes.parameters - LINEAR + attention) + (LINEAR - attention) * (4 + 20 / 128) / 8
    assert sizes.weights("bfloat16", None) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("dtype", "stored", "kind", "bf16", "expected"),
    [
        ("auto", "bfloat16", "cuda", True, "bfloat16"),
        ("auto", "bfloat16", "cuda", False, "float16"),
        ("auto", "float16", "cuda", True, "float16"),
        ("auto", "float32", "cuda", True, "bfloat16"),
        ("auto", None, "mps", False, "float16"),
        ("auto", "bfloat16", "cpu", True, "bfloat16"),
        ("auto", "bfloat16", "cpu", False, "float32"),
        ("auto", "float16", "cpu", True, "float32"),
        ("auto", "float32", "cpu", True, "float32"),
        ("auto", None, "cpu", True, "float32"),
        ("float32", "bfloat16", "cuda", True, "float32"),
        ("float16", "bfloat16", "cpu", True, "float32"),
        ("bfloat16", "float32", "cpu", False, "bfloat16"),
    ],
)
def test_the_number_format_follows_the_device(
    dtype: str, stored: str | None, kind: str, bf16: bool, expected: str
) -> None:
    device = Device(kind, kind, 1, 1, bf16)
    assert MemberSpec("m", Even(1), stored, dtype).number_format(device) == expected


# ── five members of 7 to 9 B ─────────────────────────────────────────────────────────────────────


def test_one_80_gb_gpu_fits_three_whole_members_and_two_in_8_bit() -> None:
    plan = on("80GB", five(quantizations=ANY_PRECISION))
    eight = {"llama-3-8b": "8bit", "qwen2.5-7b": None, "mistral-7b": "8bit", "gemma-2-9b": None, "glm-4-9b": None}
    assert precisions(plan) == eight
    assert set(places(plan).values()) == {"cuda:0"}


def test_one_80_gb_card_is_refused_in_16_bit_with_advice() -> None:
    plan = on("80GB", five())
    assert not plan.fits
    assert set(precisions(plan).values()) == {None}, "nothing is quantised unless it was allowed"
    with pytest.raises(PlacementError, match=r"mistral-7b \(15.4 GiB\).* need 88\.\d GiB") as refused:
        plan.of("llama-3-8b")
    assert 'quantization="auto"' in str(refused.value)
    assert "leaving out glm-4-9b;" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_four_24_gb_gpus_fit_five_whole_members_two_of_them_in_8_bit() -> None:
    plan = on("4x24GB", five(quantizations=ANY_PRECISION))
    assert [name for name, chosen in precisions(plan).items() if chosen] == ["llama-3-8b", "qwen2.5-7b"]
    assert set(precisions(plan).values()) == {None, "8bit"}
    assert set(places(plan).values()) == {"cuda:0", "cuda:1", "cuda:2", "cuda:3"}


def test_four_24_gb_gpus_fit_four_whole_members_and_the_fifth_in_parts() -> None:
    plan = on("4x24GB", five())
    assert plan.fits
    alone = [place for place in places(plan).values() if "+" not in place]
    assert sorted(alone) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    parts = plan.of("mistral-7b")
    assert parts.place == "cuda:0+cuda:1+cuda:2+cuda:3"
    assert sum(parts.caches.values()) == pytest.approx(1)
    assert sum(parts.memory.values()) == pytest.approx(parts.need.total, rel=1e-6)
    layers = [f"model.layers.{n}" for n in range(32)]
    assert {*layers, "model.embed_tokens", "model.norm", "lm_head"} <= set(parts.modules)
    in_order = [parts.modules[layer] for layer in layers]
    assert in_order == sorted(in_order), "neighbours stay together"


@pytest.mark.parametrize("quantizations", [(None,), ANY_PRECISION, ("4bit",)])
def test_one_24_gb_card_is_refused_with_advice(quantizations: tuple[str | None, ...]) -> None:
    plan = on("24GB", five(quantizations=quantizations))
    assert not plan.fits
    assert plan.problem is not None
    assert "leaving out glm-4-9b, gemma-2-9b" in plan.problem
    assert 'quantization="auto", which' not in plan.problem, "it would not help"
    three = [r for r in five(quantizations=ANY_PRECISION) if r.name not in ("glm-4-9b", "gemma-2-9b")]
    assert on("24GB", three).fits, "the advice is true"


def test_one_gpu_for_each_member_fits_all_in_16_bit() -> None:
    plan = on("5x24GB", five(quantizations=ANY_PRECISION))
    assert set(precisions(plan).values()) == {None}
    assert len(set(places(plan).values())) == 5


def test_memory_that_is_already_used_counts() -> None:
    cards = [replace(d, free=d.free - 10 * 10**9) for d in planned_devices("5x24GB")]
    assert not place(five(), cards, ROUND).fits
    assert place(five(quantizations=("4bit",)), cards, ROUND).fits


def test_the_plan_of_a_whole_ensemble_reads_no_weights(tmp_path: Path) -> None:
    members = [MemberConfig(str(write_shape(name, tmp_path)), quantization="auto") for name in FIVE]
    config = EnsembleConfig(members)
    plan = plan_ensemble(config, planned_devices("80GB"))
    assert plan == on(
        "80GB", [replace(r, name=n) for r, n in zip(five(quantizations=ANY_PRECISION), FIVE, strict=True)]
    )
    assert plan.workload == ROUND
    with pytest.raises(PlacementError, match="cpu"):
        EnsembleEngine(EnsembleConfig([str(write_shape("gemma-2-9b", tmp_path, num_hidden_layers=400))])).load()


# ── which device ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Even:
    """A model of `size` bytes in layers of one byte each, in any format."""

    size: int
    kv_values: int = 0
    tied: int = 0
    vocabulary: int = 0
    context: int | None = None

    def weights(self, number_format: str, quantization: str | None) -> int:
        return {None: self.size, "8bit": self.size // 2, "4bit": self.size // 4}[quantization]

    def split(self, room: Mapping[str, int], number_format: str, quantization: str | None) -> Split | None:
        remaining, modules, shares = self.weights(number_format, quantization), {}, {}
        for name, amount in room.items():
            if taken := min(remaining, amount):
                modules[f"on {name}"], shares[name], remaining = name, taken / self.size, remaining - taken
        return None if remaining else Split(modules, shares)


def cards(*sizes: int, kind: str = "cuda") -> list[Device]:
    return [Device(f"{kind}:{n}", kind, size, size) for n, size in enumerate(sizes)]


def placed(sizes: list[int], devices: list[Device], **settings: Any) -> list[str]:
    specs = [MemberSpec(str(n), Even(size), **settings) for n, size in enumerate(sizes)]
    return list(places(place(specs, devices)).values())


def test_members_are_spread_over_free_devices() -> None:
    assert placed([10, 20, 30], cards(100, 100, 100)) == ["cuda:2", "cuda:1", "cuda:0"]
    assert placed([10, 20], cards(30, 100)) == ["cuda:0", "cuda:1"], "the largest has the most memory"


def test_members_are_packed_tightly_if_spreading_leaves_one_out() -> None:
    # spread: 40 → the largest, 30 → the other one, and then nothing fits the last 30
    assert placed([30, 30, 40], cards(46, 70)) == ["cuda:1", "cuda:1", "cuda:0"]


def test_a_chosen_device_is_kept_and_a_missing_one_refused() -> None:
    devices = [Device("cpu", "cpu", 500, 500), *cards(100, 50)]
    assert placed([10], devices, device="cuda:1") == ["cuda:1"]
    assert placed([10], devices, device="cuda") == ["cuda:0"]
    assert placed([10], devices, device="cpu") == ["cpu"]
    assert placed([60], devices, device="cuda:1") == [""], "it is not replaced by another one"
    with pytest.raises(PlacementError, match=r"no device 'xpu:0'; there are cpu, cuda:0, cuda:1"):
        placed([10], devices, device="xpu:0")


def test_main_memory_is_used_only_without_an_accelerator_or_if_configured() -> None:
    devices = [Device("cpu", "cpu", 500, 500), *cards(100)]
    assert placed([150], devices) == [""]
    assert placed([150], devices[:1]) == ["cpu"]
    assert placed([150], devices, offload=True) == ["cuda:0+cpu"]
    assert placed([800], devices, offload=True) == ["cuda:0+cpu+disk"]
    assert placed([50, 40], devices, offload=True) == ["cuda:0", "cuda:0"], "not if they fit"


def test_a_member_is_split_over_devices_of_one_kind_only() -> None:
    mixed = [*cards(60), Device("xpu:0", "xpu", 80, 80), Device("xpu:1", "xpu", 80, 80)]
    assert placed([100], mixed) == ["xpu:0+xpu:1"]
    assert placed([130], mixed) == ["xpu:0+xpu:1"]
    assert placed([160], mixed) == [""]
    assert placed([100, 90], cards(60, 60, 60, 60)) == ["cuda:0+cuda:1", "cuda:2+cuda:3"]


def test_members_are_quantised_before_they_are_split_and_only_as_needed() -> None:
    auto = {"quantizations": ANY_PRECISION}
    assert placed([100], cards(60, 60), **auto) == ["cuda:0"]
    plan = place([MemberSpec(str(n), Even(size), **auto) for n, size in enumerate([40, 60, 80])], cards(176))
    assert list(precisions(plan).values()) == ["8bit", None, None], "the one that loses the fewest bytes"
    plan = place([MemberSpec(str(n), Even(40), **auto) for n in range(3)], cards(60))
    assert sorted(map(str, precisions(plan).values())) == ["4bit", "8bit", "8bit"]


def test_equal_sizes_always_give_the_same_plan() -> None:
    plans = [place(five(quantizations=ANY_PRECISION), planned_devices("4x24GB"), ROUND) for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GB", [("cuda:0", 80 * 10**9)]),
        ("2x24GiB, 1.5 GB", [("cuda:0", 24 * 2**30), ("cuda:1", 24 * 2**30), ("cuda:2", 15 * 10**8)]),
        ("xpu:16gb,cpu:64GB", [("xpu:0", 16 * 10**9), ("cpu", 64 * 10**9)]),
    ],
)
def test_other_hardware_is_described_in_a_short_form(text: str, expected: list[tuple[str, int]]) -> None:
    assert [(d.name, d.free) for d in planned_devices(text)] == expected


@pytest.mark.parametrize("text", ["", "24", "0x24GB", "4*24GB", "0GB", "24GB,"])
def test_hardware_that_cannot_be_understood_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="4x24GB"):
        planned_devices(text)


def test_this_machine_has_a_processor_with_free_memory() -> None:
    first = find_devices()[0]
    assert first.kind == "cpu"
    assert 0 < first.free <= first.total


# ── real members ─────────────────────────────────────────────────────────────────────────────────

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""A size wide enough for blocks of 64 weights."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", byte_level_tokenizer(), tmp_path_factory.mktemp("tiny"), **WIDE)


def planned(config: MemberConfig, room: float = 1e12, **facts: bool) -> Plan:
    """The plan for this machine's CPU, with `facts` changed."""
    device = replace(find_devices()[0], free=int(room), **facts)
    return plan_ensemble(EnsembleConfig([config]), [device], context=64)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "gpt_oss", "mamba"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_weights_equal_loaded_weights(tmp_path: Path, kind: str, dtype: str) -> None:
    shape = WIDE if kind in ("llama", "gemma2") else {}
    config = MemberConfig(str(save_model(kind, metaspace_tokenizer(), tmp_path / kind, **shape)), dtype=dtype)
    report = LocalMember(config).report
    assert planned(config).assignments[0].need.weights == pytest.approx(report.memory_bytes, rel=0.01)
    assert (report.device, report.dtype, report.quantization) == ("cpu", dtype, None)


def test_planned_caches_equal_allocated_caches(tiny: Path) -> None:
    member = LocalMember(MemberConfig(str(tiny)))
    need = planned(MemberConfig(str(tiny))).assignments[0].need
    assert need.caches == 64 * member.bytes_per_token


@pytest.mark.slow  # with the libraries of the extra `quant`
@pytest.mark.parametrize(("quantization", "library"), [("8bit", "torchao"), ("4bit", "bitsandbytes")])
def test_a_quantised_member_answers_and_needs_the_planned_memory(tiny: Path, quantization: str, library: str) -> None:
    pytest.importorskip(library)
    config = MemberConfig(str(tiny), quantization=quantization)
    with EnsembleEngine(EnsembleConfig([config])) as engine:
        assert engine.generate("Why is the sea salt?", SamplingParams(max_tokens=8)).usage.completion_tokens == 8
        [report] = engine.describe()
    assert report.quantization == quantization
    assert planned(config).assignments[0].need.weights == pytest.approx(report.memory_bytes, rel=0.02)
    assert report.memory_bytes < 0.75 * LocalMember(MemberConfig(str(tiny))).report.memory_bytes


@pytest.mark.slow
def test_an_8_bit_member_answers_alike_in_paged_execution(tiny: Path) -> None:
    pytest.importorskip("torchao")
    texts, products = [], []
    for execution in ("dynamic", "paged"):
        config = EnsembleConfig([MemberConfig(str(tiny), quantization="8bit", dtype="float32")], execution=execution)
        with EnsembleEngine(config) as engine:
            texts.append(engine.generate("Why is the sea salt?", SamplingParams(max_tokens=24)).text)
            [member] = local_members(engine)
            products.append(sum(isinstance(module, Int8Linear) for module in member.runner.model.modules()))
    assert texts[0] == texts[1]
    assert products[0] == 0
    assert products[1] > 4, "layers use the product that a card has a kernel for"


def test_a_missing_library_is_named_before_any_weight_is_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'8bit.*torchao.*pip install "\.\[quant\]"'):
        LocalMember(MemberConfig(str(tiny), quantization="8bit"))


def test_a_checkpoint_that_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    config = MemberConfig(str(write_shape("mistral-7b", tmp_path, **quantised)), quantization="auto")
    assert precisions(planned(config)) == {"mistral-7b": None}
    assert not planned(config, room=4e9).fits
    with pytest.raises(MemberLoadError, match="quantised already"):
        planned(replace(config, quantization="8bit"))


def test_layers_are_offloaded_to_disk_if_configured(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MemberConfig(str(tiny), max_context=128)
    params = SamplingParams(max_tokens=12)
    with EnsembleEngine(EnsembleConfig([config])) as engine:
        expected = engine.generate("Where is the moon?", params).text
        need = plan_ensemble(engine.config).assignments[0].need
    small = replace(find_devices()[0], free=int(0.8 * need.total))
    monkeypatch.setattr("specfuse_shared.loading.planning.find_devices", lambda: (small,))
    with EnsembleEngine(EnsembleConfig([config])) as engine, pytest.raises(PlacementError, match="offload=True"):
        engine.load()
    with EnsembleEngine(EnsembleConfig([replace(config, offload=True)])) as engine:
        assert engine.describe()[0].device == "cpu+disk"
        assert engine.generate("Where is the moon?", params).text == expected


def test_the_plan_of_a_gguf_file_is_read_from_its_header(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "small.gguf", "llama")
    for name, value in {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "head_count": 4,
        "head_count_kv": 2,
        "vocab_size": 300,
        "rope_dimension_count": 16,
    }.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a"] * 300)
    writer.add_tensor("token_embd.weight", np.zeros((300, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    [assignment] = planned(MemberConfig(str(tmp_path / "small.gguf")), bf16=True).assignments
    assert assignment.need.weights == pytest.approx(2 * (81_000 + 300 * 64), rel=0.01)  # the embedding twice
    assert assignment.need.caches == 64 * 2 * 2 * 2 * 16 * 2
    assert assignment.number_format == "bfloat16"
    [assignment] = planned(MemberConfig(str(tmp_path / "small.gguf")), bf16=False).assignments
    assert assignment.need.weights == pytest.approx(4 * 81_000, rel=0.01)
    assert assignment.number_format == "float32"
    with pytest.raises(MemberLoadError, match=r"hf download somebody/model x.gguf"):
        planned(MemberConfig("somebody/model", gguf_file="x.gguf"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "8bits"}, "did you mean '8bit'"),
        ({"quantization": "4bit", "offload": True}, "leave quantization at None or 'auto'"),
        ({"quantization": "8bit", "adapter": "a/b"}, "leave quantization at None or 'auto'"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemberConfig("a", **settings)


@needs_cuda(1, "a tiny model, stored in bfloat16")
def test_a_member_is_loaded_onto_the_accelerator_in_half_precision(tiny: Path) -> None:
    [report] = EnsembleEngine(EnsembleConfig([str(tiny)])).describe()
    assert (report.device, report.dtype) == ("cuda:0", "bfloat16")
