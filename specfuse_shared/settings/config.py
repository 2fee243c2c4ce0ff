"""The settings of an ensemble. Frozen, validated once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from specfuse_shared import policies
from specfuse_shared.errors import ConfigError
from specfuse_shared.policies import AggregatePolicy, ExitPolicy, FeedbackPolicy, ScorePolicy
from specfuse_shared.settings.member_config import MemberConfig, as_member, unique_names
from specfuse_shared.validation import Settings, check, check_choice

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
"""The units of each score; the first is the default."""
AGGREGATES: dict[str, AggregatePolicy] = {
    "weighted_mean": policies.weighted_mean,
    "seconded_mean": policies.SecondedMean(),
    "geometric_mean": policies.geometric_mean,
}
FIRST_WEIGHTS = ("size", "equal")
FEEDBACKS = ("uniform", "constant", "sqrt_decay", "paper")
EXITS = ("entropy", "fixed", "never")
WHEN_BUSY = ("wait", "raise")
EXECUTIONS = ("auto", "static", "dynamic")
DEMO: Final = "demo"
"""The word that stands for all members of the demo; it is no model."""
_WHOLE = 4.0
"""How much clearer an early lead has to be where candidates are better compared as wholes."""
RUNTIMES = ("local", "ray")
SPECULATIONS = ("auto", "off")
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
"""Presets by name: the measured default, a faster one (docs/experiments.md), and those of the two papers."""


@dataclass(frozen=True, slots=True)
class EnsembleConfig(Settings):
    """The ensemble: its members, how a round is decided, and how many answers run at once.

    A policy is given by name or as an object with the signature of its protocol (`specfuse_shared.policies`).
    """

    members: Sequence[MemberConfig | str]
    """The members: `MemberConfig`s, or hub ids, folders and GGUF files."""
    segment_tokens: int = 5
    """The most tokens that a member drafts in a round, in its own tokens (papers: 10)."""
    first_segment_tokens: int | None = 20
    """The same for the first segment; `segment_tokens` if None. A long one chooses a short answer as a whole, and sends
    the first words later."""
    early_margin: float = 2.0
    """First words early: candidates of a first segment are compared when `segment_tokens` tokens of them are drafted,
    at twice as many, and so on. What all members say by then is streamed, and so is a candidate whose vote is this many
    times that of every other one: half as many at twice the tokens, down to 1. Where one candidate is over and another
    is not, under a grammar, and for calls of tools it takes four times as many, at each comparison. Else they draft on.
    0: compare only what is drafted to the end."""
    score: str | ScorePolicy = "stretch"
    """How a verifier's probabilities of a candidate become a score: "stretch" (the probability of what all candidates
    cover), "mean_logprob" (geometric mean) or "mean_prob" (the papers')."""
    per: str | None = None
    """The unit of the score: "text" (the probability of the whole candidate), "root" (log p divided by √tokens),
    "token" or "byte". With "stretch", a token that crosses the border counts whole per "token" and in proportion per
    "byte". "mean_prob" and "stretch" take "token" and "byte" only. Default: "text" for "mean_logprob", else "token"."""
    aggregate: str | AggregatePolicy = "seconded_mean"
    """How the verifiers' scores become one vote: "seconded_mean" (among three or more, a member without most of the
    votes cannot carry its own candidate alone), "weighted_mean" (the papers') or "geometric_mean" (a candidate that one
    verifier finds impossible cannot win)."""
    first_weights: str = "size"
    """What members' votes count when an answer begins: "size" (parameters^1.5 · `MemberConfig.weight`, so that small
    members do not outvote one that is far better; "equal" where a size is not known) or "equal" (`MemberConfig.weight`
    alone: the papers')."""
    feedback: str | FeedbackPolicy = "constant"
    """How the weights learn from a round: "uniform" (not at all: SpecFuse), or the schedules of online feedback
    "constant", "sqrt_decay" and "paper" (SpecEM)."""
    feedback_rate: float = 0.5
    """How fast the weights learn; with 0 they stay as they are."""
    feedback_limit: float | None = 2.0
    """How far the weights learn: the ratio of two members' votes becomes at most so many times what it was at first, so
    that many rounds of weak judges do not take a strong member's vote away. None: no limit (SpecEM). Own policies have
    none."""
    exit: str | ExitPolicy = "never"
    """Which members leave an answer: "never": none; "entropy" (SpecFuse) or "fixed": those whose retention, at that
    temperature, is low."""
    exit_threshold: float = 0.5
    """A member leaves when its retention falls below this share of 1/n, for n active members."""
    min_active: int = 1
    """The number of members, the best ones, that `exit` always keeps (SpecFuse: 1)."""
    repetition_guard: bool = True
    """A candidate that repeats the answer loses against one that does not. If all candidates repeat it a third time, an
    answer of several members ends (`FinishReason.REPETITION`)."""
    round_seconds: float | None = None
    """Seconds of a round, after which it goes on without members that are late: they sit it out, and come back once
    they have answered. Members that share a lane (a device of this machine) are late together or not at all; those
    behind servers, on Ray or on another device each by themselves. None: all members are waited for."""
    round_grace: float = 0.25
    """With `round_seconds`: seconds behind the first answer in which no member is late, however long that took."""
    late_rounds: int = 8
    """With `round_seconds`: a member that has been late for so many rounds in a row, and for as many times
    `round_seconds`, leaves the answer like one that failed."""
    reference: str | None = None
    """Name of the member whose tokenizer counts `max_tokens` and usage; the first member if unset."""
    cache_dir: str | None = None
    """Folder for converted weights; by default `$SPECFUSE_CACHE`, else `~/.cache/specfuse`."""
    max_concurrent: int = 32
    """The most answers that run at once."""
    max_queue: int = 1024
    """The most answers that wait."""
    when_busy: str = "wait"
    """When the queue is full, further callers "wait" or "raise" `EngineBusyError`."""
    cache_bytes: int | None = None
    """Bytes for caches and logits on each device; if unset, a share of what is free after the weights are loaded."""
    reuse_prefixes: bool = True
    """Keep an eighth of that memory for prompts that begin like earlier ones."""
    execution: str = "auto"
    """"static" drafts and verifies a segment in steps of fixed shape, captured as CUDA graphs on a GPU; "dynamic" goes
    token by token; "auto" is static on a GPU, else dynamic. Members that cannot run static steps stay dynamic."""
    speculation: str = "auto"
    """"auto": members guess the next tokens from prompt, answer and each other's drafts, which saves forwards and
    changes no answer. "off": every token of a draft takes a forward."""
    runtime: str = "local"
    """"local": members are loaded here. "ray": each is an actor on a node of a Ray cluster (extra "ray"), where
    has `MemberConfig.resources`. Members behind servers stay there."""
    ray_address: str | None = None
    """Address of the cluster ("auto", "host:6379", "ray://host:10001"); Ray's default if unset."""

    def __post_init__(self) -> None:
        if isinstance(self.members, (str, MemberConfig)):
            given = self.members if isinstance(self.members, str) else self.members.model
            list_of_it = "" if given == DEMO else f"a list of models, [{given!r}], or "
            raise ConfigError(f"EnsembleConfig.members is {given!r}: give {list_of_it}demo_members()")
        self.check_types()
        members = tuple(as_member(m) for m in self.members)
        check(len(members) > 0, "EnsembleConfig.members is empty: name at least one model")
        check(
            not any(m.server is None and m.model == DEMO for m in members) or Path(DEMO).exists(),
            f"{DEMO!r} in a list of members is no model: members={DEMO!r} or demo_members() are the demo's two",
        )
        object.__setattr__(self, "members", unique_names(members))
        for name in ("segment_tokens", "first_segment_tokens"):
            count = getattr(self, name)
            unset = count is None and name == "first_segment_tokens"
            check(unset or 1 <= count <= 512, f"EnsembleConfig.{name} must be 1 to 512, not {count!r}")
        margin = self.early_margin
        check(margin == 0 or margin >= 1, f"EnsembleConfig.early_margin must be 0 (never) or ≥ 1, not {margin!r}")
        for name, choices in (("score", SCORES), ("aggregate", AGGREGATES), ("feedback", FEEDBACKS), ("exit", EXITS)):
            value = getattr(self, name)
            if not callable(value):
                check_choice(f"EnsembleConfig.{name}", value, tuple(choices))
        self._check_score()
        check(self.feedback_rate >= 0, f"EnsembleConfig.feedback_rate must be ≥ 0, not {self.feedback_rate!r}")
        if self.feedback_limit == math.inf:  # as files say it
            object.__setattr__(self, "feedback_limit", None)
        limit = self.feedback_limit
        check(limit is None or limit >= 1, f"EnsembleConfig.feedback_limit must be ≥ 1 or None, not {limit!r}")
        check(
            0 < self.exit_threshold <= 1,
            f"EnsembleConfig.exit_threshold must be in (0, 1], not {self.exit_threshold!r}",
        )
        check(self.min_active >= 1, f"EnsembleConfig.min_active must be ≥ 1, not {self.min_active!r}")
        seconds = self.round_seconds
        check(
            seconds is None or 0 < seconds < math.inf,
            f"EnsembleConfig.round_seconds must be a number of seconds above 0, or None (no deadline), not {seconds!r}",
        )
        check(
            0 <= self.round_grace < math.inf,
            f"EnsembleConfig.round_grace must be a number of seconds, 0 or more, not {self.round_grace!r}",
        )
        check(self.late_rounds >= 1, f"EnsembleConfig.late_rounds must be ≥ 1, not {self.late_rounds!r}")
        check_choice("EnsembleConfig.first_weights", self.first_weights, FIRST_WEIGHTS)
        check_choice("EnsembleConfig.when_busy", self.when_busy, WHEN_BUSY)
        check_choice("EnsembleConfig.execution", self.execution, EXECUTIONS)
        check_choice("EnsembleConfig.runtime", self.runtime, RUNTIMES)
        check(
            self.ray_address is None or self.runtime == "ray",
            'EnsembleConfig.ray_address goes with runtime="ray": set that, too',
        )
        check_choice("EnsembleConfig.speculation", self.speculation, SPECULATIONS)
        check(self.max_concurrent >= 1, f"EnsembleConfig.max_concurrent must be ≥ 1, not {self.max_concurrent!r}")
        check(self.max_queue >= 1, f"EnsembleConfig.max_queue must be ≥ 1, not {self.max_queue!r}")
        check(
            self.cache_bytes is None or self.cache_bytes > 0,
            f"EnsembleConfig.cache_bytes must be positive, not {self.cache_bytes!r}",
        )
        if self.reference is not None:
            check_choice("EnsembleConfig.reference", self.reference, self.names)

    def _check_score(self) -> None:
        """`per` suits the score; an object has settings of its own."""
        if self.per is not None and isinstance(self.score, str):
            check_choice(f"EnsembleConfig.per with score={self.score!r}", self.per, PER[self.score])

    @classmethod
    def preset(cls, name: str, members: Sequence[MemberConfig | str], **settings: Any) -> Self:
        """The settings of a preset ("default", "fast", "specfuse", "specem"); `settings` replace some of them."""
        check_choice("preset", name, tuple(PRESETS))
        return cls.from_dict({**PRESETS[name], **settings, "members": members})

    def only(self, names: Sequence[str] | None) -> Self:
        """The same ensemble with these members only; all of them if None. Raises `ConfigError` for an unknown name."""
        if names is None:
            return self
        check(not isinstance(names, str), f"members is {names!r}: give a list of names")
        for name in names:
            check_choice("a member that shall take part", name, self.names)
        kept = [member for member in self.member_configs if member.name in names]
        return replace(self, members=kept, reference=self.reference if self.reference in names else None)

    def looks(self, limit: int) -> tuple[int, ...]:
        """After how many tokens of drafts of up to `limit` tokens candidates are compared; the last is the limit."""
        early, count = [], self.segment_tokens
        while self.early_margin and count < limit:
            early.append(count)
            count *= 2
        return (*early, limit)

    def margin(self, tokens: int, *, whole: bool) -> float:
        """How many times every other vote the winner's has to be after so many tokens, to be streamed then.

        `whole`: candidates are such that they are better compared as wholes. Then it has to be clearer.
        """
        if whole:
            return _WHOLE * self.early_margin
        return max(1.0, self.early_margin * self.segment_tokens / tokens)

    @property
    def units(self) -> str | None:
        """What `score` is per: `per`, or the first that the score knows."""
        return self.per or (PER[self.score][0] if isinstance(self.score, str) else None)

    @property
    def longest_segment(self) -> int:
        return max(self.first_segment_tokens or 0, self.segment_tokens)

    @property
    def most_tried(self) -> int:
        """Tokens of one member's candidates in a round, at most: where it ends differently at each look."""
        return sum(self.looks(self.longest_segment))

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
        return SCORES[self.score](per=self.units)

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
        if self.exit == "never" or len(self.members) <= self.min_active:
            return policies.never
        return policies.RetentionExit(self.exit, self.exit_threshold, self.min_active)  # type: ignore[arg-type]


def as_config(config: EnsembleConfig | Sequence[MemberConfig | str], **settings: Any) -> EnsembleConfig:
    """A configuration, or one of these members with these settings. Raises `ConfigError`."""
    if isinstance(config, EnsembleConfig):
        check(not settings, f"settings {sorted(settings)} go with members; an EnsembleConfig has its own")
        return config
    return EnsembleConfig.from_dict({"members": config, **settings})
