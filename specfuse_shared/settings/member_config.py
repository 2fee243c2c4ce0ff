"""The settings of one member. Frozen, validated once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specfuse_shared.addresses import is_private, server_address
from specfuse_shared.errors import ConfigError
from specfuse_shared.validation import Settings, check, check_choice

QUANTIZATIONS = ("8bit", "4bit", "auto")
DTYPES = ("auto", "float32", "bfloat16", "float16")
BACKENDS = ("auto", "llama.cpp", "transformers")
CACHE_TYPES = ("auto", "f32", "f16", "q8_0")
OLLAMA = "ollama:"
"""Begins the name of a model in Ollama's store."""
_OF_LLAMA_CPP = ("gpu_layers", "threads", "cache_tokens", "cache_type")
"""What only llama.cpp knows."""
_OF_TRANSFORMERS = ("quantization", "offload", "attn_implementation", "trust_remote_code", "allow_pickle")
"""What only transformers knows of how a model is loaded."""
_SERVERS_OWN = (
    *("adapter", "dtype", "device", "quantization", "offload", "attn_implementation", "allow_pickle", "backend"),
    *_OF_LLAMA_CPP,
)
"""What a server decides of the model that it runs."""
BACKSLASHES = (
    r"write a path of Windows in single quotes in TOML ('C:\models\new'), as r'C:\models\new' in Python, or with /"
)


