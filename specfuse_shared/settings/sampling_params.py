"""The settings of one answer. Frozen, validated once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from specfuse_shared.text.grammars.grammar import Grammar
from specfuse_shared.text.stops import LONGEST_STOP, MOST_STOPS
from specfuse_shared.validation import Settings, check

SMALLEST_TEMPERATURE = 1e-4
MOST_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams(Settings):
    """How one answer is sampled, and when it ends."""

    max_tokens: int = 256
    """The most tokens of the answer, counted by the reference member; thoughts do not count."""
    temperature: float = 0.0
    """0 is greedy decoding; then `top_p`, `top_k`, `min_p` and `seed` have no effect."""
    top_p: float = 1.0
    """Sample from the most probable tokens whose probabilities add up to this."""
    top_k: int = 0
    """Sample from this many of the most probable tokens; 0: from all."""
    min_p: float = 0.0
    """Leave out tokens whose probability is below this share of the most probable token's."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that occur in the prompt or the answer become less probable."""
    seed: int | None = None
    """The same seed gives the same answer. Without one, a sampled request draws a seed and reports it."""
    stop: str | Sequence[str] = ()
    """Strings that end the answer and never appear in it."""
    min_tokens: int = 0
    """Members and the repetition guard cannot end the answer before it has this many tokens of the reference member;
    stop strings can. Cannot be combined with a grammar or tools, which decide when an answer is complete."""
    ignore_eos: bool = False
    """The answer goes on to `max_tokens`, a stop string or the end of all contexts. Cannot be combined with a grammar
    or tools."""
    grammar: Grammar | None = None
    """The grammar that the answer follows. The answer is complete and valid, or `UnfinishedValueError` is raised
    because `max_tokens` left no room. With tools, an answer is calls or a value."""
    logprobs: bool = False
    """Report log p of every token of the answer, as the reference member sees it (`EnsembleResult.logprobs`)."""
    top_logprobs: int = 0
    """With `logprobs`: also report this many of the most probable tokens in each place, at most 20."""
    max_thinking_tokens: int = 1024
    """The most tokens of a member's thoughts (`MemberConfig.thinking`), in its own tokens."""

    def __post_init__(self) -> None:
        self.check_types()
        given = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        check(isinstance(given, Iterable), f"SamplingParams.stop must hold strings, not {given!r}")
        stops = tuple(given)
        object.__setattr__(self, "stop", stops)
        check(
            all(isinstance(s, str) and s for s in stops),
            "SamplingParams.stop must hold non-empty strings",
        )
        check(
            len(stops) <= MOST_STOPS and all(len(s) <= LONGEST_STOP for s in stops),
            f"SamplingParams.stop takes at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters each: "
            f"it has {len(stops)}, the longest of {max(map(len, stops), default=0)}",
        )
        for name, low, high in (
            ("max_tokens", 1, math.inf),
            ("min_tokens", 0, self.max_tokens),
            ("temperature", 0, 100),
            ("top_p", 1e-6, 1),
            ("top_k", 0, math.inf),
            ("min_p", 0, 1),
            ("repetition_penalty", 1e-3, 100),
            ("max_thinking_tokens", 1, math.inf),
            ("top_logprobs", 0, MOST_TOP_LOGPROBS),
        ):
            value = getattr(self, name)
            check(
                isinstance(value, (int, float)) and low <= value <= high,
                f"SamplingParams.{name} must be {_range(low, high)}, not {value!r}",
            )
        for name in ("max_tokens", "min_tokens", "top_k", "max_thinking_tokens", "top_logprobs"):
            value = getattr(self, name)
            check(type(value) is int, f"SamplingParams.{name} must be a whole number, not {value!r}")
        check(
            self.grammar is None or isinstance(self.grammar, Grammar),
            f"SamplingParams.grammar must be a Grammar, not {type(self.grammar).__name__}",
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
        """`defaults` overridden by `given`; a call with `logprobs=False` also drops `top_logprobs`."""
        none = {"top_logprobs": 0} if given.get("logprobs") is False else {}
        return cls.from_dict({**defaults, **none, **given})

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken. (Logits divided by a temperature near 0 would overflow.)"""
        return self.temperature < SMALLEST_TEMPERATURE


def _range(low: float, high: float) -> str:
    return f"at least {low}" if high == math.inf else f"between {low} and {high}"
