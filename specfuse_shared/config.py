"""The settings of a member, of an ensemble and of one answer. They are frozen, and validated once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, PlainValidator

from specfuse_shared import policies
from specfuse_shared.addresses import is_private, server_address
from specfuse_shared.errors import ConfigError
from specfuse_shared.policies import AggregatePolicy, ExitPolicy, FeedbackPolicy, ScorePolicy
from specfuse_shared.text.grammars.grammar import Grammar
from specfuse_shared.text.stops import LONGEST_STOP, MOST_STOPS
from specfuse_shared.validation import Settings, check, check_choice, listed, tuple_of, validated

QuantizationName = Literal["8bit", "4bit", "auto"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
BackendName = Literal["auto", "llama.cpp", "transformers"]
Switch = Literal["auto", "off"]
OLLAMA = "ollama:"
"""The prefix of a name in Ollama's store of models."""
_OF_LLAMA_CPP = ("gpu_layers", "threads", "cache_tokens", "cache_type")
"""Settings of llama.cpp alone."""
_OF_TRANSFORMERS = ("quantization", "offload", "attn_implementation", "compile", "trust_remote_code", "allow_pickle")
"""Settings of transformers alone, about loading a model."""
_SERVERS_OWN = (
    *("adapter", "dtype", "device", "quantization", "offload", "attn_implementation", "compile", "allow_pickle"),
    *("backend", *_OF_LLAMA_CPP),
)
"""Settings that a server decides for its model."""
BACKSLASHES = (
    r"write a path of Windows in single quotes in TOML ('C:\models\new'), as r'C:\models\new' in Python, or with /"
)
T = TypeVar("T")


def _at_home(path: Any) -> Any:
    """The path as text, with "~" replaced by the home folder. Raises `ConfigError` if no such user exists."""
    path = str(path) if isinstance(path, Path) else path
    try:
        return str(Path(path).expanduser()) if isinstance(path, str) and path.startswith("~") else path
    except RuntimeError as error:
        raise ConfigError(
            f"{path} begins with the home folder of a user who does not exist: write the whole path"
        ) from error


def _markers(value: Any) -> bool | tuple[str, ...]:
    """Whether a member thinks, or the two markers around its reasoning. Raises `ConfigError`."""
    if isinstance(value, bool):
        return value
    pair = isinstance(value, Sequence) and len(value) == 2 and all(isinstance(each, str) and each for each in value)
    check(
        pair and not isinstance(value, str),
        f"MemberConfig.thinking must be True, False or the two markers around the reasoning, not {value!r}",
    )
    return tuple(value)


Source = Annotated[str, BeforeValidator(_at_home)]
"""A hub id or a path."""
Table = Annotated[Mapping[str, T], AfterValidator(MappingProxyType)]
_NO_NAMES: Mapping[str, Any] = MappingProxyType({})


