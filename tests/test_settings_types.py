"""Settings of a wrong type are named with the type that was expected, wherever they are given."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from specfuse_shared import ConfigError, EnsembleConfig, Grammar, MemberConfig, OnlineFeedback, SamplingParams
from specfuse_shared.api_server.settings import ServerSettings


@pytest.mark.parametrize(
    ("made", "reported"),
    [
        (lambda: SamplingParams(max_tokens="3"), r"SamplingParams\.max_tokens must be a whole number, not '3'"),
        (lambda: SamplingParams(max_tokens=0), r"max_tokens must be at least 1, not 0"),
        (lambda: SamplingParams.from_dict({1: 2}), r"SamplingParams has no setting '1'"),
        (lambda: SamplingParams(temperature="hot"), r"temperature must be a number, not 'hot'"),
        (lambda: SamplingParams(temperature=True), r"temperature must be a number, not True"),
        (lambda: SamplingParams(seed="a"), r"seed must be a whole number or None, not 'a'"),
        (lambda: SamplingParams(logprobs=1), r"logprobs must be True or False, not 1"),
        (lambda: MemberConfig("a/b", weight="2"), r"MemberConfig\.weight must be a number, not '2'"),
        (lambda: MemberConfig("a/b", max_context="4k"), r"max_context must be a whole number or None, not '4k'"),
        (lambda: MemberConfig("a/b", trust_remote_code="no"), r"trust_remote_code must be True or False, not 'no'"),
        (lambda: MemberConfig("a/b", cache_type=8), r"MemberConfig\.cache_type is 8: use one of 'auto', 'f32', "),
        (lambda: MemberConfig("a/b", resources={"GPU": -1}), r"resources\['GPU'\] must be at least 0, not -1"),
        (lambda: MemberConfig("a", dtyp="auto"), "no setting 'dtyp': did you mean 'dtype'"),  # type: ignore[call-arg]
        (lambda: MemberConfig(modle="a/b"), "no setting 'modle': did you mean 'model'"),  # type: ignore[call-arg]
        (lambda: MemberConfig(), "MemberConfig has no model: give one"),  # type: ignore[call-arg]
        (lambda: MemberConfig(5), r"MemberConfig\.model must be a text, not 5"),
        (lambda: MemberConfig("a/b", server=["http://me:key@host"]), r"server must be a text or None, not list$"),
        (lambda: MemberConfig("ollama:"), r"MemberConfig\.model is empty"),
        (lambda: EnsembleConfig(["a/b"], segment_tokens="8"), r"segment_tokens must be a whole number, not '8'"),
        (lambda: EnsembleConfig(["a/b"], max_queue=1.5), r"max_queue must be a whole number, not 1\.5"),
        (lambda: EnsembleConfig(["a/b"], exit_threshold=2), r"exit_threshold must be at most 1, not 2"),
        (lambda: EnsembleConfig(["a/b"], score=5), r"EnsembleConfig\.score is 5: use one of 'mean_logprob', "),
        (lambda: EnsembleConfig(5), r"EnsembleConfig\.members must be a list of models, not 5"),
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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda value: SamplingParams(temperature=value), "temperature"),
        (lambda value: MemberConfig("a/b", weight=value), "weight"),
        (lambda value: EnsembleConfig(["a/b"], round_seconds=value), "round_seconds"),
        (lambda value: ServerSettings(stop_seconds=value), "stop_seconds"),
    ],
)
def test_numbers_are_finite(made: Callable[[float], Any], name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be a finite number( or None)?, not {value}"):
        made(value)


def test_infinity_is_no_limit_of_feedback() -> None:
    assert EnsembleConfig(["a/b"], feedback_limit=float("inf")).feedback_limit is None
    with pytest.raises(ConfigError, match="feedback_limit must be a finite number or None, not nan"):
        EnsembleConfig(["a/b"], feedback_limit=float("nan"))


def test_lists_tuples_and_mappings_become_immutable() -> None:
    options = {"tone": "dry"}
    member = MemberConfig("a/b", template_options=options, thinking=["<a>", "</a>"], stop_token_ids=[2, 3])
    options["tone"] = "warm"
    assert member.template_options == {"tone": "dry"}
    assert (member.thinking, member.stop_token_ids) == (("<a>", "</a>"), (2, 3))
    for table in (member.template_options, MemberConfig("a/b").resources):
        with pytest.raises(TypeError):
            table["x"] = 1
    params = [SamplingParams(stop=stop) for stop in ("END", ["END"], ("END",))]
    assert len({*params}) == 1
    with pytest.raises(FrozenInstanceError):
        params[0].seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "settings",
    [
        MemberConfig("a/b", resources={"GPU": 1}, thinking=("<a>", "</a>")),
        EnsembleConfig(["a/b", Path("c")], feedback=OnlineFeedback("constant", 0.5)),
        SamplingParams(stop="END", grammar=Grammar("choice", '["a"]')),
    ],
    ids=lambda settings: type(settings).__name__,
)
def test_settings_come_back_from_copies_and_pickles(settings: Any) -> None:
    for back in (replace(settings), copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
        assert back == settings
        assert type(back) is type(settings)
