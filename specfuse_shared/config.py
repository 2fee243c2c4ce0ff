"""What a user may set: members, the ensemble and the sampling of one request. Frozen, validated once."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from specfuse_shared import policies
from specfuse_shared.errors import ConfigError
from specfuse_shared.policies import AggregatePolicy, ExitPolicy, FeedbackPolicy, ScorePolicy
from specfuse_shared.text.grammar import Grammar
from specfuse_shared.text.tool_calls import call_grammar, offered_tools
from specfuse_shared.types import Tool

QUANTIZATIONS = ("8bit", "4bit", "auto")
DTYPES = ("auto", "float32", "bfloat16", "float16")
PER = ("text", "root", "token", "byte")
SCORES: dict[str, Callable[[Any], ScorePolicy]] = {
    "mean_logprob": policies.MeanLogprob,
    "mean_prob": policies.MeanProb,
}
AGGREGATES: dict[str, AggregatePolicy] = {
    "weighted_mean": policies.weighted_mean,
    "seconded_mean": policies.seconded_mean,
    "trimmed_mean": policies.trimmed_mean,
    "geometric_mean": policies.geometric_mean,
    "others_mean": policies.others_mean,
    "share_mean": policies.share_mean,
    "rank_mean": policies.rank_mean,
}
FEEDBACKS = ("uniform", "constant", "sqrt_decay", "paper")
EXITS = ("entropy", "fixed", "never")
WHEN_BUSY = ("wait", "raise")
EXECUTIONS = ("auto", "static", "dynamic")
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},
        "specfuse": {
            "segment_tokens": 10,
            "first_segment_tokens": None,
            "score": "mean_prob",
            "per": "token",
            "aggregate": "weighted_mean",
            "feedback": "uniform",
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
            "feedback": "paper",
            "exit": "never",
            "repetition_guard": False,
        },
    }
)
"""Settings by name: the measured default (docs/experiments.md), and those of the two papers."""


class _Config:
    """Builds a config from a mapping and names unknown keys."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for key in data:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"{cls.__name__} has no setting {key!r}: {hint}")
        return cls(**data)


