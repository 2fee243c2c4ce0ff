"""Named settings to compare: each member alone, the papers' presets and ablations, settings of this project, and
other election rules than the default."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bench_members import noisy, shallow

from specfuse_shared import EnsembleConfig, MemberConfig, demo_members
from specfuse_shared.loading.gguf import cache_folder
from specfuse_shared.policies import CandidateLogprobs, Matrix, Stretch, weighted_mean

# ── election rules ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Override:
    """Votes for the draft of verifier `lead` are multiplied by `times`; another draft wins only with more votes."""

    lead: int
    times: float

    def __call__(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
        votes = weighted_mean(scores, weights, drafters)
        return [
            vote * (self.times if self.lead in authors else 1.0) for vote, authors in zip(votes, drafters, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Lottery:
    """The control: the draft of a verifier drawn by weight wins. Equal votes always draw the same verifier."""

    seed: int = 0

    def __call__(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
        lot = random.Random(repr((self.seed, scores)))
        drawn = lot.choices(range(len(weights)), weights)[0]
        return [float(drawn in authors) for authors in drafters]


@dataclass(frozen=True, slots=True)
class StretchWithoutEnd:
    """Equal stretches without the end of the turn: a candidate that ends is compared by its text alone."""

    def __call__(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        return Stretch()([_endless(candidate) for candidate in candidates])


def _endless(candidate: CandidateLogprobs) -> CandidateLogprobs:
    if not candidate.ends or len(candidate.logprobs) < 2:
        return candidate
    return replace(candidate, ends=False, logprobs=candidate.logprobs[:-1], token_bytes=candidate.token_bytes[:-1])


def mean_probability(candidate: CandidateLogprobs) -> float:
    """The mean probability of the candidate's tokens; 0 without log-probabilities."""
    return math.fsum(map(math.exp, candidate.logprobs)) / max(1, len(candidate.logprobs))


# ── variants ──────────────────────────────────────────────────────────────────────────────────────

WEAKENED = cache_folder() / "weakened"
SMOL, GEMMA = demo_members()
PUBLISHED = replace(SMOL, name="smollm2-published", adapter=None)

Members = Callable[[], Sequence[MemberConfig]]


def pair() -> Sequence[MemberConfig]:
    return SMOL, GEMMA


def published_pair() -> Sequence[MemberConfig]:
    """SmolLM2 as published, and Gemma (a base model) with the demo's adapter."""
    return PUBLISHED, GEMMA


def _weighted(smol: float = 1.0, gemma: float = 1.0) -> Sequence[MemberConfig]:
    """The pair, with weights."""
    return replace(SMOL, weight=smol), replace(GEMMA, weight=gemma)


@dataclass(frozen=True)
class Variant:
    """A preset with changed `settings`, for the `members`; `alone`: the variants with one of these members each."""

    about: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    preset: str = "default"
    members: Members = pair
    alone: tuple[str, ...] = (SMOL.label, GEMMA.label)

    @property
    def bars(self) -> tuple[str, ...]:
        """The single members whose best it is compared with; SmolLM2 also as published."""
        return BARS if set(self.alone) <= set(BARS) else self.alone


BARS = (PUBLISHED.label, SMOL.label, GEMMA.label)
"""The demo's members alone: the best of them in a column is the column's baseline."""
VARIANTS: dict[str, Variant] = {
    SMOL.label: Variant("one member", members=lambda: [SMOL]),
    GEMMA.label: Variant("one member", members=lambda: [GEMMA]),
    PUBLISHED.label: Variant("one member as published, without its adapter", members=lambda: [PUBLISHED]),
    "default": Variant("the measured default"),
    "fast": Variant("earlier first words, and members can exit", preset="fast"),
    "specfuse": Variant("the paper: mean probability, exit", preset="specfuse"),
    "specem": Variant("the paper: mean probability, online feedback", preset="specem"),
}


def _add(about: str, *, preset: str = "default", members: Members = pair, **settings: Mapping[str, Any]) -> None:
    for name, values in settings.items():
        VARIANTS[name.replace("_", "-")] = Variant(about, values, preset, members)


# the papers' ablations, on their own settings
_add(
    "ablation of a paper",
    preset="specfuse",
    specfuse_one_round={"segment_tokens": 160, "exit": "never"},
    specfuse_no_exit={"exit": "never"},
    specfuse_fixed={"exit": "fixed"},
    **{f"specfuse_{n}": {"segment_tokens": n} for n in (2, 5, 20, 40)},
)
_add("ablation of a paper", preset="specem", specem_no_feedback={"feedback": "uniform"})

_add(
    "one change from the default",
    default_whole={"score": "mean_logprob", "per": "text"},
    default_early_0={"early_margin": 0},
    default_early_8={"early_margin": 8},
    default_no_end={"score": StretchWithoutEnd()},
    default_no_limit={"feedback_limit": None},
    default_exit={"exit": "entropy"},
    default_exit_two={"exit": "entropy", "min_active": 2},
    default_sqrt_decay={"feedback": "sqrt_decay"},
)

