"""The weights of members when an answer begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specfuse_shared import ConfigError, EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams
from specfuse_shared.policies import OnlineFeedback
from tests.support.against_naive import assert_equals_naive, local_members
from tests.support.fake_engine import OTHER, TALE, FakeEngine
from tests.support.fake_lane import FakeLane, scripted
from tests.support.tiny import MESSAGES, byte_level_tokenizer, pair_config, save_model, save_pair


def first_weights(sizes: dict[str, int], **settings: str) -> dict[str, float]:
    lane = FakeLane({"a": scripted(TALE), "b": scripted(OTHER)}, sizes=sizes)
    with FakeEngine(lane, **settings) as engine:
        return dict(engine.generate("help me", SamplingParams(max_tokens=9)).rounds[0].weights)


def test_four_times_the_parameters_weigh_eight_times_as_much() -> None:
    assert first_weights({"a": 100, "b": 400}) == pytest.approx({"a": 1 / 9, "b": 8 / 9})


@pytest.mark.parametrize(
    ("sizes", "settings"), [({"a": 100, "b": 400}, {"first_weights": "equal"}), ({"a": 100}, {}), ({}, {})]
)
def test_weights_are_equal_if_configured_or_if_a_size_is_unknown(
    sizes: dict[str, int], settings: dict[str, str]
) -> None:
    assert first_weights(sizes, **settings) == {"a": 0.5, "b": 0.5}


def test_two_small_members_do_not_outvote_a_large_one() -> None:
    """The small ones draft the same text, with about the probability that the large one gives its own."""

    def winner(size: int) -> str:
        texts = {"a": "red it is .", "b": "red it is .", "c": "blue as the sea ."}
        likes = {("a", " red it is"): -0.9, ("b", " red it is"): -0.95, ("c", " blue as the"): -0.8}
        likes |= dict.fromkeys((("a", " blue as the"), ("b", " blue as the"), ("c", " red it is")), -3.0)
        says = {name: scripted(text) for name, text in texts.items()}
        with FakeEngine(FakeLane(says, likes, sizes={"a": 1, "b": 1, "c": size}), speculation="off") as engine:
            return engine.generate("help me", SamplingParams(max_tokens=3)).rounds[0].winner

    assert winner(1) == "a"
    assert winner(100) == "c"


def test_a_configured_weight_multiplies_the_weight_by_size(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders: dict[str, Path] = save_pair(tmp_path_factory)
    config = pair_config(folders)
    chat, base = config.member_configs
    with EnsembleEngine(replace(config, members=[replace(chat, weight=3.0), base])) as engine:
        result = engine.generate(MESSAGES, SamplingParams(max_tokens=12))
        sizes = [member.report.parameters for member in local_members(engine)]
    shares = [3 * sizes[0] ** 1.5, sizes[1] ** 1.5]
    assert sizes[0] != sizes[1] > 0
    assert list(result.rounds[0].weights.values()) == pytest.approx([share / sum(shares) for share in shares])


@pytest.mark.parametrize("weight", [1.0, 20.0])
def test_three_members_of_which_one_outvotes_the_others_equal_the_naive_rounds(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, weight: float
) -> None:
    config = pair_config(save_pair(tmp_path_factory))
    third = save_model("qwen3", byte_level_tokenizer(), tmp_path / "third")
    heavy = MemberConfig(str(third), name="heavy", dtype="float32", weight=weight)
    with EnsembleEngine(replace(config, members=[*config.member_configs, heavy])) as engine:
        records = assert_equals_naive(
            engine.config, local_members(engine), MESSAGES, SamplingParams(max_tokens=60), rounds=5
        )
    assert (max(records[0].weights.values()) > 0.5) is (weight > 1)


class Likes(dict[tuple[str, str], float]):
    """Two weak members give only their own words a high probability, and the strong member is certain of its words."""

    def get(self, key: tuple[str, str], default: float = 0.0) -> float:  # type: ignore[override]
        member, text = key
        return -1.0 if (member == "c") is text.startswith(" c") else -3.0


def lasting_weights(**settings: object) -> dict[str, float]:
    """The weights of two weak members and a strong one after ten rounds."""
    says = {name: scripted(" ".join(f"{name}{n}" for n in range(99))) for name in "abc"}
    with FakeEngine(FakeLane(says, Likes(), sizes={"a": 1, "b": 1, "c": 4}), **settings) as engine:
        rounds = engine.generate("help me", SamplingParams(max_tokens=60)).rounds
    assert len(rounds) > 9
    return dict(rounds[-1].weights)


def test_feedback_changes_the_ratio_of_two_weights_within_its_limit() -> None:
    first = {"a": 0.1, "b": 0.1, "c": 0.8}
    assert lasting_weights(feedback="uniform") == pytest.approx(first)
    free, bound, tight = (lasting_weights(feedback_limit=limit) for limit in (None, 2.0, 1.0))

    def most(weights: dict[str, float]) -> float:
        gains = [weights[name] / first[name] for name in first]
        return max(gains) / min(gains)

    assert most(free) > 3
    assert most(bound) == pytest.approx(2)
    assert tight == pytest.approx(first)
    policy = OnlineFeedback("constant", 0.5)
    assert lasting_weights(feedback=policy) == pytest.approx(free), "a policy of the user's has no limit but its own"


@pytest.mark.parametrize("limit", [0.5, 0, -1])
def test_a_feedback_limit_below_one_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"feedback_limit must be at least 1 or None, not"):
        EnsembleConfig(["a"], feedback_limit=limit)


def test_the_papers_presets_have_equal_weights_and_unlimited_feedback() -> None:
    for preset in ("specfuse", "specem"):
        config = EnsembleConfig.preset(preset, ["a", "b"])
        assert config.first_weights == "equal"
        assert config.feedback_limit is None
    with pytest.raises(ConfigError, match="first_weights"):
        EnsembleConfig(["a"], first_weights="large")
