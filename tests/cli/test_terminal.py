"""The terminal's output for given events, without any model."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from specfuse_shared.cli import terminal
from specfuse_shared.events import (
    EnsembleResult,
    Event,
    ExitEvent,
    FinishEvent,
    SegmentEvent,
    StartEvent,
    ThinkingEvent,
    WarningEvent,
)
from specfuse_shared.types import (
    Candidate,
    FinishReason,
    MemberAbsence,
    MemberExit,
    MemberUsage,
    RoundRecord,
    RoundTiming,
    Usage,
)
from tests.support.explained import differing

MEMBERS = ("[red]a", "b")
LEAVING = MemberExit("b", 1, "retention", 0.125)


def record(index: int, text: str, winner: str, start: int) -> RoundRecord:
    loser = MEMBERS[1 - MEMBERS.index(winner)]
    candidates = (
        Candidate(text, (winner,), False, 2, {MEMBERS[0]: 0.9, MEMBERS[1]: 0.7}, 0.8),
        Candidate("loser\n\x1b[2J", (loser,), True, 2, {MEMBERS[0]: 0.2, MEMBERS[1]: 0.4}, 0.3),
    )
    return RoundRecord(
        index=index,
        active=MEMBERS,
        candidates=candidates,
        winner=winner,
        text=text,
        start=start,
        end=start + len(text),
        verified=True,
        weights={MEMBERS[0]: 0.5, MEMBERS[1]: 0.5},
        retention={MEMBERS[0]: 0.875, MEMBERS[1]: 0.125},
        exits=(LEAVING,) if index == 1 else (),
        timing=RoundTiming(0.25, 0.125),
    )


def answer(*segments: str) -> list[Event]:
    """A stream in which the members win alternately."""
    events: list[Event] = [StartEvent(MEMBERS, 7)]
    records, text = [], ""
    for index, segment in enumerate(segments, 1):
        records.append(record(index, segment, MEMBERS[(index - 1) % 2], len(text)))
        events.append(SegmentEvent(segment, len(text), len(text) + len(segment), records[-1]))
        text += segment
        if index == 1:
            events.append(ExitEvent(LEAVING))
    usage = Usage(prompt_tokens=7, completion_tokens=20, reference=MEMBERS[0])
    result = EnsembleResult(
        text=text,
        finish_reason=FinishReason.STOP,
        stop_sequence="\n###",
        usage=usage,
        rounds=tuple(records),
        members=MEMBERS,
        seed=None,
        prefill_seconds=0.1,
        first_segment_seconds=0.5,
        total_seconds=4.0,
    )
    return [*events, FinishEvent(result)]


def console(*, tty: bool = False) -> Console:
    color = "standard" if tty else None
    return Console(file=io.StringIO(), force_terminal=tty, color_system=color, markup=False, highlight=False, width=100)


def text_of(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def draw(*segments: str, tty: bool = False) -> tuple[str, str]:
    out, notes = console(tty=tty), console()
    terminal.show_answer(answer(*segments), out, notes)
    return text_of(out), text_of(notes)


def test_a_pipe_gets_the_answer_and_nothing_else() -> None:
    out, notes = draw("One [bold]two[/bold] :smile: ", "three\r\x1b[0m")
    assert out == "One [bold]two[/bold] :smile: three\r\x1b[0m\n"
    assert "[red]a" in notes


def test_a_terminal_gets_each_segment_in_its_authors_colour() -> None:
    out, _ = draw("One ", "two", tty=True)
    assert out == "\x1b[36mOne \x1b[0m\x1b[35mtwo\x1b[0m\n"


def test_a_terminal_never_gets_control_characters_of_a_model() -> None:
    hostile = "a\x1b]0;title\x07b\x9b2Jc\x7fd\re\x08f\x00\t\n"
    out, _ = draw(hostile, tty=True)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert r"a\x1b]0;title\x07b\x9b2Jc\x7fd\x0de\x08f\x00" in text


def test_the_answer_ends_with_exactly_one_line_end() -> None:
    assert draw("text\n")[0] == "text\n"
    assert draw("text")[0] == "text\n"
    assert draw("")[0] == ""


def test_the_legend_is_printed_first_and_exits_are_noted() -> None:
    _, notes = draw("One ")
    assert notes.splitlines() == ["● [red]a  ● b", "b left after round 1 (retention 0.125)"]


def test_a_failed_member_is_reported_after_the_answer() -> None:
    events = answer("One ")
    failed = [
        WarningEvent("b", "verify", "member 'b' failed in verify\x1b[2J and left the answer: device lost"),
        ExitEvent(MemberExit("b", 2, "fault")),
    ]
    out, notes = console(), console()
    terminal.show_answer([*events[:-1], *failed, events[-1]], out, notes)
    assert text_of(out) == "One \n"
    assert "failed in verify\\x1b[2J and left the answer: device lost" in text_of(notes)
    assert "b left after round 2 (it failed)" in text_of(notes)


def test_shown_text_stays_when_a_stream_breaks_off() -> None:
    def interrupted() -> Iterator[Event]:
        yield from answer("One ")[:2]
        raise KeyboardInterrupt

    out = console()
    with pytest.raises(KeyboardInterrupt):
        terminal.show_answer(interrupted(), out, console())
    assert text_of(out) == "One \n"


def finished(*segments: str) -> EnsembleResult:
    last = answer(*segments)[-1]
    assert isinstance(last, FinishEvent)
    return last.result


def test_the_summary_names_members_speed_and_finish_reason() -> None:
    notes = console()
    terminal.show_summary(finished("One ", "two", "three"), notes)
    lines = [line.split() for line in text_of(notes).splitlines() if line]
    assert lines[1] == ["[red]a", "2", "0.633", "0.500", "–"]
    assert lines[2] == ["b", "1", "0.467", "0.500", "1"]
    assert "first segment 0.50 s · 5.0 tokens/s (20 in 4.00 s)" in text_of(notes)
    assert r'finished: stop at "\n###"' in text_of(notes)


def test_explain_marks_the_candidate_that_repeats() -> None:
    out, result = console(), finished("One ", "two")
    winner, loser = result.rounds[0].candidates
    record = replace(result.rounds[0], candidates=(winner, replace(loser, score=0.0, repeats=True)))
    terminal.show_rounds(replace(result, rounds=(record, *result.rounds[1:])), out)
    text = text_of(out)
    assert r'"loser\n\u001b[2J" (ends) (repeats)' in text
    assert text.count("(repeats)") == 1


def test_explain_shows_every_round_with_scores_winner_weights_exits_and_timings() -> None:
    out = console()
    terminal.show_rounds(finished("One ", "two"), out)
    text = text_of(out)
    assert "round 1 · draft 0.25 s, verify 0.12 s" in text
    assert "round 2" in text
    winner = next(line for line in text.splitlines() if line.startswith("→"))
    assert winner.split() == ["→", "[red]a", '"One', '"', "0.900", "0.700", "0.800"]
    assert r'"loser\n\u001b[2J" (ends)' in text
    assert "(repeats)" not in text
    assert "weights: [red]a 0.500, b 0.500" in text
    assert "retention: [red]a 0.875, b 0.125" in text
    assert text.count("b left after round 1 (retention 0.125)") == 1


def test_differences_come_with_other_members_words_as_plain_text() -> None:
    out, weights = console(), {"[red]a": 0.75, "b": 0.25}
    drafts = {"b": "It is 41 \x1b[2Jof [bold]them"}
    terminal.show_differences(differing([("It is 42 [bold]or so", drafts), (" and on", {})], weights), out)
    header, first, second = text_of(out).strip().splitlines()
    assert header.split() == ["where", "members", "differ", "instead", "agree"]
    expected = [r"b “41 \x1b[2Jof”", "weight 0.250, score 0.250", "0.750"]
    assert re.split(r"  +", first) == ["It is 42 [bold]or so and on", *expected]
    assert re.split(r"  +", second)[:2] == ["It is 42 [bold]or so and on", "b “them…”"]
    assert "\x1b" not in text_of(out)


def test_fields_come_with_their_alternatives() -> None:
    out = console()
    answer = differing([('{"n": 42, "ok": true}', {"b": '{"n": 41, "ok": true}'})], {"a": 0.75, "b": 0.25}, over=True)
    terminal.show_differences(answer, out)
    lines = [re.split(r"  +", line.strip()) for line in text_of(out).strip().splitlines()]
    assert lines[-3:] == [
        ["field", "value", "instead", "agree"],
        ["$.n", "42", "b “41”", "weight 0.250, score 0.250", "0.750"],
        ["$.ok", "true", "1.000"],
    ]


def test_a_terminal_shows_the_most_important_differences_and_counts_the_others() -> None:
    out, words = console(), [f"w{n}" for n in range(30)]
    rounds = [(f" same {word}", {"b": f" same x{word}"}) for word in words]
    terminal.show_differences(differing(rounds, {"a": 0.75, "b": 0.25}), out)
    assert "18 less important ones are in --json and --report" in text_of(out)


def test_explain_names_the_leader_and_the_savings_of_speculation() -> None:
    out, result = console(), finished("One ", "two")
    led, plain = replace(result.rounds[0], leader="b"), result.rounds[1]
    members = {
        MEMBERS[0]: MemberUsage(7, 30, 40, 20, forwards=13, guessed=9, accepted=5),
        "b": MemberUsage(7, 30, 40, 20),
    }
    changed = replace(result, rounds=(led, plain), usage=replace(result.usage, members=members))
    terminal.show_rounds(changed, out)
    lines = text_of(out).splitlines()
    first, second = (line for line in lines if line.startswith("round "))
    assert first.endswith("· b drafted first")
    assert "drafted first" not in second
    assert lines[-2:] == ["[red]a: 0.65 forward passes per token, 5 of 9 guesses right", "b: –"]


def test_a_control_sequence_in_a_member_name_is_written_out() -> None:
    notes = console()
    terminal.show_answer([StartEvent(("m\x1b[31m",), 1), answer("One ")[-1]], console(), notes)
    assert text_of(notes) == "● m\\x1b[31m\n"


def test_reasoning_is_a_note_before_the_answer() -> None:
    start, *rest = answer("One ", "two.")
    out, notes = console(), console()
    one, second = MEMBERS
    thoughts = [ThinkingEvent(one, "Hm, "), ThinkingEvent(one, "yes."), ThinkingEvent(second, "\x1b[2JNo.")]
    terminal.show_answer([start, *thoughts, *rest], out, notes)
    assert text_of(out) == "One two.\n"
    assert f"{one} thinks:\nHm, yes.\n{second} thinks:\n\\x1b[2JNo.\n" in text_of(notes)


def test_late_members_are_named_with_their_rounds() -> None:
    out, notes, result = console(), console(), finished("One ", "two")
    late = MemberAbsence("\x1b[31mb", "verify", 5)
    changed = replace(result, rounds=(result.rounds[0], replace(result.rounds[1], absent=(late,))))
    terminal.show_rounds(changed, out)
    assert "\\x1b[31mb sat this round out: late with its verdicts" in text_of(out)
    terminal.show_summary(result, notes)
    assert "late rounds" not in text_of(notes)
    changed = replace(changed, rounds=(*result.rounds[:1], replace(result.rounds[1], absent=(MemberAbsence("b"),))))
    terminal.show_summary(changed, notes)
    assert "late rounds" in text_of(notes)
