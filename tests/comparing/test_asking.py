"""A comparison over members of plain Python: its requests, its stored answers, and the effects of failures."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specfuse_shared import ConfigError, EngineClosedError, EnsembleConfig, SpecFuseError
from specfuse_shared.comparing import ENSEMBLE, Progress, compare
from specfuse_shared.comparing.run.asking import asked_together
from specfuse_shared.comparing.run.run_file import MARK
from specfuse_shared.members.stages import Close, Draft, DraftAlone, Fault, StageRequest
from tests.comparing.fakes import Fakes, Script, pair_of

ROWS = [{"text": f"question {n}", "references": ["the sea"]} for n in range(30)]
SEA: Script = {
    "first": {"": "the sea ."},
    "second": {f"question {n}": "the sea ." if n % 2 else "a bird ." for n in range(30)},
}


def test_every_system_answers_every_question_once() -> None:
    fakes = Fakes(SEA)
    result = compare(["first", "second"], ROWS, make_engine=fakes, timed=0)
    assert [asker.name for asker in result.askers] == ["first", "second", ENSEMBLE]
    assert {len(of_system) for of_system in result.answers.values()} == {30}
    assert result.columns["all"].means["second"] == 50.0
    assert result.columns["all"].means["first"] == 100.0
    assert result.columns["all"].best == "first"
    assert fakes.opened == 4 * 30, "two alone, and two together"
    shares = {answer.agreement for answer in result.answers[ENSEMBLE].values()}
    assert {share for share in shares if share and share[0] < 1}, "of questions that they answer differently"
    assert {answer.agreement for answer in result.answers["first"].values()} == {None}
    assert [config.names for config in fakes.engines] == [("first", "second")]


def test_timed_questions_have_an_engine_without_the_others_and_count() -> None:
    fakes = Fakes(SEA)
    result = compare(["first", "second"], ROWS, make_engine=fakes, timed=3)
    assert [config.names for config in fakes.engines] == [("first",), ("second",), ("first", "second")]
    assert fakes.opened == 4 * 30 + 4, "and one before each engine's first"
    assert {name: cost.timed for name, cost in result.costs.items()} == {"first": 3, "second": 3, ENSEMBLE: 3}
    assert result.costs["first"].seconds
    assert len(result.answers[ENSEMBLE]) == 30


def test_leave_one_out_runs_the_ensemble_without_each_member() -> None:
    script = {**SEA, "third": {"": "a bird ."}}
    result = compare(["first", "second", "third"], ROWS, make_engine=Fakes(script), timed=0, leave_one_out=True)
    names = ["first", "second", "third", ENSEMBLE, "without first", "without second", "without third"]
    assert list(result.answers) == names
    assert result.without("third") == "without third"
    assert [a.config.names for a in result.askers][-1] == ("first", "second")
    pair = compare(["first", "second"], ROWS, make_engine=Fakes(SEA), timed=0, leave_one_out=True)
    assert list(pair.answers) == ["first", "second", ENSEMBLE]
    assert pair.without("first") == "second"


def test_a_second_run_asks_nothing_and_prints_the_same_report(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    first = compare(["first", "second"], ROWS, run=run, make_engine=Fakes(SEA))
    fakes = Fakes(SEA)
    again = compare(["first", "second"], ROWS, run=run, make_engine=fakes)
    assert not fakes.engines
    assert again.answers == first.answers
    assert again.costs == first.costs
    assert str(again.verdict) == str(first.verdict)


def test_only_changed_questions_are_asked_again(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    compare(["first", "second"], ROWS[:20], run=run, make_engine=Fakes(SEA), timed=0)
    more = Fakes(SEA)
    compare(["first", "second"], ROWS, run=run, make_engine=more, timed=0)
    assert more.opened == 4 * 10
    longer = Fakes(SEA)
    compare(["first", "second"], ROWS, run=run, make_engine=longer, timed=0, max_tokens=7)
    assert longer.opened == 4 * 30
    third = Fakes({**SEA, "third": {"": "the sea ."}})
    compare(["first", "second", "third"], ROWS, run=run, make_engine=third, timed=0)
    assert third.opened == 4 * 30, "the third alone, and all three; answers of the others are stored"


def test_progress_begins_with_kept_answers_and_ends_with_all(tmp_path: Path) -> None:
    run, reported = tmp_path / "run.jsonl", list[Progress]()
    compare(["first", "second"], ROWS[:10], run=run, make_engine=Fakes(SEA), timed=0)
    compare(["first", "second"], ROWS, run=run, make_engine=Fakes(SEA), timed=1, on_progress=reported.append)
    assert (reported[0].done, reported[0].total) == (30, 90)
    assert reported[-1].done == reported[-1].total == 90
    assert [p.done for p in reported] == sorted(p.done for p in reported)


def test_a_long_list_of_requests_is_read_lazily() -> None:
    """The memory does not grow with the number of questions."""
    taken, done = 0, 0

    def todo() -> Iterator[int]:
        nonlocal taken
        for n in range(500):
            taken += 1
            assert taken - done <= 2 * 4 + 1
            yield n

    with Fakes(SEA)(EnsembleConfig(["first", "second"], max_concurrent=4)) as engine:
        for item, outcome in asked_together(engine, todo(), lambda n: engine.generate(f"question {n % 30}").text):
            assert outcome.result().strip() in ("the sea", "a bird"), item
            done += 1
    assert done == 500
    assert engine.closed


def test_closing_a_run_early_stops_its_running_requests() -> None:
    with Fakes(SEA)(EnsembleConfig(["first", "second"])) as engine:
        answers = asked_together(engine, iter(range(500)), lambda n: engine.generate(f"question {n % 30}"))
        next(answers)
        answers.close()  # type: ignore[attr-defined]
    assert engine.closed
    assert not [t for t in threading.enumerate() if t.name.startswith("specfuse-comparing")]


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


def failing(member: str, after: int) -> Fakes:
    """A member that fails in every draft after so many."""
    drafts = 0

    def disturb(request: StageRequest) -> Fault | None:
        nonlocal drafts
        if request.member != member or not isinstance(request.op, (Draft, DraftAlone)):
            return None
        drafts += 1
        return Fault("RuntimeError", "out of order") if drafts > after else None

    return Fakes(SEA, disturb=disturb)


def test_a_member_that_fails_halfway_is_left_out_and_other_answers_are_stored(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    result = compare(["first", "second"], ROWS, run=run, make_engine=failing("second", after=10), timed=0)
    assert list(result.answers) == ["first", ENSEMBLE]
    assert len(result.answers[ENSEMBLE]) == 30
    missing, faults = result.remarks
    assert missing.startswith("second has no answer to")
    assert "is left out: member 'second' failed in draft: out of order" in missing
    assert faults.startswith("second failed in ")
    assert faults.endswith("answers of the ensemble and left them")
    well = Fakes(SEA)
    again = compare(["first", "second"], ROWS, run=run, make_engine=well, timed=0)
    assert 20 <= well.opened <= 30, "failed requests are repeated, the ensemble's answers are stored"
    assert list(again.answers) == ["first", "second", ENSEMBLE]


def test_a_member_that_always_fails_does_not_prevent_timing_the_others() -> None:
    result = compare(
        ["first", "second", "third"],
        ROWS,
        make_engine=Fakes({**SEA, "third": SEA["first"]}, disturb=failing("second", after=0).disturb),
        timed=3,
    )
    assert list(result.answers) == ["first", "third", ENSEMBLE]
    assert result.costs[ENSEMBLE].timed == result.costs["first"].timed == 3


def test_questions_that_one_member_cannot_answer_are_left_out_for_all() -> None:
    result = compare(["first", "second"], ROWS, make_engine=failing("second", after=46), timed=0)
    rows = len(result.questions)
    assert 15 < rows < 30
    assert {len(of_system) for of_system in result.answers.values()} == {rows}
    assert f"{30 - rows} of 30 questions are left out" in result.remarks


def test_if_no_member_can_answer_the_reason_is_reported() -> None:
    broken = Fakes(SEA, disturb=lambda r: None if isinstance(r.op, Close) else Fault("RuntimeError", "no device"))
    with pytest.raises(SpecFuseError, match=r"too few answers to compare.*first has no answer to 30 of 30.*no device"):
        compare(["first", "second"], ROWS, make_engine=broken, timed=0)


def test_a_broken_engine_ends_the_run_and_earlier_answers_are_stored(tmp_path: Path) -> None:
    run, drafts = tmp_path / "run.jsonl", 0

    def kill(request: StageRequest) -> Fault | None:
        nonlocal drafts
        drafts += isinstance(request.op, Draft)
        return Fault("SystemExit", "killed", is_fatal=True) if drafts > 20 else None

    with pytest.raises(EngineClosedError):
        compare(["first", "second"], ROWS, run=run, make_engine=Fakes(SEA, disturb=kill), timed=1)
    retained = sum("asker" in json.loads(line) for line in run.read_text("utf-8").splitlines())
    assert retained > 0
    fakes = Fakes(SEA)
    assert len(compare(["first", "second"], ROWS, run=run, make_engine=fakes, timed=0).questions) == 30
    assert fakes.opened < 4 * 30


# ── the run's file ───────────────────────────────────────────────────────────────────────────────


def test_the_question_of_a_partial_line_is_asked_again(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    compare(["first", "second"], ROWS, run=run, make_engine=Fakes(SEA), timed=0)
    data = run.read_bytes()
    run.write_bytes(data[:-9])
    fakes = Fakes(SEA)
    compare(["first", "second"], ROWS, run=run, make_engine=fakes, timed=0)
    assert fakes.opened in (1, 2)
    assert len(run.read_bytes().splitlines()) == len(data.splitlines())
    run.write_bytes(data[:5])
    compare(["first", "second"], ROWS[:2], run=run, make_engine=Fakes(SEA), timed=0)
    assert json.loads(run.read_bytes().splitlines()[0]) == MARK


@pytest.mark.parametrize("text", ["my thesis\n", "my thesis", '{"a": 1}\n'])
def test_a_file_of_another_format_is_not_changed(tmp_path: Path, text: str) -> None:
    run = tmp_path / "thesis.txt"
    run.write_text(text)
    with pytest.raises(ConfigError, match="is not a run's file: name another one"):
        compare(["first", "second"], ROWS, run=run, make_engine=Fakes(SEA))
    assert run.read_text() == text


def test_an_unwritable_run_file_is_refused_before_any_model_is_loaded(tmp_path: Path) -> None:
    fakes = Fakes(SEA)
    with pytest.raises(ConfigError, match=r"cannot be kept in .*missing.*No such file or directory"):
        compare(["first", "second"], ROWS, run=tmp_path / "missing" / "run.jsonl", make_engine=fakes)
    assert not fakes.engines


def test_two_runs_do_not_write_the_same_file(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"

    def inner(progress: Progress) -> None:
        with pytest.raises(ConfigError, match="is being written by another run"):
            compare(["first", "second"], ROWS, run=run, make_engine=Fakes(SEA))

    compare(["first", "second"], ROWS[:1], run=run, make_engine=Fakes(SEA), timed=0, on_progress=inner)


KILLED = """
import sys, time
sys.path.insert(0, {root!r})
from tests.comparing.fakes import Fakes
from specfuse_shared.comparing import compare
script = {{"first": {{"": "the sea ."}}, "second": {{"": "a bird ."}}}}
slow = Fakes(script, disturb=lambda request: time.sleep(0.001))
rows = [{{"text": f"question {{n}}", "references": ["the sea"]}} for n in range(1000)]
compare(["first", "second"], rows, run={run!r}, make_engine=slow, timed=0)
"""


@pytest.mark.slow
def test_a_run_killed_three_times_asks_no_question_twice_and_loses_none(tmp_path: Path) -> None:
    run, root = tmp_path / "run.jsonl", str(Path(__file__).parents[2])
    sizes = [0]
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED.format(root=root, run=str(run))])
        limit = time.monotonic() + 120
        while not run.exists() or run.stat().st_size < sizes[-1] + 50_000:
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.01)
        process.kill()
        process.wait()
        sizes.append(run.stat().st_size)
    before = run.read_bytes().rpartition(b"\n")[0]
    keys = [json.loads(line)["key"] for line in before.splitlines()[1:]]
    rows = [{"text": f"question {n}", "references": ["the sea"]} for n in range(1000)]
    fakes = Fakes(pair_of("the sea .", "a bird ."))
    result = compare(["first", "second"], rows, run=run, make_engine=fakes, timed=0)
    after = [json.loads(line)["key"] for line in run.read_bytes().splitlines()[1:]]
    assert after[: len(keys)] == keys, "stored answers are unchanged"
    assert len(after) == len(set(after)), "nothing was asked twice"
    assert len(result.questions) == 1000
    assert 0 < len(keys) < 3000


def test_one_member_or_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="two members or more"):
        compare(["first"], ROWS, make_engine=Fakes(SEA))
    with pytest.raises(ConfigError, match="timed must be 0 or more"):
        compare(["first", "second"], ROWS, make_engine=Fakes(SEA), timed=-1)
