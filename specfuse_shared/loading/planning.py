"""From an ensemble's configuration to its plan: who is placed where, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from specfuse_shared.errors import ConfigError, MemberLoadError
from specfuse_shared.loading.backends import backend_of
from specfuse_shared.loading.gguf import OnStage, converted, gguf_file, has_tensor, known_conversion
from specfuse_shared.loading.gguf_head import gguf_head, gguf_parts
from specfuse_shared.loading.llama_spec import llama_spec
from specfuse_shared.loading.pretrained import explained
from specfuse_shared.placement.devices import find_devices
from specfuse_shared.placement.packing import ANY_PRECISION, place
from specfuse_shared.placement.plan import ANSWERS, CONTEXT, Device, MemberSpec, Plan, Workload
from specfuse_shared.placement.sizing import ModelSizes
from specfuse_shared.settings.config import EnsembleConfig
from specfuse_shared.settings.member_config import MemberConfig

_MOST_QUANTISED = 1.9
"""Bytes a weight below which a GGUF file is quantised, and converted to bfloat16."""


def plan_ensemble(
    config: EnsembleConfig,
    devices: Sequence[Device] | None = None,
    *,
    answers: int = ANSWERS,
    context: int = CONTEXT,
    convert: bool = False,
    on_stage: Mapping[str, OnStage] | None = None,
) -> Plan:
    """A place for every member on `devices` (this machine's, if unset), from configurations alone.

    Makes room for `answers` at once with `context` tokens each, besides the weights. `convert`: GGUF files are fetched
    and converted on the way, as loading would. `on_stage`: called with what is done for a member, by its name.

    Raises `MemberLoadError` for a configuration that cannot be read, `PlacementError` for a device that is not there; a
    plan that does not fit raises when a place is asked of it (`Plan.of`). Members behind servers take no place.
    """
    if answers < 1 or context < 1:
        raise ConfigError(f"a plan is for at least 1 answer and 1 token of context, not {answers} and {context}")
    members = config.member_configs
    here = [member for member in members if member.server is None]
    stages = on_stage or dict.fromkeys(config.names, lambda stage: None)
    specs = [_spec(m, config.cache_dir, convert, stages[m.label]) for m in here]
    workload = Workload(answers, context, config.most_tried * len(members))
    return place(specs, devices or find_devices(), workload)


def _spec(config: MemberConfig, cache_dir: str | None, convert: bool, on_stage: OnStage) -> MemberSpec:
    on_stage("reading the configuration")
    with explained(config):
        if backend_of(config, fetch=convert).is_llama_cpp:
            return llama_spec(config, fetch=convert)
        file = gguf_file(config, fetch=convert)
        settings, stored = _settings(config, file, cache_dir, convert, on_stage)
        sizes = ModelSizes(settings, config.trust_remote_code)
        if file is not None and stored is None:
            stored = "bfloat16" if gguf_head(file).size < _MOST_QUANTISED * sizes.parameters else "float32"
    if sizes.quantised and config.quantization in ("8bit", "4bit"):
        raise MemberLoadError(f"member {config.label!r}: its weights are quantised already: leave quantization unset")
    fixed = sizes.quantised or config.adapter is not None  # adapters are merged into whole numbers
    chosen = None if config.quantization == "auto" else config.quantization
    return MemberSpec(
        name=config.label,
        sizes=sizes,
        stored=stored,
        dtype=config.dtype,
        device=config.device,
        quantizations=ANY_PRECISION if config.quantization == "auto" and not fixed else (chosen,),
        offload=config.offload,
        max_context=config.max_context,
        fixed=fixed,
    )


def _settings(
    config: MemberConfig, file: Path | None, cache_dir: str | None, convert: bool, on_stage: OnStage
) -> tuple[Any, str | None]:
    """A member's transformers configuration, and the number format of its weights, if that is known."""
    from transformers import AutoConfig

    source, revision = config.model, config.revision
    if file is not None:
        folder = converted(file, cache_dir, on_stage) if convert else known_conversion(file, cache_dir)
        if folder is None:
            settings = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            if len(parts := gguf_parts(file)) > 1:  # transformers looks for an output layer in the first part alone
                settings.tie_word_embeddings = not has_tensor(parts, "output.weight")
            return settings, None
        source, revision = str(folder), None
    settings = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=config.trust_remote_code)
    stored = settings.dtype or settings.get_text_config(decoder=True).dtype
    return settings, None if stored is None else str(stored).removeprefix("torch.")


def needed_memory(config: MemberConfig, cache_dir: str | None) -> int | None:
    """Bytes of main memory that a member takes on a machine like this one, with room for an answer.

    None where its configuration cannot be read from here.
    """
    processor = find_devices()[0]
    with suppress(MemberLoadError):
        spec = _spec(config, cache_dir, False, lambda stage: None)
        return spec.need(processor, spec.quantizations[0], Workload()).total
    return None
