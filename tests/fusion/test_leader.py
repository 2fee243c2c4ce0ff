"""The choice of a leader, which drafts first: by lanes, measured seconds, and how often one draft was enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams
from specfuse_shared.fusion.participants import LaneStats, LeaderPolicy
from specfuse_shared.serving.scheduler import lane_stats_of
from specfuse_shared.serving.telemetry import Metrics
from tests.support.tiny import byte_level_tokenizer, save_model

EVEN = {"small": 1.0, "large": 1.0}
UNEVEN = {"small": 0.05, "large": 1.0}


class Side(SimpleNamespace):
    """The attributes of a member that the choice of a leader reads."""


class Sides(dict[str, Side]):
    @property
    def present(self) -> list[str]:
        return list(self)


def sides(**sizes: int) -> Any:
    return Sides((name, Side(weight=0.5, member=SimpleNamespace(info=info(size)))) for name, size in sizes.items())


def info(size: int, may_guess: bool = True) -> SimpleNamespace:
    return SimpleNamespace(may_guess=may_guess, report=SimpleNamespace(memory_bytes=size))


def lead(
    seconds: Mapping[str, float], answers: int, settled: Sequence[bool] = (), lanes: Sequence[int] = (0, 1)
) -> LeaderPolicy:
    result = LeaderPolicy(
        LaneStats(dict(zip(("small", "large"), lanes, strict=True)), lambda: answers, lambda: seconds)
    )
    for one in settled:
        result.learn(["small"], one)
    return result


PAIR = sides(small=100, large=100)


def is_worth(policy: LeaderPolicy, tokens: int = 5) -> bool:
    return policy.leader(PAIR, PAIR.present, tokens) is not None


def test_members_that_run_one_after_another_have_a_leader() -> None:
    assert is_worth(lead(EVEN, answers=1, lanes=(0, 0)))
    assert is_worth(LeaderPolicy())


def test_no_member_leads_on_a_gpu_that_reads_all_weights_in_any_case() -> None:
    def on_a_card(answers: int) -> LeaderPolicy:
        return LeaderPolicy(LaneStats({"small": 0, "large": 0}, lambda: answers, lambda: EVEN, frozenset({0})))

    assert is_worth(on_a_card(answers=1))
    assert not is_worth(on_a_card(answers=2))
    assert not is_worth(on_a_card(answers=32))
    assert is_worth(lead(EVEN, answers=32, lanes=(0, 0))), "on a processor more answers are more work"


@pytest.mark.parametrize(
    ("devices", "fast"),
    [(["cuda:0"], {0}), (["node-cpu/cuda:1"], {0}), (["cpu"], set()), (["cuda:0", "cpu"], set()), ([], set())],
)
def test_the_scheduler_knows_which_lanes_are_on_accelerators(devices: list[str], fast: set[int]) -> None:
    member: Any = SimpleNamespace(name="m", devices=dict.fromkeys(devices, 1.0))
    assembly: Any = SimpleNamespace(lanes=(SimpleNamespace(members=(member,)),))
    lane_stats = lane_stats_of(assembly, Metrics(), lambda: 7)
    assert (lane_stats.lane_of, lane_stats.answers(), lane_stats.accelerated) == ({"m": 0}, 7, fast)


def test_members_on_servers_share_a_lane_and_lead_only_where_seconds_differ() -> None:
    both: Any = [SimpleNamespace(name=name, devices={}) for name in ("small", "large")]
    lane_stats = lane_stats_of(SimpleNamespace(lanes=(SimpleNamespace(members=both),)), Metrics(), lambda: 1)
    assert lane_stats.lane_of == {"small": 0, "large": 0}, "their stages are sent there"
    for seconds, pays in ((EVEN, False), (UNEVEN, True)):
        result = LeaderPolicy(replace(lane_stats, step_seconds=lambda value=seconds: value))  # type: ignore[misc]
        for _ in range(10):
            result.learn(["small"], settled=True)
        assert is_worth(result) == pays


def test_a_single_answer_has_a_leader_if_its_drafts_finish_earlier() -> None:
    agreed = [True] * 10
    assert not is_worth(lead(EVEN, 1, agreed)), "the others would only wait"
    assert not is_worth(lead(UNEVEN, 1, [False] * 10)), "its draft is rarely sufficient"
    assert is_worth(lead(UNEVEN, 1, agreed))


def test_many_answers_have_a_leader_if_it_saves_a_fifth_of_the_work() -> None:
    assert not is_worth(lead(EVEN, 8, [True, False, False, False] * 3))
    assert is_worth(lead(EVEN, 8, [True] * 10))
    assert not is_worth(lead(EVEN, 3, [True] * 10)), "fewer than two for each lane"


def test_members_without_speculation_have_no_leader() -> None:
    equal_sides = sides(small=100, large=100)
    equal_sides["large"].member.info = info(100, may_guess=False)
    assert lead(EVEN, 1, lanes=(0, 0)).leader(equal_sides, equal_sides.present, 5) is None


@pytest.mark.parametrize(
    ("seconds", "leader"),
    [({"small": 3.0, "large": 0.5}, "large"), ({"small": 0.5, "large": 3.0}, "small"), ({"large": 0.5}, "small")],
    ids=["the large one is quick", "the small one is quick", "not all have run: by size"],
)
def test_the_quickest_member_leads(seconds: Mapping[str, float], leader: str) -> None:
    uneven = sides(small=100, large=900)
    assert lead(seconds, 1, lanes=(0, 0)).leader(uneven, uneven.present, 5) == leader


def test_the_winner_leads_among_equals() -> None:
    result = lead(EVEN, 1, lanes=(0, 0))
    for _ in range(5):
        result.learn(["large"], settled=False)
    assert result.leader(PAIR, PAIR.present, 5) == "large"


def test_seconds_of_a_forward_pass_come_from_the_metrics() -> None:
    metrics = Metrics()
    for seconds in (0.25, 0.75):
        metrics.forward("small", 1, seconds)
    assert metrics.step_seconds() == {"small": 0.5}
    metrics.forward("small", 1, 1.0, steps=8)
    assert metrics.step_seconds() == {"small": 0.2}, "a draft at a server is a step for each of its tokens"
    assert metrics.snapshot().forwards == {"small": 3}


def test_an_engine_measures_the_seconds_that_choose_its_leaders(tmp_path: Any) -> None:
    members = []
    for seed, name in enumerate(("one", "two")):
        save_model("llama", byte_level_tokenizer(), tmp_path / name, seed=seed)
        members.append(MemberConfig(str(tmp_path / name), name=name, dtype="float32"))
    with EnsembleEngine(EnsembleConfig(members)) as engine:
        engine.generate("moon", SamplingParams(max_tokens=8))
        counted = engine.metrics()
        lane_stats = engine._scheduler.lane_stats
        for name, seconds in lane_stats.step_seconds().items():
            assert seconds == pytest.approx(counted.forward_seconds[name] / counted.forwards[name])
        assert set(lane_stats.step_seconds()) == {"one", "two"}