@validated
class MemberConfig(Settings):
    """One model of the ensemble: where it comes from, how it is loaded, and how it takes part."""

    model: Source
    """Hub id, local folder, GGUF file, or "ollama:NAME" for a model in Ollama's store."""
    name: str | None = None
    """The member's name in records, events and `EnsembleConfig.reference`; the last part of `model` if unset."""
    revision: str | None = None
    """Branch, tag or commit of the hub repository."""
    gguf_file: str | None = None
    """A GGUF file inside the hub repository or folder that `model` names."""
    adapter: Source | None = None
    """Hub id or folder of a PEFT adapter, merged into the weights (extra "adapters"); on llama.cpp, a LoRA in a GGUF
    file, applied at run time."""
    adapter_revision: str | None = None
    """Branch, tag or commit of the adapter's hub repository."""
    tokenizer: Source | None = None
    """Hub id or folder of the tokenizer, if it does not come with the model."""
    dtype: DtypeName = "auto"
    """"float32", "bfloat16" or "float16"; "auto": half precision if the device computes in it; on a CPU only for
    weights stored in bfloat16."""
    device: str = "auto"
    """"auto" (any device with enough memory except MPS), a kind ("cuda", "mps") or one device ("cuda:1", "cpu")."""
    quantization: QuantizationName | None = None
    """Quantises the weights at load: "8bit" (torchao), "4bit" (bitsandbytes, NF4), or "auto", the widest precision that
    fits (extra "quant")."""
    backend: BackendName = "auto"
    """"llama.cpp" (reads GGUF files directly; extra "llamacpp"), "transformers", or "auto": llama.cpp for quantised
    GGUF files if it is installed and no other setting needs transformers."""
    gpu_layers: Annotated[int | None, Field(ge=0)] = None
    """Layers that llama.cpp keeps on the GPU; unset: all, or none with `device="cpu"`."""
    threads: Annotated[int | None, Field(ge=1)] = None
    """Threads of llama.cpp; unset: the member's share of the cores."""
    cache_tokens: Annotated[int | None, Field(ge=256)] = None
    """Tokens in llama.cpp's cache, for all answers together, allocated at load; unset: four answers of 4,096 tokens, or
    as many as fit into memory."""
    cache_type: Literal["auto", "f32", "f16", "q8_0"] = "auto"
    """Type of the numbers in llama.cpp's cache: "f32", "f16" or "q8_0"; "auto": f16, or f32 with `dtype="float32"`."""
    offload: bool = False
    """Allow layers that fit on no device to stay in main memory or on disk, which is very slow."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Voting weight at the start of each answer, relative to the others' (`EnsembleConfig.first_weights`)."""
    chat_template: str | None = None
    """Jinja source that replaces the tokenizer's chat template. A base model without one gets a plain template
    (`specfuse_shared.text.chat_template.PLAIN_TEMPLATE`)."""
    template_options: Table[Any] = field(default_factory=lambda: _NO_NAMES)
    """Variables for the template; `thinking` sets `enable_thinking`."""
    thinking: Annotated[bool | Sequence[str], PlainValidator(_markers)] = False
    """The member thinks before the answer, between the markers of its template or the two given here. No other member
    reads its reasoning."""
    stop_token_ids: Annotated[tuple[int, ...], tuple_of(int)] = ()
    """Token ids that end the member's turn, in addition to the model's own."""
    max_context: Annotated[int | None, Field(ge=1)] = None
    """Limits the model's context, in tokens."""
    attn_implementation: str | None = None
    """Passed to transformers; the probe at load checks that it is exact."""
    compile: Switch = "auto"
    """"auto" compiles the layers on a CUDA or ROCm GPU, which takes some seconds at the first load; "off" does not."""
    trust_remote_code: bool = False
    """Run the model's own Python code. Set it only for repositories whose code you have read."""
    allow_pickle: bool = False
    """Load weights that are not safetensors. Unpickling a file may run code that is in it."""
    drafts_under_grammar: bool = True
    """False: under a grammar or in a tool call the member only verifies, unless no other member drafts. For such
    drafts, a vLLM server without `--enable-scale-out` needs one request per token."""
    resources: Table[Annotated[float, Field(ge=0)]] = field(default_factory=lambda: _NO_NAMES)
    """Resources of a Ray node (`EnsembleConfig(runtime="ray")`): "CPU" (default 1), "GPU" (default 1 if the cluster
    has GPUs), "memory" in bytes (default, without a GPU: the model's size), and custom names."""
    server: str | None = None
    """Address of a vLLM server that runs the model ("http://127.0.0.1:8000/v1"); `model` then names the tokenizer and
    template (extra "servers")."""
    server_model: str | None = None
    """The server's name of the model; `model` if unset."""
    server_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds after which a request to the server fails and the member leaves the answer."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key. The key itself is never stored."""

    def __post_init__(self) -> None:
        for name in ("model", "adapter", "tokenizer", "gguf_file"):
            value = getattr(self, name)
            check(
                value is None or value.isprintable(),
                f"MemberConfig.{name} is {value!r}, which has a control character in it: {BACKSLASHES}",
            )
        model = self.model.strip().removeprefix(OLLAMA)
        check(bool(model), "MemberConfig.model is empty: give a hub id, a folder, a GGUF file or ollama:NAME")
        if self.adapter is not None:
            check(bool(self.adapter.strip()), "MemberConfig.adapter is empty: give a hub id or a folder")
        check(
            self.adapter_revision is None or self.adapter is not None,
            "MemberConfig.adapter_revision is set without adapter: set adapter to a hub id, too",
        )
        check(
            self.quantization in (None, "auto") or not (self.offload or self.adapter),
            "MemberConfig.offload and adapter need unquantised weights: leave quantization at None or 'auto'",
        )
        self._check_backend()
        self._check_server()
        if not self.thinking and self.template_options.get("enable_thinking"):
            object.__setattr__(self, "thinking", True)

    def _check_backend(self) -> None:
        """Settings of one backend cannot be combined with the other backend."""
        if self.backend == "llama.cpp" and (conflicting := self.needs_transformers):
            check(
                False,
                f'MemberConfig.{conflicting[0]} goes with backend="transformers": llama.cpp runs files as they are',
            )
        if self.backend == "transformers" and (conflicting := self.set_of(_OF_LLAMA_CPP)):
            check(False, f'MemberConfig.{conflicting[0]} goes with backend="llama.cpp"')

    def set_of(self, names: Sequence[str]) -> list[str]:
        """The settings that differ from their default.

        Args:
            names: Settings to look at.

        Returns:
            The `names` that were set, in their order.

        Example:
            ```python
            from specfuse_shared import MemberConfig

            print(MemberConfig("Qwen/Qwen3-8B", dtype="float32").set_of(["dtype", "device"]))
            ```
        """
        defaults = {f.name: f.default for f in fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]

    @property
    def needs_transformers(self) -> list[str]:
        """The settings here that only transformers supports."""
        return self.set_of(_OF_TRANSFORMERS) + (["dtype"] if self.dtype not in ("auto", "float32") else [])

    @property
    def needs_llama_cpp(self) -> list[str]:
        """The settings here that only llama.cpp supports."""
        return self.set_of(_OF_LLAMA_CPP)

    def _check_server(self) -> None:
        """The settings of a server go together, and its key must not cross a network unencrypted."""
        if self.server is None:
            misplaced = [name for name in ("server_model", "api_key_env") if getattr(self, name) is not None]
            check(
                not misplaced,
                f"MemberConfig.{misplaced and misplaced[0]} is set without server: set server to an address, too",
            )
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
        """The name in records and events: `name`, else the last part of `model` without ".gguf" or "ollama:"."""
        if self.name or self.model.startswith(OLLAMA):
            return self.name or self.model.removeprefix(OLLAMA)
        return Path(self.model).name.removesuffix(".gguf") or self.model