@dataclass(frozen=True, slots=True)
class MemberConfig(Settings):
    """One model of the ensemble: where it comes from, how it is loaded, and how it takes part."""

    model: str
    """Hub id, local folder, GGUF file, or "ollama:NAME" for a model in Ollama's store. Remote code and pickled weights
    are refused unless allowed below."""
    name: str | None = None
    """The member's name in records, events and `EnsembleConfig.reference`; the last part of `model` if unset."""
    revision: str | None = None
    """Branch, tag or commit of the hub repository."""
    gguf_file: str | None = None
    """A GGUF file inside the hub repository or folder that `model` names."""
    adapter: str | None = None
    """Hub id or folder of a PEFT adapter, merged into the weights (extra "adapters"); on llama.cpp, a LoRA in a GGUF
    file, applied at run time."""
    adapter_revision: str | None = None
    """Branch, tag or commit of the adapter's hub repository."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer, if it does not come with the model."""
    dtype: str = "auto"
    """"float32", "bfloat16" or "float16"; "auto": half precision as the device has it; float32 stays on a CPU."""
    device: str = "auto"
    """"auto" (wherever there is room, but not on MPS), a kind ("cuda", "mps") or one device ("cuda:1", "cpu")."""
    quantization: str | None = None
    """Quantises the weights at load: "8bit" (torchao), "4bit" (bitsandbytes, NF4), or "auto": the widest precision that
    fits (extra "quant")."""
    backend: str = "auto"
    """What runs the model: "llama.cpp" (GGUF files as they are, extra "llamacpp"), "transformers", or "auto": llama.cpp
    for quantised GGUF files where it is installed and no other setting needs transformers."""
    gpu_layers: int | None = None
    """Layers that llama.cpp keeps on the GPU; unset: as many as fit, none with `device="cpu"`."""
    threads: int | None = None
    """Threads of llama.cpp; unset: the member's share of the cores."""
    cache_tokens: int | None = None
    """Tokens in llama.cpp's cache, for all answers together, allocated at load; unset: four answers of 4,096 tokens, or
    as many as fit into memory."""
    cache_type: str = "auto"
    """Type of the numbers in llama.cpp's cache: "f32", "f16" or "q8_0"; "auto": f16, or f32 with `dtype="float32"`."""
    offload: bool = False
    """Allow layers that fit on no device to stay in main memory or on disk, which is very slow."""
    weight: float = 1.0
    """Voting weight at the start of each answer, relative to the others' (`EnsembleConfig.first_weights`)."""
    chat_template: str | None = None
    """Jinja source that replaces the tokenizer's chat template. A base model without one gets a plain template
    (`specfuse_shared.text.chat_template.PLAIN_TEMPLATE`)."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template; `thinking` sets `enable_thinking`."""
    thinking: bool | Sequence[str] = False
    """The member thinks before the answer, between the markers of its template or the two given here. No other member
    reads its thoughts."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the member's turn, besides those of the model's configuration."""
    max_context: int | None = None
    """Lowers the model's context limit, in tokens."""
    attn_implementation: str | None = None
    """Passed to transformers; the probe at load checks that it is exact."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Set it only for repositories that you have read."""
    allow_pickle: bool = False
    """Load weights that are not safetensors. Unpickling a file may run code that is in it."""
    drafts_under_grammar: bool = True
    """False: under a grammar or in a tool call the member only verifies, unless no other member drafts. For such
    drafts, a member behind a server without the token endpoint needs one request per token."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resources of a Ray node (`EnsembleConfig(runtime="ray")`): "CPU" (default 1), "GPU" (default 1 if the cluster has
    any), "memory" in bytes (default, without a GPU: what the model takes), and custom names."""
    server: str | None = None
    """Address of a vLLM server that runs the model ("http://127.0.0.1:8000/v1"); `model` then names the tokenizer and
    template (extra "servers")."""
    server_model: str | None = None
    """The server's name of the model; `model` if unset."""
    server_timeout: float = 60.0
    """Seconds after which a request to the server fails and the member leaves the answer."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key. The key itself is never stored."""

    def __post_init__(self) -> None:
        if isinstance(self.model, Path):
            object.__setattr__(self, "model", str(self.model))
        self.check_types()
        for name in ("model", "adapter", "tokenizer"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _at_home(str(given)))
        for name in ("model", "adapter", "tokenizer", "gguf_file"):
            given = getattr(self, name)
            check(
                given is None or given.isprintable(),
                f"MemberConfig.{name} is {given!r}, which has a control character in it: {BACKSLASHES}",
            )
        model = self.model.strip().removeprefix(OLLAMA)
        check(bool(model), "MemberConfig.model is empty: give a hub id, a folder, a GGUF file or ollama:NAME")
        if self.adapter is not None:
            check(bool(str(self.adapter).strip()), "MemberConfig.adapter is empty: give a hub id or a folder")
        check(
            self.adapter_revision is None or self.adapter is not None,
            "MemberConfig.adapter_revision is set without adapter: set adapter to a hub id, too",
        )
        check_choice("MemberConfig.dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            check_choice("MemberConfig.quantization", self.quantization, QUANTIZATIONS)
        check(
            self.quantization in (None, "auto") or not (self.offload or self.adapter),
            "MemberConfig.offload and adapter need unquantised weights: leave quantization at None or 'auto'",
        )
        self._check_backend()
        check(
            math.isfinite(self.weight) and self.weight > 0,
            f"MemberConfig.weight must be a positive number, not {self.weight!r}",
        )
        check(
            self.max_context is None or self.max_context > 0,
            f"MemberConfig.max_context must be positive, not {self.max_context!r}",
        )
        self._check_server()
        for name in ("template_options", "resources"):
            given = getattr(self, name)
            check(isinstance(given, Mapping), f"MemberConfig.{name} must be a table of names and values, not {given!r}")
        thinking = self.thinking or bool(self.template_options.get("enable_thinking"))
        if not isinstance(thinking, bool):
            check(
                _is_list_of(str, thinking) and len(thinking) == 2 and all(thinking),
                f"MemberConfig.thinking must be True, False or the two markers around thoughts, not {thinking!r}",
            )
            thinking = tuple(thinking)
        object.__setattr__(self, "thinking", thinking)
        object.__setattr__(self, "template_options", MappingProxyType(dict(self.template_options)))
        ids = self.stop_token_ids
        check(_is_list_of(int, ids), f"MemberConfig.stop_token_ids must be a list of token ids, not {ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        amounts = dict(self.resources)
        check(
            all(isinstance(amount, (int, float)) and amount >= 0 for amount in amounts.values()),
            f"MemberConfig.resources must be amounts by name, such as {{'GPU': 1}}, not {amounts!r}",
        )
        object.__setattr__(self, "resources", MappingProxyType(amounts))

    def _check_backend(self) -> None:
        """The settings of an engine go with that engine."""
        check_choice("MemberConfig.backend", self.backend, BACKENDS)
        check_choice("MemberConfig.cache_type", self.cache_type, CACHE_TYPES)
        for name, least in (("gpu_layers", 0), ("threads", 1), ("cache_tokens", 256)):
            count = getattr(self, name)
            check(count is None or count >= least, f"MemberConfig.{name} must be at least {least}, not {count!r}")
        if self.backend == "llama.cpp" and (given := self.needs_transformers):
            check(False, f'MemberConfig.{given[0]} goes with backend="transformers": llama.cpp runs files as they are')
        if self.backend == "transformers" and (given := self.set_of(_OF_LLAMA_CPP)):
            check(False, f'MemberConfig.{given[0]} goes with backend="llama.cpp"')

    def set_of(self, names: Sequence[str]) -> list[str]:
        """Those of some settings that are not at their default."""
        defaults = {f.name: f.default for f in fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]

    @property
    def needs_transformers(self) -> list[str]:
        """Settings that only transformers can follow."""
        return self.set_of(_OF_TRANSFORMERS) + (["dtype"] if self.dtype not in ("auto", "float32") else [])

    @property
    def needs_llama_cpp(self) -> list[str]:
        """Settings that only llama.cpp can follow."""
        return self.set_of(_OF_LLAMA_CPP)

    def _check_server(self) -> None:
        """The settings of a server suit each other, and none of them would give its key away."""
        check(self.server_timeout > 0, f"MemberConfig.server_timeout must be positive, not {self.server_timeout!r}")
        if self.server is None:
            given = [name for name in ("server_model", "api_key_env") if getattr(self, name) is not None]
            check(not given, f"MemberConfig.{given and given[0]} is set without server: set server to an address, too")
            return
        object.__setattr__(self, "server", server_address("MemberConfig.server", self.server))
        for name in self.set_of(_SERVERS_OWN):
            check(False, f"MemberConfig.{name} is decided by the server at {self.server}: leave it unset")
        check(
            self.api_key_env is None or is_private(str(self.server)),
            f"MemberConfig.server is {self.server}: over http:// others on the network could read the key that "
            "api_key_env names: give an https:// address, or one of this machine, such as the end of a tunnel",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: dict(values[name]) for name in ("template_options", "resources")}
        return MemberConfig.from_dict, (values,)

    @property
    def label(self) -> str:
        """The name in records and events: `name`, else the last part of `model` without its file ending."""
        if self.name or self.model.startswith(OLLAMA):
            return self.name or self.model.removeprefix(OLLAMA)
        return Path(self.model).name.removesuffix(".gguf") or self.model


def as_member(member: MemberConfig | str | Path) -> MemberConfig:
    """A member as a configuration names it. Raises `ConfigError`."""
    if isinstance(member, MemberConfig):
        return member
    if isinstance(member, (str, Path)):
        return MemberConfig(str(member))
    raise ConfigError(f"a member must be a MemberConfig or a string, not {type(member).__name__}")


def unique_names(members: tuple[MemberConfig, ...]) -> tuple[MemberConfig, ...]:
    """Equal labels that were not chosen by the user get a number: the same model may appear twice."""
    chosen = [m.name for m in members if m.name]
    twice = sorted({name for name in chosen if chosen.count(name) > 1})
    check(not twice, f"two members are named {twice[:1]}: give each its own name")
    labels: list[str] = []
    for member in members:
        label, number = member.label, 2
        while label in labels or (member.name is None and label in chosen):
            label, number = f"{member.label}-{number}", number + 1
        labels.append(label)
    return tuple(_renamed(m, label) for m, label in zip(members, labels, strict=True))


def _renamed(member: MemberConfig, name: str) -> MemberConfig:
    return MemberConfig(**{**{f.name: getattr(member, f.name) for f in fields(member)}, "name": name})


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(type(each) is kind for each in value)


def _at_home(path: str) -> str:
    """A path whose "~" is a home folder. Raises `ConfigError` where nobody has that name."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError as error:
        raise ConfigError(f"{path} begins with the home folder of nobody here: write the whole path") from error
