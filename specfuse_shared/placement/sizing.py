"""The sizes of a model from its configuration alone: an empty model is built, and no weight is read.

Also the devices of this machine and their free memory, or the devices of a described machine.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from specfuse_shared.errors import ConfigError
from specfuse_shared.placement.plan import Device, Split, pool_of

_BITS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4, "gptq": 4, "awq": 4}
_GROUP = {"mxfp4": 32, "fp8": 128}
_BNB_GROUP = 64
_WHOLE_BITS = 16


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How quantised weights are stored: `bits` each, and a scale (and zero point) of `extra` bits for each group.

    `group` None: a scale a row. `linear`: only the weights of linear layers, as libraries quantise when they load;
    else every matrix of a layer. `skipped`: modules that keep their numbers.
    """

    bits: int
    extra: int
    group: int | None = None
    linear: bool = True
    skipped: tuple[str, ...] = ()


WEIGHT_FORMATS = {"8bit": WeightFormat(8, 32), "4bit": WeightFormat(4, 32, _BNB_GROUP)}
"""Formats of `MemberConfig.quantization`: int8 with a scale a row, NF4 with a float32 scale for 64 weights."""


def checkpoint_format(config: Any) -> WeightFormat | None:
    """Of a checkpoint that is quantised (GPTQ, AWQ, FP8, …), by its `quantization_config`; None if it is not.

    A method that is not known here counts as 16 bits a weight, which is too much rather than too little.
    """
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return None
    quantization: dict[str, Any] = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(quantization.get("quant_method", ""))
    if method == "bitsandbytes":
        return WEIGHT_FORMATS["4bit" if quantization.get("load_in_4bit") else "8bit"]
    for group in list((quantization.get("config_groups") or {}).values())[:1]:  # of compressed-tensors
        quantization = {**quantization, **(group.get("weights") or {})}
    bits = _first(quantization, "bits", "w_bit", "num_bits") or _BITS.get(method, _WHOLE_BITS)
    group_size = max(0, _first(quantization, "group_size", "q_group_size") or 0)
    skipped = quantization.get("modules_to_not_convert") or quantization.get("ignore") or ()
    return WeightFormat(bits, _WHOLE_BITS + bits, group_size or _GROUP.get(method), False, tuple(skipped))


def _first(settings: Mapping[str, Any], *names: str) -> int | None:
    return next((int(settings[name]) for name in names if settings.get(name) is not None), None)


