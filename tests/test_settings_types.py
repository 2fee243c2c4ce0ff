"""Settings of a wrong type are named with the type that was expected, wherever they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specfuse_shared import ConfigError, EnsembleConfig, MemberConfig, SamplingParams


@pytest.mark.parametrize(
    ("made", "reported"),
    [
        (lambda: SamplingParams(max_tokens="3"), r"SamplingParams\.max_tokens must be a whole number, not '3'"),
        (lambda: SamplingParams(max_tokens=0), r"max_tokens must be at least 1, not 0"),
        (lambda: SamplingParams(temperature="hot"), r"temperature must be a number, not 'hot'"),
        (lambda: SamplingParams(temperature=True), r"temperature must be a number, not True"),
        (lambda: SamplingParams(seed="a"), r"seed must be a whole number or None, not 'a'"),
        (lambda: SamplingParams(logprobs=1), r"logprobs must be True or False, not 1"),
        (lambda: MemberConfig("a/b", weight="2"), r"MemberConfig\.weight must be a number, not '2'"),
        (lambda: MemberConfig("a/b", max_context="4k"), r"max_context must be a whole number or None, not '4k'"),
        (lambda: MemberConfig("a/b", trust_remote_code="no"), r"trust_remote_code must be True or False, not 'no'"),
        (lambda: MemberConfig("ollama:"), r"MemberConfig\.model is empty"),
        (lambda: EnsembleConfig(["a/b"], segment_tokens="8"), r"segment_tokens must be a whole number, not '8'"),
        (lambda: EnsembleConfig(["a/b"], max_queue=1.5), r"max_queue must be a whole number, not 1\.5"),
        (lambda: EnsembleConfig("a/b"), r"members is 'a/b': give a list of models, \['a/b'\]"),
        (lambda: EnsembleConfig("demo"), r"members is 'demo': give demo_members\(\)$"),
        (
            lambda: EnsembleConfig(["a/b", "demo"]),
            r"'demo' in a list of members is no model: use members='demo' or demo_m",
        ),
    ],
)
def test_a_wrong_type_is_named(made: Callable[[], Any], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        made()
