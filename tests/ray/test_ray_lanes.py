"""Members on the nodes of a Ray cluster give the same answers as local ones; a node can die."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import LlamaConfig

from specfuse_shared import ConfigError, EnsembleConfig, EnsembleEngine, MemberConfig, MemberLoadError, SamplingParams
from specfuse_shared.events import FinishEvent, SegmentEvent, WarningEvent
from specfuse_shared.frameworks import plain_config
from tests.support.against_naive import assert_equals_naive_with_absences, local_members
from tests.support.whole_answers import ASKED, everything

ray = pytest.importorskip("ray", reason='needs the extra "ray"')
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's sockets and files are closed by the garbage collector
]
NODES = ("left", "right")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes on this machine: one for the coordinator, and one for each member."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([".", os.environ.get("PYTHONPATH", "")]))
        small = {"object_store_memory": 80_000_000}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
        cluster.nodes_by_name = {name: cluster.add_node(num_cpus=2, resources={name: 1}, **small) for name in NODES}
        cluster.wait_for_nodes()
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def apart(tiny_engine: EnsembleEngine, cluster: Any) -> Iterator[EnsembleEngine]:
    """An engine without speculation, since the leader depends on the lanes that members share."""
    with EnsembleEngine(on_ray(replace(tiny_engine.config, speculation="off"), cluster)) as engine:
        yield engine.load()


def on_ray(config: EnsembleConfig, cluster: Any) -> EnsembleConfig:
    members = [replace(m, resources={name: 1}) for m, name in zip(config.member_configs, NODES, strict=True)]
    return replace(config, members=members, runtime="ray", ray_address=cluster.address)


def test_members_on_other_nodes_give_the_same_answers(tiny_engine: EnsembleEngine, apart: EnsembleEngine) -> None:
    with EnsembleEngine(replace(tiny_engine.config, speculation="off")) as engine:
        expected = [everything(engine.generate(*each)) for each in ASKED]
    assert [everything(apart.generate(*each)) for each in ASKED] == expected
    together = apart.generate_batch([question for question, _ in ASKED], [params for _, params in ASKED])
    assert [everything(result)["text"] for result in together] == [each["text"] for each in expected]
    assert [report.name for report in apart.describe()] == ["chat", "base"]
    assert set(apart.metrics().forwards) == {"chat", "base"}


def test_a_cancelled_answer_frees_the_caches_of_other_nodes(apart: EnsembleEngine) -> None:
    stream = apart.stream("Go on for ever", SamplingParams(max_tokens=400))
    next(event for event in stream if isinstance(event, SegmentEvent))
    stream.close()  # type: ignore[attr-defined]
    _until(lambda: not apart.metrics().running)
    assert apart.metrics().cache_bytes == 0


def test_an_unsatisfiable_node_is_reported_at_once(tiny_engine: EnsembleEngine, cluster: Any) -> None:
    config = on_ray(tiny_engine.config, cluster)
    wanting = replace(config, members=[replace(config.member_configs[0], resources={"GPU": 8})])
    with EnsembleEngine(wanting) as engine, pytest.raises(MemberLoadError, match="needs CPU 1, GPU 8, and no node"):
        engine.load()


def test_a_model_larger_than_any_node_is_refused_before_it_is_read(cluster: Any, tmp_path: Path) -> None:
    LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, dtype="bfloat16").save_pretrained(
        tmp_path
    )
    with (
        EnsembleEngine([str(tmp_path)], runtime="ray", ray_address=cluster.address) as engine,
        pytest.raises(MemberLoadError, match=r"needs CPU 1, memory [\d.]+ GiB, and no node of the Ray cluster"),
    ):
        engine.load()


def test_resources_are_the_configured_ones_or_follow_from_the_model() -> None:
    from specfuse_shared.members.ray import needs_of

    member, gib = MemberConfig("a"), 2**30
    requests: list[str] = []

    def memory_of(config: MemberConfig) -> int:
        requests.append(config.label)
        return gib

    assert needs_of(member, memory_of, cards=False) == {"CPU": 1, "memory": gib}
    assert needs_of(member, lambda config: None, cards=False) == {"CPU": 1}
    requests.clear()
    assert needs_of(member, memory_of, cards=True) == {"CPU": 1, "GPU": 1}
    assert not requests, "a model on a GPU is not checked"
    assert needs_of(replace(member, device="cpu"), memory_of, cards=True) == {"CPU": 1, "memory": gib}
    stated = replace(member, resources={"GPU": 0.5, "CPU": 4, "big": 1})
    assert needs_of(stated, memory_of, cards=False) == {"CPU": 4, "GPU": 0.5, "big": 1}
    assert needs_of(replace(member, resources={"GPU": 0}), memory_of, cards=True) == {"CPU": 1, "GPU": 0, "memory": gib}


def test_the_wait_for_an_occupied_slot_is_limited(
    tiny_engine: EnsembleEngine, apart: EnsembleEngine, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specfuse_shared.members.ray._SECONDS_TO_START", 2.0)
    with (
        EnsembleEngine(on_ray(tiny_engine.config, cluster)) as engine,
        pytest.raises(MemberLoadError, match=r"'chat' waited 2 s for CPU 1, memory .* MiB, left 1 on a node"),
    ):
        engine.load()
    assert not apart.generate("Still there?", SamplingParams(max_tokens=10)).warnings


def test_a_model_that_cannot_be_loaded_on_a_node_is_refused_as_locally(cluster: Any) -> None:
    missing = MemberConfig("/no/such/model")
    with (
        EnsembleEngine([missing], runtime="ray", ray_address=cluster.address) as engine,
        pytest.raises(MemberLoadError, match="cannot load"),
    ):
        engine.load()


def test_an_actor_that_raises_an_unpicklable_error_is_restarted(
    tiny_engine: EnsembleEngine, apart: EnsembleEngine
) -> None:
    lane = next(lane for lane in apart._assembly.lanes if lane.members[0].name == "base")
    stream = apart.stream("Go on", SamplingParams(max_tokens=200, ignore_eos=True))
    next(event for event in stream if isinstance(event, SegmentEvent))
    lane._connection.send(_poison())  # type: ignore[attr-defined]
    rest = list(stream)
    assert [event.member for event in rest if isinstance(event, WarningEvent)] == ["base"]
    assert isinstance(rest[-1], FinishEvent)
    assert not apart.closed
    _until(lambda: not apart.generate("Back?", SamplingParams(max_tokens=10)).warnings, 120)
    assert apart.lost_members == ()
    assert everything(apart.generate(*ASKED[0]))["text"] == tiny_engine.generate(*ASKED[0]).text


def _poison() -> Any:
    """A message whose reader raises an error that cannot be pickled; its classes are pickled by value."""

    class OddError(Exception):
        def __init__(self) -> None:
            super().__init__("odd")
            self.lock = threading.Lock()

    class Poison:
        def __iter__(self) -> Any:
            raise OddError

    return Poison()


def test_a_member_whose_process_is_stopped_misses_rounds_and_returns(
    tiny_engine: EnsembleEngine, apart: EnsembleEngine
) -> None:
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    usual = apart.config
    apart.config = replace(usual, round_seconds=0.5, round_grace=0.1, late_rounds=1000)
    actor = next(process for process in psutil.process_iter(["name"]) if "ray::MemberAct" in process.info["name"])
    try:
        stream = apart.stream("Go on for ever", params)
        events = (event for event in stream if isinstance(event, SegmentEvent | FinishEvent))
        next(events)
        actor.suspend()
        try:
            late = next(event for event in events if isinstance(event, SegmentEvent) and event.record.absent)
        finally:
            actor.resume()
        *_, end = events
        assert isinstance(end, FinishEvent)
        rounds = end.result.rounds
        assert len(late.record.absent) == 1
        assert len(rounds[-1].present) == 2, "the member returned"
        members = local_members(tiny_engine)
        assert_equals_naive_with_absences(apart.config, members, "Go on for ever", params, end.result)
    finally:
        apart.config = usual


def test_a_dead_node_removes_its_member_and_another_node_restores_it(
    tiny_engine: EnsembleEngine, apart: EnsembleEngine, cluster: Any
) -> None:
    questions = [f"How do the tides follow the moon, {number}?" for number in range(20)]
    params = SamplingParams(max_tokens=1000, ignore_eos=True)  # Ray needs seconds to detect it
    outputs: list[str] = ["" for _ in questions]
    ends: list[FinishEvent | None] = [None for _ in questions]
    warned: list[list[str]] = [[] for _ in questions]

    def follow(number: int) -> None:
        for event in apart.stream(questions[number], params):
            if isinstance(event, SegmentEvent):
                outputs[number] += event.text
            elif isinstance(event, WarningEvent):
                warned[number].append(event.member)
            elif isinstance(event, FinishEvent):
                ends[number] = event

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(len(questions))]
    for thread in threads:
        thread.start()
    _until(lambda: all(outputs))
    cluster.remove_node(cluster.nodes_by_name[NODES[1]], allow_graceful=False)
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "no request hangs"
    for text, end, lost in zip(outputs, ends, warned, strict=True):
        assert end is not None
        assert end.result.text == text
        assert lost == ["base"]
        assert end.result.rounds[-1].active in (("chat",), ("chat", "base")), "it may have exited in the last round"
    assert any(end is not None and end.result.rounds[-1].active == ("chat",) for end in ends)
    without = apart.generate("Still there?", SamplingParams(max_tokens=10))
    assert [fault.member for fault in without.warnings] == ["base"]
    cluster.nodes_by_name[NODES[1]] = cluster.add_node(num_cpus=2, resources={NODES[1]: 1})
    _until(lambda: not apart.generate("Back?", SamplingParams(max_tokens=10)).warnings, 120)
    result = apart.generate(*ASKED[0])
    assert everything(result)["text"] == tiny_engine.generate(*ASKED[0]).text


def test_memory_is_freed_after_close(tiny_engine: EnsembleEngine, cluster: Any) -> None:
    before = _actors()
    config = on_ray(tiny_engine.config, cluster)
    members = [replace(member, resources={}) for member in config.member_configs[:1]]
    with EnsembleEngine(replace(config, members=members)) as engine:
        assert not engine.generate(*ASKED[0]).warnings
        during = _actors()
        assert len(during - before) == 1
    _until(lambda: _actors() <= before)


def _actors() -> set[int]:
    """Processes that run a member's actor."""
    results = set()
    for process in psutil.process_iter(["cmdline"]):
        if "ray::MemberActor" in " ".join(process.info["cmdline"] or []):
            results.add(process.pid)
    return results


def _until(condition: Any, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_settings_of_the_cluster_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='goes with runtime="ray"'):
        EnsembleConfig(["a"], ray_address="auto")
    with pytest.raises(ConfigError, match="did you mean 'ray'"):
        EnsembleConfig(["a"], runtime="rays")
    with pytest.raises(ConfigError, match=r"resources\['GPU'\] must be a number, not 'one'"):
        MemberConfig("a", resources={"GPU": "one"})
    member = MemberConfig("a", resources={"GPU": 1, "memory": 2e9})
    assert MemberConfig.from_dict(plain_config(member)) == member