class ModelSizes:
    """`specfuse_shared.placement.plan.Sizes` of a transformers configuration."""

    def __init__(self, config: Any, trust_remote_code: bool = False) -> None:
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        with init_empty_weights(include_buffers=True):
            self._model = auto.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        self._model.tie_weights()
        text = config.get_text_config(decoder=True)
        self._stored = checkpoint_format(config)
        self.quantised = self._stored is not None
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        self.vocabulary: int = self._model.get_input_embeddings().num_embeddings
        self.kv_values = _kv_values(text)
        self.tied = _tied(self._model)
        self.parameters: int = self._model.num_parameters()

    def weights(self, number_format: str, quantization: str | None) -> int:
        sizes, extra = self._sizes(number_format, quantization)
        return int(sizes[""] + extra)

    def split(self, free_bytes: Mapping[str, int], number_format: str, quantization: str | None) -> Split | None:
        from accelerate import infer_auto_device_map

        sizes, extra = self._sizes(number_format, quantization)
        whole = sizes[""] / (sizes[""] + extra)
        names = {_key(name): name for name in free_bytes}
        with _no_warnings():
            dealt = infer_auto_device_map(
                self._model,
                max_memory={key: int(free_bytes[name] * whole) for key, name in names.items() if name != "disk"},
                no_split_module_classes=list(self._model._no_split_modules or ()),
                dtype=getattr(torch, number_format),
                special_dtypes=self._small(quantization),
                offload_buffers=True,
            )
        if any(key not in names for key in dealt.values()):
            return None
        shares: dict[str, float] = {}
        for module, key in dealt.items():
            shares[names[key]] = shares.get(names[key], 0.0) + sizes[module] / sizes[""]
        return Split({module: names[key] for module, key in dealt.items()}, shares)

    def _sizes(self, number_format: str, quantization: str | None) -> tuple[Mapping[str, int], float]:
        """Bytes by module, and the bytes of all scales."""
        from accelerate.utils import compute_module_sizes

        small, extra = self._small(quantization), 0.0
        if (stored_format := self._format(quantization)) is not None:
            matrices = [self._matrices[name] for name in small]
            extra = sum(m.numel() / (stored_format.group or m.shape[-1]) * stored_format.extra / 8 for m in matrices)
        return compute_module_sizes(self._model, dtype=getattr(torch, number_format), special_dtypes=small), extra

    def _format(self, quantization: str | None) -> WeightFormat | None:
        return WEIGHT_FORMATS[quantization] if quantization else self._stored

    def _small(self, quantization: str | None) -> dict[str, Any]:
        """The weights that are quantised, and a type of their size."""
        from accelerate.utils import CustomDtype

        stored_format = self._format(quantization)
        if stored_format is None or stored_format.bits >= _WHOLE_BITS:
            return {}
        size = (
            CustomDtype.INT2 if stored_format.bits <= 2 else CustomDtype.INT4 if stored_format.bits <= 4 else torch.int8
        )
        names = self._linear if stored_format.linear else self._matrices
        return {name: size for name in names if not any(_names(pattern, name) for pattern in stored_format.skipped)}

    @cached_property
    def _matrices(self) -> dict[str, nn.Parameter]:
        """Parameters of two and more dimensions, without embeddings and the output layer."""
        embeddings = {id(m.weight) for m in self._model.modules() if isinstance(m, nn.Embedding)}
        if (head := self._model.get_output_embeddings()) is not None:
            embeddings.add(id(head.weight))
        return {name: p for name, p in self._model.named_parameters() if p.dim() > 1 and id(p) not in embeddings}

    @cached_property
    def _linear(self) -> list[str]:
        linear = {id(m.weight) for m in self._model.modules() if isinstance(m, nn.Linear)}
        return [name for name, parameter in self._matrices.items() if id(parameter) in linear]


def _names(pattern: str, weight: str) -> bool:
    """Whether a weight belongs to a module that a checkpoint names, with "*" or as "re:" expression."""
    expression = pattern[3:] if pattern.startswith("re:") else re.escape(pattern).replace(r"\*", ".*")
    return re.search(expression, weight) is not None