@dataclass(frozen=True, slots=True)
class MemberConfig(_Config):
    """One model of the ensemble.

    `model`: hub id, local folder, or GGUF file (a path, or a file inside a hub repository or folder with
    `gguf_file`). `weight`: relative voting weight at the start of each answer. `chat_template`: Jinja source that
    replaces the tokenizer's own; a base model without one gets `specfuse_shared.text.chat_template.PLAIN_TEMPLATE`.
    `template_options` reach the template (`enable_thinking` is False unless set). `stop_token_ids` are added to
    those of the model's configuration. `max_context` lowers the model's context limit. `adapter`: hub id or folder of
    a PEFT adapter, merged into the weights. Remote code and pickled weights are refused unless allowed here.

    `device`: "auto" (where there is room), a kind ("cuda") or a device ("cuda:1"). `dtype` "auto": half precision as
    the device has it; a processor keeps float32. `quantization`: "8bit" | "4bit" of the weights when they are loaded,
    or "auto": the widest precision that fits. `offload`: layers that fit nowhere may wait in main memory or on disk.
    """

    model: str
    name: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    adapter: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    offload: bool = False
    weight: float = 1.0
    chat_template: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    max_context: int | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", str(self.model))
        _require(bool(self.model.strip()), "MemberConfig.model is empty: give a hub id, a folder or a GGUF file")
        if self.adapter is not None:
            object.__setattr__(self, "adapter", str(self.adapter))
            _require(bool(str(self.adapter).strip()), "MemberConfig.adapter is empty: give a hub id or a folder")
        _choice("MemberConfig.dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            _choice("MemberConfig.quantization", self.quantization, QUANTIZATIONS)
        _require(
            self.quantization in (None, "auto") or not (self.offload or self.adapter),
            "MemberConfig.offload and adapter need whole numbers: leave quantization at None or 'auto'",
        )
        _require(
            math.isfinite(self.weight) and self.weight > 0,
            f"MemberConfig.weight must be a positive number, not {self.weight!r}",
        )
        _require(
            self.max_context is None or self.max_context > 0,
            f"MemberConfig.max_context must be positive, not {self.max_context!r}",
        )
        options = {"enable_thinking": False, **self.template_options}
        object.__setattr__(self, "template_options", MappingProxyType(options))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def __reduce__(self) -> tuple[Any, ...]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["template_options"] = dict(self.template_options)
        return MemberConfig.from_dict, (values,)

    @property
    def label(self) -> str:
        """The name in records and events: `name`, else the last part of `model` without its file ending."""
        return self.name or Path(self.model).name.removesuffix(".gguf") or self.model


@dataclass(frozen=True, slots=True)
class EnsembleConfig(_Config):
    """The ensemble: who answers, and how a round is decided.

    `segment_tokens`: most tokens (of its own) a member drafts a round (paper: 10); `first_segment_tokens`, if set,
    in the first one, so that the first words come sooner. `repetition_guard`: a candidate that goes in circles
    (`specfuse_shared.fusion.repetition`) loses against one that does not, and an answer of several members that can
    only say the same for the third time is over. `score`, `aggregate`, `feedback`, `exit`: a name below or an object
    with the policy's signature (`specfuse_shared.policies`).
    `reference`: the member whose tokenizer counts `max_tokens` and usage; the first one if unset.
    `cache_dir`: where converted weights are kept; see `specfuse_shared.loading.pretrained.cache_folder`.

    score: "mean_logprob" (per "text", "root", "token" or "byte") | "mean_prob" (per "token" or "byte"); the first
    `per` of each, if unset. aggregate: "seconded_mean" (among three or more, nobody carries its candidate alone) |
    "weighted_mean" | "trimmed_mean" (without the extreme votes) | "geometric_mean" | "others_mean" (nobody votes on its
    own candidate) | "share_mean" | "rank_mean". feedback: "uniform" (SpecFuse) or the schedules "constant" |
    "sqrt_decay" | "paper" of online feedback with `feedback_rate` (SpecEM). exit: "never" | "entropy" | "fixed"
    (SpecFuse), with `exit_threshold` · 1/n as the retention below which a member leaves.

    Serving: at most `max_concurrent` answers run and `max_queue` wait; beyond that a caller waits or gets an
    `EngineBusyError` (`when_busy` "wait" | "raise"). `cache_bytes`: memory for caches and logits on each device, a
    share of what is free once the weights are loaded if unset. `reuse_prefixes`: keep an eighth of it for prompts
    that begin like earlier ones.

    `execution`: "static" drafts a whole segment and verifies it in steps of fixed shape, captured as CUDA graphs where
    there is a GPU; "dynamic" goes token by token; "auto" is static on a GPU. Members that cannot stay dynamic.
    """

    members: Sequence[MemberConfig | str]
    segment_tokens: int = 5
    first_segment_tokens: int | None = None
    score: str | ScorePolicy = "mean_logprob"
    per: str | None = None
    aggregate: str | AggregatePolicy = "seconded_mean"
    feedback: str | FeedbackPolicy = "constant"
    feedback_rate: float = 0.5
    exit: str | ExitPolicy = "never"
    exit_threshold: float = 0.5
    repetition_guard: bool = True
    reference: str | None = None
    cache_dir: str | None = None
    max_concurrent: int = 32
    max_queue: int = 1024
    when_busy: str = "wait"
    cache_bytes: int | None = None
    reuse_prefixes: bool = True
    execution: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.members, (str, MemberConfig)):
            raise ConfigError("EnsembleConfig.members must be a list of members, not a single one")
        members = tuple(_as_member(m) for m in self.members)
        _require(len(members) > 0, "EnsembleConfig.members is empty: name at least one model")
        object.__setattr__(self, "members", _unique_names(members))
        for name in ("segment_tokens", "first_segment_tokens"):
            count = getattr(self, name)
            unset = count is None and name == "first_segment_tokens"
            _require(unset or 1 <= count <= 512, f"EnsembleConfig.{name} must be 1 to 512, not {count!r}")
        _choice("EnsembleConfig.per", self.units, PER)
        _require(
            self.units in ("token", "byte") or self.score != "mean_prob",
            f'EnsembleConfig.per={self.per!r} goes with score="mean_logprob": with "mean_prob" use "token" or "byte"',
        )
        for name, choices in (("score", SCORES), ("aggregate", AGGREGATES), ("feedback", FEEDBACKS), ("exit", EXITS)):
            value = getattr(self, name)
            if not callable(value):
                _choice(f"EnsembleConfig.{name}", value, tuple(choices))
        _require(self.feedback_rate >= 0, f"EnsembleConfig.feedback_rate must be ≥ 0, not {self.feedback_rate!r}")
        _require(
            0 < self.exit_threshold <= 1,
            f"EnsembleConfig.exit_threshold must be in (0, 1], not {self.exit_threshold!r}",
        )
        _choice("EnsembleConfig.when_busy", self.when_busy, WHEN_BUSY)
        _choice("EnsembleConfig.execution", self.execution, EXECUTIONS)
        _require(self.max_concurrent >= 1, f"EnsembleConfig.max_concurrent must be ≥ 1, not {self.max_concurrent!r}")
        _require(self.max_queue >= 1, f"EnsembleConfig.max_queue must be ≥ 1, not {self.max_queue!r}")
        _require(
            self.cache_bytes is None or self.cache_bytes > 0,
            f"EnsembleConfig.cache_bytes must be positive, not {self.cache_bytes!r}",
        )
        if self.reference is not None:
            _choice("EnsembleConfig.reference", self.reference, self.names)

    @classmethod
    def preset(cls, name: str, members: Sequence[MemberConfig | str], **settings: Any) -> Self:
        """The settings of a paper or the default (`PRESETS`), each of which may be replaced."""
        _choice("preset", name, tuple(PRESETS))
        return cls.from_dict({**PRESETS[name], **settings, "members": members})

    def segment_limit(self, round_index: int) -> int:
        """Most tokens of a draft in this round, which counts from 1."""
        return (self.first_segment_tokens or self.segment_tokens) if round_index == 1 else self.segment_tokens

    @property
    def units(self) -> str:
        """What `score` is per: `per`, or what suits the score."""
        return self.per or ("token" if self.score == "mean_prob" else "text")

    @property
    def longest_segment(self) -> int:
        return max(self.segment_limit(1), self.segment_tokens)

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
        return SCORES[self.score](self.units) if isinstance(self.score, str) else self.score

    def aggregate_policy(self) -> AggregatePolicy:
        return AGGREGATES[self.aggregate] if isinstance(self.aggregate, str) else self.aggregate

    def feedback_policy(self) -> FeedbackPolicy:
        if not isinstance(self.feedback, str):
            return self.feedback
        if self.feedback == "uniform":
            return policies.uniform
        return policies.OnlineFeedback(self.feedback, self.feedback_rate)  # type: ignore[arg-type]

    def exit_policy(self) -> ExitPolicy:
        if not isinstance(self.exit, str):
            return self.exit
        if self.exit == "never":
            return policies.never
        return policies.RetentionExit(self.exit, self.exit_threshold)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class SamplingParams(_Config):
    """How one request is drafted, and when it ends.

    `temperature` 0 is greedy; then `top_p`, `top_k`, `min_p` and `seed` change nothing. `max_tokens` counts
    tokens of the reference member. `stop`: strings that end the answer and never appear in it. The same `seed`
    gives the same answer; without one, a sampled request picks its own and reports it.

    `grammar` is what the answer must be: it is complete and valid, or `UnfinishedValueError` says that no room was
    left. `tools` may be called as `tool_choice` says: "auto" (the ensemble decides), "any", "none" or a tool's name;
    `parallel_tool_calls` allows several calls in one answer. With both, an answer is calls or a value.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    grammar: Grammar | None = None
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stops)
        _require(
            all(isinstance(s, str) and s for s in stops),
            "SamplingParams.stop must hold non-empty strings",
        )
        for name, low, high in (
            ("max_tokens", 1, math.inf),
            ("temperature", 0, 100),
            ("top_p", 1e-6, 1),
            ("top_k", 0, math.inf),
            ("min_p", 0, 1),
            ("repetition_penalty", 1e-3, 100),
        ):
            value = getattr(self, name)
            _require(
                isinstance(value, (int, float)) and low <= value <= high,
                f"SamplingParams.{name} must be between {low} and {high}, not {value!r}",
            )
        object.__setattr__(self, "tools", tuple(self.tools or ()))
        self._check_tools()

    def _check_tools(self) -> None:
        _require(
            self.grammar is None or isinstance(self.grammar, Grammar),
            f"SamplingParams.grammar must be a Grammar, not {type(self.grammar).__name__}",
        )
        _require(all(isinstance(t, Tool) for t in self.tools), "SamplingParams.tools must hold Tool objects")
        names = [tool.name for tool in self.tools]
        _require(len(set(names)) == len(names), f"SamplingParams.tools holds two tools of one name: {names}")
        _choice("SamplingParams.tool_choice", self.tool_choice, ("auto", "none", *(["any"] if names else []), *names))
        self.answer_grammar()  # a schema that cannot be enforced is refused here

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that `tool_choice` leaves."""
        return offered_tools(self.tools, self.tool_choice)

    def answer_grammar(self) -> Grammar | None:
        """What the whole answer must be: the grammar, and the calls that it may make instead."""
        if not self.offered_tools:
            return self.grammar
        return call_grammar(self.tools, self.tool_choice, self.parallel_tool_calls, self.grammar)

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _as_member(member: MemberConfig | str | Path) -> MemberConfig:
    if isinstance(member, MemberConfig):
        return member
    if isinstance(member, (str, Path)):
        return MemberConfig(str(member))
    raise ConfigError(f"a member must be a MemberConfig or a string, not {type(member).__name__}")


def _unique_names(members: tuple[MemberConfig, ...]) -> tuple[MemberConfig, ...]:
    """Equal labels that were not chosen by the user get a number: the same model may appear twice."""
    chosen = [m.name for m in members if m.name]
    twice = sorted({name for name in chosen if chosen.count(name) > 1})
    _require(not twice, f"two members are named {twice[:1]}: give each its own name")
    labels: list[str] = []
    for member in members:
        label, number = member.label, 2
        while label in labels or (member.name is None and label in chosen):
            label, number = f"{member.label}-{number}", number + 1
        labels.append(label)
    return tuple(_renamed(m, label) for m, label in zip(members, labels, strict=True))


def _renamed(member: MemberConfig, name: str) -> MemberConfig:
    return MemberConfig(**{**{f.name: getattr(member, f.name) for f in fields(member)}, "name": name})


def _choice(what: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(map(repr, choices))}"
        raise ConfigError(f"{what} is {value!r}: {hint}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