# a lead, and the control without a vote
_add(
    "another election rule",
    default_geometric={"aggregate": "geometric_mean"},
    default_lottery={"aggregate": Lottery(), "early_margin": 0},
    **{f"default_smol_leads_{times:g}": {"aggregate": Override(0, times)} for times in (1.5, 2, 4)},
    **{f"default_gemma_leads_{times:g}": {"aggregate": Override(1, times)} for times in (1.5, 2, 4)},
)


# candidates compared over equal stretches; all other settings are the default's
STRETCH = {"score": "stretch"}
_add(
    "equal stretches",
    stretch=STRETCH,
    stretch_part={**STRETCH, "per": "byte"},
    stretch_geometric={**STRETCH, "aggregate": "geometric_mean"},
    stretch_uniform={**STRETCH, "feedback": "uniform"},
    stretch_sqrt_decay={**STRETCH, "feedback": "sqrt_decay"},
    stretch_exit={**STRETCH, "exit": "entropy"},
    stretch_late_exit={**STRETCH, "exit": "entropy", "exit_threshold": 0.25},
    stretch_fixed={**STRETCH, "exit": "fixed"},
    stretch_no_guard={**STRETCH, "repetition_guard": False},
    stretch_one_round={**STRETCH, "segment_tokens": 160, "first_segment_tokens": None},
    stretch_5_10={**STRETCH, "first_segment_tokens": 5, "segment_tokens": 10},
    stretch_5_20={**STRETCH, "first_segment_tokens": 5, "segment_tokens": 20},
    stretch_10_20={**STRETCH, "first_segment_tokens": 10, "segment_tokens": 20},
    **{f"stretch_20_{n}": {**STRETCH, "first_segment_tokens": 20, "segment_tokens": n} for n in (2, 3, 8, 10)},
    **{
        f"stretch_{n}": {**STRETCH, "first_segment_tokens": n, "segment_tokens": n}
        for n in (2, 3, 5, 8, 10, 16, 20, 32)
    },
)
for _weight in (1.5, 2.0):
    VARIANTS[f"default-smol-{_weight:g}"] = Variant(
        "a larger weight of SmolLM2", members=partial(_weighted, smol=_weight)
    )
for _name in ("default", "specfuse", *(name for name in VARIANTS if name.split("-")[0] == "stretch")):
    VARIANTS[f"{_name}-published"] = replace(
        VARIANTS[_name],
        about=f"{VARIANTS[_name].about}; SmolLM2 as published",
        members=published_pair,
        alone=(PUBLISHED.label, GEMMA.label),
    )


WEAK: dict[str, tuple[str, Members]] = {
    "babbler": ("with a member that produces noise", lambda: [noisy(SMOL, 0.6, WEAKENED)]),
    "repeater": ("with a member that repeats itself", lambda: [shallow(SMOL, 4, WEAKENED)]),
    "cross-scale": (
        "with two much smaller members",
        lambda: [shallow(SMOL, 20, WEAKENED), noisy(GEMMA, 0.3, WEAKENED)],
    ),
}


def _pair_and(weak: Members) -> Sequence[MemberConfig]:
    return [*pair(), *weak()]


for _preset in ("default", "specfuse", "specem"):
    for _name, (_about, _weak) in WEAK.items():
        VARIANTS[f"{_preset}-{_name}"] = Variant(_about, {}, _preset, partial(_pair_and, _weak))
for _name, (_about, _weak) in WEAK.items():
    VARIANTS[f"stretch-{_name}"] = Variant(_about, STRETCH, members=partial(_pair_and, _weak))


def with_further(files: Sequence[str]) -> None:
    """Add variants with further members: each alone, and each ensemble of them and the demo's two, as `a+b+c`."""
    further = [MemberConfig(file) for file in files]
    for member in further:
        VARIANTS[member.label] = Variant("one further member", members=partial(list, [member]), alone=(member.label,))
    candidates = [SMOL, GEMMA, *further]
    for size in range(2, len(candidates) + 1):
        for members in itertools.combinations(candidates, size):
            labels = tuple(member.label for member in members)
            if not set(labels) <= set(BARS):
                VARIANTS["+".join(labels)] = Variant(
                    "the default with further members", members=partial(list, members), alone=labels
                )


def ensemble(name: str, together: int) -> EnsembleConfig:
    """The configuration of a variant."""
    variant = VARIANTS[name]
    settings = {"max_concurrent": together, "reuse_prefixes": False, **variant.settings}
    WEAKENED.mkdir(parents=True, exist_ok=True)
    return EnsembleConfig.preset(variant.preset, variant.members(), **settings)
