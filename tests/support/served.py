"""Members on the small model server of the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, EnsembleResult, SamplingParams, Tool
from tests.support.whole_answers import everything

QUESTIONS = ["How do the tides follow the moon?", "北京? Name 3 ships, ça va 🎉", "Letters?", "def f(x):"]
WIDE = SamplingParams(max_tokens=30)
TOOL = Tool("ring", "Ring a bell.", {"type": "object", "properties": {"times": {"type": "integer"}}})


def served(engine: EnsembleEngine, url: str, *names: str, **settings: Any) -> EnsembleConfig:
    """The same ensemble, with these members on servers."""
    members = [
        replace(member, server=url, **settings) if member.label in names else member
        for member in engine.config.member_configs
    ]
    return replace(engine.config, members=members)


def assert_same(actual: EnsembleResult | BaseException, expected: EnsembleResult | BaseException) -> None:
    """Drafts, winners, text, reasons and counts are equal; scores and log-probabilities to rounding."""
    one, second = everything(actual), everything(expected)
    for data in (one, second):
        for member in data["usage"]["members"].values():
            for retained in ("fed", "forwards", "guessed", "accepted"):
                del member[retained]  # a server's cache and batches are not comparable, and it does not speculate
        for record in data["rounds"]:
            del record["leader"]
    assert one == _about(second)


def _about(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _about(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_about(each) for each in value)
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value