def as_member(member: MemberConfig | str | Path) -> MemberConfig:
    """A `MemberConfig`, also from a model's name or path alone. Raises `ConfigError`."""
    if isinstance(member, MemberConfig):
        return member
    if isinstance(member, (str, Path)):
        return MemberConfig(str(member))
    raise ConfigError(f"a member must be a MemberConfig or a string, not {type(member).__name__}")


def unique_names(members: tuple[MemberConfig, ...]) -> tuple[MemberConfig, ...]:
    """Add numbers to equal labels that the user did not choose: the same model may appear twice."""
    chosen = [m.name for m in members if m.name]
    twice = sorted({name for name in chosen if chosen.count(name) > 1})
    check(not twice, f"two members are named {twice[:1]}: give each its own name")
    labels: list[str] = []
    for member in members:
        label, number = member.label, 2
        while label in labels or (member.name is None and label in chosen):
            label, number = f"{member.label}-{number}", number + 1
        labels.append(label)
    return tuple(replace(member, name=label) for member, label in zip(members, labels, strict=True))


ScoreName = Literal["mean_logprob", "mean_prob", "stretch"]
AggregateName = Literal["weighted_mean", "seconded_mean", "geometric_mean"]
FeedbackName = Literal["uniform", policies.Schedule]
ExitName = Literal[policies.Temperature, "never"]
SCORES: dict[ScoreName, Callable[..., ScorePolicy]] = {
    "mean_logprob": policies.MeanLogprob,
    "mean_prob": policies.MeanProb,
    "stretch": policies.Stretch,
}
PER: dict[ScoreName, tuple[str, ...]] = {
    "mean_logprob": ("text", "root", "token", "byte"),
    "mean_prob": ("token", "byte"),
    "stretch": ("token", "byte"),
}
"""The units of each score; the first is the default."""
AGGREGATES: dict[AggregateName, AggregatePolicy] = {
    "weighted_mean": policies.weighted_mean,
    "seconded_mean": policies.SecondedMean(),
    "geometric_mean": policies.geometric_mean,
}
DEMO: Final = "demo"
"""The name for both members of the demo together. It is not a model."""
_WHOLE = 4.0
"""Factor on `EnsembleConfig.early_margin` where candidates are better compared in full."""
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},
        "fast": {"first_segment_tokens": 5, "exit": "entropy"},
        "specfuse": {
            "segment_tokens": 10,
            "first_segment_tokens": None,
            "score": "mean_prob",
            "per": "token",
            "aggregate": "weighted_mean",
            "first_weights": "equal",
            "feedback": "uniform",
            "feedback_limit": None,
            "exit": "entropy",
            "exit_threshold": 0.5,
            "repetition_guard": False,
        },
        "specem": {
            "segment_tokens": 10,
            "first_segment_tokens": None,
            "score": "mean_prob",
            "per": "token",
            "aggregate": "weighted_mean",
            "first_weights": "equal",
            "feedback": "paper",
            "feedback_limit": None,
            "exit": "never",
            "repetition_guard": False,
        },
    }
)
"""Presets by name: the measured default, a faster one (docs/experiments.md), and the settings of the two papers."""