def _kv_values(text: Any) -> int:
    """Numbers that a token adds to the caches. Every layer counts as full attention: rather too much."""
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return 0  # recurrent: the state does not grow
    head_sizes = (getattr(text, name, None) for name in ("head_dim", "v_head_dim", "qk_head_dim", "global_head_dim"))
    size = max([int(head_size) for head_size in head_sizes if head_size], default=text.hidden_size // heads)
    return int(2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * size)


def _tied(model: Any) -> int:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    return int(embedding.numel()) if head is not None and head.weight is embedding else 0


def weight_bytes(model: Any) -> int:
    """Bytes that the weights of a loaded model take, quantised ones with their scales."""
    return sum(_stored_bytes(t) for t in (*model.parameters(), *model.buffers()))


def _stored_bytes(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        inner, _ = tensor.__tensor_flatten__()
        return sum(_stored_bytes(getattr(tensor, name)) for name in inner)
    scales = getattr(getattr(tensor, "quant_state", None), "absmax", None)
    return tensor.nbytes + (0 if scales is None else scales.nbytes)


def _key(device: str) -> int | str:
    """A device as accelerate names it."""
    kind, _, index = device.partition(":")
    return int(index) if index else kind


@contextmanager
def _no_warnings() -> Iterator[None]:
    """The library warns of devices that this machine does not have, but a plan may be for another one."""
    chatty = logging.getLogger("accelerate.utils.modeling")
    before, chatty.disabled = chatty.disabled, True
    try:
        yield
    finally:
        chatty.disabled = before


DEVICES_ENV = "SPECFUSE_DEVICES"
"""With the value "cpu", plans see no accelerator: for one that is there but fails, as on hosted runners of macOS."""
_UNITS = {"GB": 10**9, "GIB": 2**30}
_PLANNED = re.compile(r"(?:(\d+)\s*x\s*)?(?:([a-z]+):)?(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)


def find_devices() -> tuple[Device, ...]:
    """The processor, then the accelerators (CUDA, ROCm, XPU, MPS), unless `$SPECFUSE_DEVICES` leaves them out."""
    total, free = host_memory()
    title = f"{platform.machine()}, {torch.get_num_threads()} threads"
    devices = [Device("cpu", "cpu", total, free, _cpu_has_bf16(), title)]
    if has_accelerator():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        devices += [_accelerator(kind.type, index) for index in range(torch.accelerator.device_count())]
    return tuple(devices)


def has_accelerator() -> bool:
    """Whether torch sees an accelerator that plans may use."""
    return not only_cpu() and bool(torch.accelerator.is_available())


def only_cpu() -> bool:
    """Whether `$SPECFUSE_DEVICES` leaves accelerators out. Raises `ConfigError`."""
    value = os.environ.get(DEVICES_ENV, "").strip().lower()
    if value not in ("", "cpu"):
        raise ConfigError(f'${DEVICES_ENV} is {value!r}: set it to "cpu" to use no accelerator, or unset it')
    return value == "cpu"


def planned_devices(text: str) -> tuple[Device, ...]:
    """Devices from a description: "80GB", "4x24GB", "2x24GB,48GB", "xpu:16GB,cpu:64GiB". Raises `ConfigError`.

    GB is 10⁹ bytes. A card sold with 24 GB has 24 GiB, of which its driver takes some: GB leaves a margin for that.
    """
    chosen: list[Device] = []
    for part in text.split(","):
        match = _PLANNED.fullmatch(part.strip())
        if match is None or match[1] == "0" or not float(match[3]):
            raise ConfigError(f'devices is {text!r}: write them as "80GB", "4x24GB", "2x24GB,48GB" or "24GB,cpu:64GB"')
        kind, size = (match[2] or "cuda").lower(), int(float(match[3]) * _UNITS[match[4].upper()])
        for _ in range(int(match[1] or 1)):
            index = sum(d.kind == kind for d in chosen)
            chosen.append(Device(kind if kind == "cpu" else f"{kind}:{index}", kind, size, size))
    return tuple(chosen)


def free_memory(name: str) -> int:
    """Free bytes on a device; memory that torch holds but does not use counts as free.

    An Apple GPU has its recommended maximum, and no more than the free main memory.
    """
    device = torch.device(name)
    if device.type in ("cpu", "meta"):
        return host_memory()[1]
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        used = module.current_allocated_memory()
        unused = max(0, module.driver_allocated_memory() - used)
        return int(max(0, min(module.recommended_max_memory() - used, host_memory()[1] + unused)))
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + unused)


def shared_out(free: Mapping[str, int]) -> dict[str, int]:
    """Each device of one pool gets an equal part of the pool's largest free memory, if it has that much."""
    limits: dict[str, int] = {}
    for name, size in free.items():
        limits[pool_of(name)] = max(size, limits.get(pool_of(name), 0))
    lying = Counter(map(pool_of, free))
    return {name: min(size, limits[pool_of(name)] // lying[pool_of(name)]) for name, size in free.items()}


def host_memory() -> tuple[int, int]:
    """Bytes of this machine, and those that are free."""
    import psutil  # missing on some machines whose GPU tests must be collected

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _accelerator(kind: str, index: int) -> Device:
    module: Any = torch.get_device_module(kind)
    if kind == "mps":
        bf16 = torch.backends.mps.is_macos_or_newer(14, 0)
        return Device("mps", "mps", int(module.recommended_max_memory()), free_memory("mps"), bf16, "Apple GPU")
    name, facts = f"{kind}:{index}", module.get_device_properties(index)
    bf16 = kind != "cuda" or torch.version.hip is not None or facts.major >= 8
    return Device(name, kind, int(facts.total_memory), free_memory(name), bf16, str(facts.name))


def _cpu_has_bf16() -> bool:
    return bool(torch.cpu.get_capabilities().get("avx512_bf16")) if hasattr(torch.cpu, "get_capabilities") else False
