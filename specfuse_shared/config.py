"""What a user may set of members and of their ensemble. Frozen, validated once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from specfuse_shared import policies
from specfuse_shared.errors import ConfigError
from specfuse_shared.policies import AggregatePolicy, ExitPolicy, FeedbackPolicy, ScorePolicy
from specfuse_shared.validation import Settings, check, check_choice

QUANTIZATIONS = ("8bit", "4bit", "auto")
DTYPES = ("auto", "float32", "bfloat16", "float16")
SCORES: dict[str, Callable[..., ScorePolicy]] = {
    "mean_logprob": policies.MeanLogprob,
    "mean_prob": policies.MeanProb,
    "stretch": policies.Stretch,
}
PER: dict[str, tuple[str, ...]] = {
    "mean_logprob": ("text", "root", "token", "byte"),
    "mean_prob": ("token", "byte"),
    "stretch": ("token", "byte"),
}
"""What each score may be per; the first, if unset."""
STRETCHES = ("shortest", "word")
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


@dataclass(frozen=True, slots=True)
class MemberConfig(Settings):
    """One model of the ensemble.

    `model`: hub id, local folder, or GGUF file (a path, or a file inside a hub repository or folder with
    `gguf_file`). `weight`: relative voting weight at the start of each answer. `chat_template`: Jinja source that
    replaces the tokenizer's own; a base model without one gets `specfuse_shared.text.chat_template.PLAIN_TEMPLATE`.
    `template_options` reach the template (`enable_thinking` is what `thinking` says). `thinking`: the member thinks
    before it answers, in private, between the markers of its template or the two that are given. `stop_token_ids` are
    added to those of the model's configuration. `max_context` lowers the model's context limit. `adapter`: hub id or
    folder of a PEFT adapter, merged into the weights. Remote code and pickled weights are refused unless allowed here.

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
    thinking: bool | Sequence[str] = False
    stop_token_ids: tuple[int, ...] = ()
    max_context: int | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", str(self.model))
        check(bool(self.model.strip()), "MemberConfig.model is empty: give a hub id, a folder or a GGUF file")
        if self.adapter is not None:
            object.__setattr__(self, "adapter", str(self.adapter))
            check(bool(str(self.adapter).strip()), "MemberConfig.adapter is empty: give a hub id or a folder")
        check_choice("MemberConfig.dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            check_choice("MemberConfig.quantization", self.quantization, QUANTIZATIONS)
        check(
            self.quantization in (None, "auto") or not (self.offload or self.adapter),
            "MemberConfig.offload and adapter need whole numbers: leave quantization at None or 'auto'",
        )
        check(
            math.isfinite(self.weight) and self.weight > 0,
            f"MemberConfig.weight must be a positive number, not {self.weight!r}",
        )
        check(
            self.max_context is None or self.max_context > 0,
            f"MemberConfig.max_context must be positive, not {self.max_context!r}",
        )
        thinking = self.thinking or bool(self.template_options.get("enable_thinking"))
        if not isinstance(thinking, bool):
            thinking = tuple(thinking)
            check(
                len(thinking) == 2 and all(isinstance(marker, str) and marker for marker in thinking),
                f"MemberConfig.thinking must be True, False or the two markers around thoughts, not {thinking!r}",
            )
        object.__setattr__(self, "thinking", thinking)
        options = {**self.template_options, "enable_thinking": bool(thinking)}
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
class EnsembleConfig(Settings):
    """The ensemble: who answers, and how a round is decided.

    `segment_tokens`: most tokens (of its own) a member drafts a round (paper: 10); `first_segment_tokens`, if set,
    in the first one, so that the first words come sooner. `repetition_guard`: a candidate that goes in circles
    (`specfuse_shared.fusion.repetition`) loses against one that does not, and an answer of several members that can
    only say the same for the third time is over. `score`, `aggregate`, `feedback`, `exit`: a name below or an object
    with the policy's signature (`specfuse_shared.policies`).
    `reference`: the member whose tokenizer counts `max_tokens` and usage; the first one if unset.
    `cache_dir`: where converted weights are kept; see `specfuse_shared.loading.pretrained.cache_folder`.

    score: "mean_logprob" (per "text", "root", "token" or "byte") | "mean_prob" (per "token" or "byte") | "stretch": of
    what all candidates cover, with the token across its border whole or in proportion (per "token" or "byte"), as long
    as the shortest candidate or at least a word (`stretch` "shortest" | "word"). The first `per` of each, if unset.
    aggregate: "seconded_mean" (among three or more, nobody carries its candidate alone) |
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
    stretch: str = "shortest"
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
        check(len(members) > 0, "EnsembleConfig.members is empty: name at least one model")
        object.__setattr__(self, "members", _unique_names(members))
        for name in ("segment_tokens", "first_segment_tokens"):
            count = getattr(self, name)
            unset = count is None and name == "first_segment_tokens"
            check(unset or 1 <= count <= 512, f"EnsembleConfig.{name} must be 1 to 512, not {count!r}")
        for name, choices in (("score", SCORES), ("aggregate", AGGREGATES), ("feedback", FEEDBACKS), ("exit", EXITS)):
            value = getattr(self, name)
            if not callable(value):
                check_choice(f"EnsembleConfig.{name}", value, tuple(choices))
        self._check_score()
        check(self.feedback_rate >= 0, f"EnsembleConfig.feedback_rate must be ≥ 0, not {self.feedback_rate!r}")
        check(
            0 < self.exit_threshold <= 1,
            f"EnsembleConfig.exit_threshold must be in (0, 1], not {self.exit_threshold!r}",
        )
        check_choice("EnsembleConfig.when_busy", self.when_busy, WHEN_BUSY)
        check_choice("EnsembleConfig.execution", self.execution, EXECUTIONS)
        check(self.max_concurrent >= 1, f"EnsembleConfig.max_concurrent must be ≥ 1, not {self.max_concurrent!r}")
        check(self.max_queue >= 1, f"EnsembleConfig.max_queue must be ≥ 1, not {self.max_queue!r}")
        check(
            self.cache_bytes is None or self.cache_bytes > 0,
            f"EnsembleConfig.cache_bytes must be positive, not {self.cache_bytes!r}",
        )
        if self.reference is not None:
            check_choice("EnsembleConfig.reference", self.reference, self.names)

    def _check_score(self) -> None:
        """`per` and `stretch` suit the score; an object has settings of its own."""
        if self.per is not None and isinstance(self.score, str):
            check_choice(f"EnsembleConfig.per with score={self.score!r}", self.per, PER[self.score])
        check_choice("EnsembleConfig.stretch", self.stretch, STRETCHES)
        check(
            self.score == "stretch" or self.stretch == STRETCHES[0],
            f'EnsembleConfig.stretch={self.stretch!r} goes with score="stretch", not {self.score!r}',
        )

    @classmethod
    def preset(cls, name: str, members: Sequence[MemberConfig | str], **settings: Any) -> Self:
        """The settings of a paper or the default (`PRESETS`), each of which may be replaced."""
        check_choice("preset", name, tuple(PRESETS))
        return cls.from_dict({**PRESETS[name], **settings, "members": members})

    def segment_limit(self, round_index: int) -> int:
        """Most tokens of a draft in this round, which counts from 1."""
        return (self.first_segment_tokens or self.segment_tokens) if round_index == 1 else self.segment_tokens

    @property
    def units(self) -> str | None:
        """What `score` is per: `per`, or the first that the score knows."""
        return self.per or (PER[self.score][0] if isinstance(self.score, str) else None)

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
        if not isinstance(self.score, str):
            return self.score
        more = {"least": self.stretch} if self.score == "stretch" else {}
        return SCORES[self.score](per=self.units, **more)

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


def as_config(config: EnsembleConfig | Sequence[MemberConfig | str], **settings: Any) -> EnsembleConfig:
    """A configuration, or one of these members with these settings. Raises `ConfigError`."""
    if isinstance(config, EnsembleConfig):
        check(not settings, f"settings {sorted(settings)} go with members; an EnsembleConfig has its own")
        return config
    return EnsembleConfig.from_dict({"members": config, **settings})