def _as_members(value: Any) -> tuple[MemberConfig, ...]:
    """The members, with names of their own. Raises `ConfigError`."""
    if isinstance(value, (str, MemberConfig)):
        model = value if isinstance(value, str) else value.model
        list_of_it = "" if model == DEMO else f"a list of models, [{model!r}], or "
        raise ConfigError(f"EnsembleConfig.members is {model!r}: give {list_of_it}demo_members()")
    check(isinstance(value, Iterable), f"EnsembleConfig.members must be a list of models, not {value!r}")
    members = tuple(map(as_member, value))
    check(len(members) > 0, "EnsembleConfig.members is empty: name at least one model")
    check(
        not any(m.server is None and m.model == DEMO for m in members) or Path(DEMO).exists(),
        f"{DEMO!r} in a list of members is no model: use members={DEMO!r} or demo_members() instead",
    )
    return unique_names(members)


def _finite(limit: Any) -> Any:
    """None for no limit: TOML has infinity in its place."""
    return None if limit == math.inf else limit


@validated
class EnsembleConfig(Settings):
    """The ensemble: its members, how a round is decided, and how many answers run at once.

    A policy is given by name or as an object with the signature of its protocol (`specfuse_shared.policies`).
    """

    members: Annotated[Sequence[MemberConfig | str], PlainValidator(_as_members)]
    """The members: `MemberConfig`s, or hub ids, folders and GGUF files."""
    segment_tokens: Annotated[int, Field(ge=1, le=512)] = 5
    """The most tokens that a member drafts in a round, in its own tokens (papers: 10)."""
    first_segment_tokens: Annotated[int | None, Field(ge=1, le=512)] = 20
    """The same for the first segment; `segment_tokens` if None. A long first segment can hold a whole short answer, but
    arrives later."""
    early_margin: float = 3.0
    """Streams the first words early. Candidates of a first segment are compared after `segment_tokens` drafted tokens,
    after twice as many, and so on. If all drafts are equal, that text is streamed. A candidate is also streamed if its
    vote is this many times every other vote. The factor is four times as high if only some of the candidates have
    ended, under a grammar, and for tool calls. Otherwise members continue drafting. 0: compare only finished drafts."""
    score: ScoreName | ScorePolicy = "stretch"
    """Turns a verifier's probabilities of a candidate into a score: "stretch" (the probability up to the
    shortest candidate's length), "mean_logprob" (geometric mean) or "mean_prob" (the papers')."""
    per: str | None = None
    """The unit of the score: "text" (the probability of the whole candidate), "root" (log p divided by √tokens),
    "token" or "byte". With "stretch", a token that crosses the border counts whole per "token" and in proportion per
    "byte". "mean_prob" and "stretch" take "token" and "byte" only. Default: "text" for "mean_logprob", else "token"."""
    aggregate: AggregateName | AggregatePolicy = "seconded_mean"
    """How the verifiers' scores become one vote: "seconded_mean" (among three or more, the score of a member without
    most of the weight for its own candidate is limited), "weighted_mean" (the papers') or "geometric_mean" (a candidate
    that one verifier finds impossible cannot win)."""
    first_weights: Literal["size", "equal"] = "size"
    """Initial weight of a member's vote: "size" (parameters^1.5 · `MemberConfig.weight`, so that small
    members do not outvote a far better one; "equal" if a size is unknown) or "equal" (`MemberConfig.weight`
    alone: the papers')."""
    feedback: FeedbackName | FeedbackPolicy = "constant"
    """How the weights learn from a round: "uniform" (not at all: SpecFuse), or the schedules of online feedback
    "constant", "sqrt_decay" and "paper" (SpecEM)."""
    feedback_rate: Annotated[float, Field(ge=0, le=100)] = 0.5
    """How fast the weights learn; with 0 they stay as they are."""
    feedback_limit: Annotated[float | None, Field(ge=1), BeforeValidator(_finite)] = 2.0
    """Limit of learning: the ratio of two members' weights grows at most by this factor over its initial value, so that
    weak members cannot outvote a strong one over many rounds. None: no limit (SpecEM). Custom policies have no
    limit."""
    exit: ExitName | ExitPolicy = "never"
    """Which members leave an answer: "never": none; "entropy" (SpecFuse) or "fixed": those whose retention, at that
    temperature, is low."""
    exit_threshold: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A member leaves when its retention falls below this share of 1/n, for n active members."""
    min_active: Annotated[int, Field(ge=1)] = 1
    """The number of members, the best ones, that `exit` always keeps (SpecFuse: 1)."""
    repetition_guard: bool = True
    """A candidate that repeats the answer loses against one that does not. If all candidates repeat it a third time, an
    answer of several members ends (`FinishReason.REPETITION`)."""
    round_seconds: Annotated[float | None, Field(gt=0)] = None
    """Deadline of a round in seconds. Late members miss the round and return once they have answered. Members that
    share a lane (a device of this machine, or a share of its CPU cores) are late together. Members behind servers, on
    Ray or on other devices are late individually. None: wait for all members."""
    round_grace: Annotated[float, Field(ge=0)] = 0.25
    """With `round_seconds`: until this many seconds after the first response, no member counts as late."""
    late_rounds: Annotated[int, Field(ge=1)] = 8
    """With `round_seconds`: a member leaves the answer, like a failed one, once it has missed this many rounds in a
    row, over at least this many times `round_seconds`."""
    reference: str | None = None
    """Name of the member whose tokenizer counts `max_tokens` and usage; the first member if unset."""
    cache_dir: str | None = None
    """Folder for converted weights; by default `$SPECFUSE_CACHE`, else `~/.cache/specfuse`."""
    max_concurrent: Annotated[int, Field(ge=1)] = 32
    """The most answers that run at once."""
    max_queue: Annotated[int, Field(ge=1)] = 1024
    """The most answers that wait."""
    when_busy: Literal["wait", "raise"] = "wait"
    """When the queue is full, further callers "wait" or "raise" `EngineBusyError`."""
    cache_bytes: Annotated[int | None, Field(ge=1)] = None
    """Bytes for caches and logits on each device; if unset, a share of the memory that is free after the weights are
    loaded. On a GPU most of it is allocated at load: set it if another engine or program needs memory there."""
    reuse_prefixes: bool = True
    """Keep caches of recent answers, in an eighth of the cache memory. A prompt with the same beginning reuses them."""
    execution: Literal["auto", "paged", "dynamic"] = "auto"
    """"paged" packs the tokens of all answers, prompts included, into forward passes over a paged cache, which is
    allocated at load. The shape of such a pass is its number of tokens, so that CUDA graphs replay it on a GPU.
    "dynamic" chooses token by token, and allocates caches as answers need them. "auto" is paged on a CUDA, ROCm or
    Apple GPU, else dynamic. Members whose paged passes are not exact stay dynamic, with a warning."""
    speculation: Switch = "auto"
    """"auto": members guess the next tokens from the prompt, the answer and each other's drafts. This saves forward
    passes and changes no answer. "off": every drafted token takes one forward pass."""
    runtime: Literal["local", "ray"] = "local"
    """"local": members are loaded here. "ray": each is an actor on a node of a Ray cluster that has its
    `MemberConfig.resources` (extra "ray"). Members behind servers stay there."""
    ray_address: str | None = None
    """Address of the cluster ("auto", "host:6379", "ray://host:10001"); Ray's default if unset."""

    def __post_init__(self) -> None:
        margin = self.early_margin
        check(margin == 0 or margin >= 1, f"EnsembleConfig.early_margin must be 0 (never) or ≥ 1, not {margin!r}")
        if self.per is not None and isinstance(self.score, str):  # a policy object has its own settings
            check_choice(f"EnsembleConfig.per with score={self.score!r}", self.per, PER[self.score])
        check(
            self.ray_address is None or self.runtime == "ray",
            'EnsembleConfig.ray_address goes with runtime="ray": set that, too',
        )
        if self.reference is not None:
            check_choice("EnsembleConfig.reference", self.reference, self.names)

    @classmethod
    def preset(cls, name: str, members: Sequence[MemberConfig | str], **settings: Any) -> Self:
        """The settings of a preset.

        Args:
            name: "default", "fast" (first words earlier), "specfuse" or "specem" (the papers').
            members: Models or `MemberConfig`s.
            **settings: Settings that override the preset's.

        Returns:
            The configuration.

        Raises:
            ConfigError: An unknown preset, or an invalid setting.

        Example:
            ```python
            from specfuse_shared import EnsembleConfig, demo_members

            config = EnsembleConfig.preset("fast", demo_members(), max_concurrent=4)
            print(config.exit)
            ```
        """
        check_choice("preset", name, tuple(PRESETS))
        return cls.from_dict({**PRESETS[name], **settings, "members": members})

    def only(self, names: Sequence[str] | None) -> Self:
        """The same ensemble with a part of its members.

        Args:
            names: Names of the members to keep; None keeps all.

        Returns:
            The configuration.

        Raises:
            ConfigError: An unknown name.

        Example:
            ```python
            from specfuse_shared import EnsembleConfig, demo_members

            config = EnsembleConfig(demo_members())
            print(config.only(config.names[:1]).names)
            ```
        """
        if names is None:
            return self
        check(not isinstance(names, str), f"members is {names!r}: give a list of names")
        for name in names:
            check_choice("a member", name, self.names)
        members = [member for member in self.member_configs if member.name in names]
        return replace(self, members=members, reference=self.reference if self.reference in names else None)

    def draft_limits(self, limit: int) -> tuple[int, ...]:
        """Numbers of drafted tokens after which candidates are compared (`early_margin`).

        Args:
            limit: The most tokens of a draft.

        Returns:
            The numbers, growing; the last one is `limit`.

        Example:
            ```python
            from specfuse_shared import EnsembleConfig

            print(EnsembleConfig(["Qwen/Qwen3-8B", "google/gemma-3-4b-it"]).draft_limits(20))
            ```
        """
        early, count = [], self.segment_tokens
        while self.early_margin and count < limit:
            early.append(count)
            count *= 2
        return (*early, limit)

    def margin(self, *, whole: bool) -> float:
        """The factor by which a vote must exceed every other one to be streamed before drafts are finished.

        Args:
            whole: Candidates are better compared in full. Then the factor is four times as high.

        Returns:
            The factor; 0: never early.

        Example:
            ```python
            from specfuse_shared import EnsembleConfig

            print(EnsembleConfig(["Qwen/Qwen3-8B", "google/gemma-3-4b-it"]).margin(whole=True))
            ```
        """
        return _WHOLE * self.early_margin if whole else self.early_margin

    @property
    def units(self) -> str | None:
        """The unit of the score: `per`, or the score's default."""
        return self.per or (PER[self.score][0] if isinstance(self.score, str) else None)

    @property
    def longest_segment(self) -> int:
        return max(self.first_segment_tokens or 0, self.segment_tokens)

    @property
    def max_candidate_tokens(self) -> int:
        """The most candidate tokens of one member in a round, if its draft differs at each of the `draft_limits`."""
        return sum(self.draft_limits(self.longest_segment))

    @property
    def member_configs(self) -> tuple[MemberConfig, ...]:
        return tuple(m for m in self.members if isinstance(m, MemberConfig))

    @property
    def names(self) -> tuple[str, ...]:
        """Member names, unique, in order."""
        return tuple(m.label for m in self.member_configs)

    @property
    def reference_name(self) -> str:
        return self.reference or self.names[0]

    def score_policy(self) -> ScorePolicy:
        """The policy that `score` names, or the one that it is.

        Returns:
            A `ScorePolicy`.

        Example:
            ```python
            from specfuse_shared import EnsembleConfig

            print(EnsembleConfig(["Qwen/Qwen3-8B", "google/gemma-3-4b-it"]).score_policy())
            ```
        """
        if not isinstance(self.score, str):
            return self.score
        return SCORES[self.score](per=self.units)

    def aggregate_policy(self) -> AggregatePolicy:
        """The policy that `aggregate` names, or the one that it is.

        Returns:
            An `AggregatePolicy`.

        Example:
            ```python
            from specfuse_shared import EnsembleConfig

            print(EnsembleConfig(["Qwen/Qwen3-8B", "google/gemma-3-4b-it"]).aggregate_policy())
            ```
        """
        return AGGREGATES[self.aggregate] if isinstance(self.aggregate, str) else self.aggregate

    def feedback_policy(self) -> FeedbackPolicy:
        """The policy that `feedback` names, or the one that it is.

        Returns:
            A `FeedbackPolicy`.

        Example:
            ```python
            from specfuse_shared import EnsembleConfig

            print(EnsembleConfig(["Qwen/Qwen3-8B", "google/gemma-3-4b-it"]).feedback_policy())
            ```
        """
        if not isinstance(self.feedback, str):
            return self.feedback
        if self.feedback == "uniform":
            return policies.uniform
        return policies.OnlineFeedback(self.feedback, self.feedback_rate)

    def exit_policy(self) -> ExitPolicy:
        """The policy that `exit` names, or the one that it is.

        Returns:
            An `ExitPolicy`.

        Example:
            ```python
            from specfuse_shared import EnsembleConfig

            print(EnsembleConfig(["Qwen/Qwen3-8B", "google/gemma-3-4b-it"]).exit_policy())
            ```
        """
        if not isinstance(self.exit, str):
            return self.exit
        if self.exit == "never" or len(self.members) <= self.min_active:
            return policies.never
        return policies.RetentionExit(self.exit, self.exit_threshold, self.min_active)


def as_config(config: EnsembleConfig | Sequence[MemberConfig | str], **settings: Any) -> EnsembleConfig:
    """The configuration given, or one made of members and settings. Raises `ConfigError`."""
    if isinstance(config, EnsembleConfig):
        check(not settings, f"settings {sorted(settings)} go with members; an EnsembleConfig has its own")
        return config
    return EnsembleConfig.from_dict({"members": config, **settings})


SMALLEST_TEMPERATURE = 1e-4
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
_Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


@validated
class SamplingParams(Settings):
    """How one answer is sampled, and when it ends."""

    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Maximum tokens of the answer, counted by the reference member; reasoning does not count."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """0 is greedy decoding; then `top_p`, `top_k`, `min_p` and `seed` have no effect."""
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    """Sample from the most probable tokens whose probabilities add up to this."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many of the most probable tokens; 0: from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out tokens whose probability is below this share of the most probable token's."""
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=100)] = 1.0
    """Above 1, tokens that occur in the prompt or the answer become less probable."""
    seed: int | None = None
    """The same seed gives the same answer. Without one, a sampled request draws a seed and reports it."""
    stop: Annotated[str | Sequence[str], tuple_of(_Stop), Field(max_length=MOST_STOPS), BeforeValidator(listed)] = ()
    """Strings that end the answer and never appear in it."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Members and the repetition guard cannot end the answer before it has this many tokens of the reference member;
    stop strings can. Cannot be combined with a grammar or tools, which decide when an answer is complete."""
    ignore_eos: bool = False
    """Members cannot end the answer: it continues to `max_tokens`, a stop string, or until all contexts are full.
    Cannot be combined with a grammar or tools."""
    grammar: InstanceOf[Grammar] | None = None
    """The grammar of the answer. The answer is complete and valid, or `UnfinishedValueError` is raised, mostly because
    `max_tokens` was too small. With tools, an answer is either calls or a value."""
    logprobs: bool = False
    """Report log p of every token of the answer, as the reference member sees it (`EnsembleResult.logprobs`)."""
    top_logprobs: TopLogprobs = 0
    """With `logprobs`: also report this many of the most probable tokens at each position, at most 20."""
    max_thinking_tokens: Annotated[int, Field(ge=1)] = 1024
    """Maximum tokens of a member's reasoning (`MemberConfig.thinking`), in its own tokens."""

    def __post_init__(self) -> None:
        check(
            self.min_tokens <= self.max_tokens,
            f"SamplingParams.min_tokens must be between 0 and {self.max_tokens}, not {self.min_tokens}",
        )
        check(
            self.logprobs or not self.top_logprobs,
            f"SamplingParams.top_logprobs is {self.top_logprobs!r}: it needs logprobs=True",
        )
        check(
            self.grammar is None or not (self.min_tokens or self.ignore_eos),
            "SamplingParams.min_tokens and ignore_eos cannot be combined with a grammar or tools, which decide when an "
            "answer is complete: leave them out",
        )

    @classmethod
    def on_top(cls, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Self:
        """Parameters of a call: its own fields over defaults.

        Args:
            defaults: Fields by name.
            given: Fields that override them. `logprobs=False` also drops `top_logprobs`.

        Returns:
            The parameters.

        Raises:
            ConfigError: An unknown field or an invalid value.

        Example:
            ```python
            from specfuse_shared import SamplingParams

            print(SamplingParams.on_top({"max_tokens": 64, "top_k": 40}, {"max_tokens": 8}).max_tokens)
            ```
        """
        none = {"top_logprobs": 0} if given.get("logprobs") is False else {}
        return cls.from_dict({**defaults, **none, **given})

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken. (Logits divided by a temperature near 0 would overflow.)"""
        return self.temperature < SMALLEST_TEMPERATURE
