"""Answers in a terminal: text in its members' colours, tables of rounds, a spinner while loading.

Also versions, devices, loaded members and the placement plan. Rich markup and terminal control sequences in texts of
models and in file names have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specfuse_shared.agreement import MemberWords
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
from specfuse_shared.placement.plan import Plan, format_bytes
from specfuse_shared.report.html import (
    UNKNOWN,
    absences_of,
    in_context,
    instead,
    leader_of,
    number,
    unverified,
    work_of,
)
from specfuse_shared.types import MemberExit, MemberReport, RoundRecord

if TYPE_CHECKING:
    from specfuse_shared.cli.doctor import Checkup
    from specfuse_shared.loading.progress import LoadProgress

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta", "bright_green")
PIPE_WIDTH = 120
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
Palette = Mapping[str, str]
MARKS = {"number": "bold reverse", "name": "bold reverse", "word": "underline"}
_DIFFERENCES, _FIELDS = 12, 40
"""The most that a terminal shows."""


def stdout() -> Console:
    return _console(stderr=False)


def stderr() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def visible(text: str) -> str:
    """Text with escaped control characters, except newline and tab."""
    return text.translate(CONTROLS)


def quoted(text: str) -> str:
    """Text as one line in quotes, with visible spaces and line ends."""
    return visible(json.dumps(text, ensure_ascii=False))


def palette(members: Sequence[str]) -> Palette:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(members)}


@contextmanager
def loading(console: Console) -> Iterator[Callable[[LoadProgress], None] | None]:
    """A spinner that names the member being loaded; None without a terminal."""
    if not console.is_terminal:
        yield None
        return
    with console.status("loading") as status:

        def show(progress: LoadProgress) -> None:
            line = f"{progress.index}/{progress.total} {progress.member}: {progress.stage}"
            status.update(Text(visible(line)))

        yield show


# ── ask ──────────────────────────────────────────────────────────────────────────────────────────


def show_answer(events: Iterable[Event], out: Console, notes: Console) -> EnsembleResult:
    """Write the answer as it arrives, with the legend before and the exits after it. `out` ends with a line end."""
    colours: Palette = {}
    author, last, thinker = "", "\n", ""
    exits: list[MemberExit] = []
    warnings: list[str] = []
    result: EnsembleResult | None = None
    try:
        for event in events:
            if isinstance(event, StartEvent):
                colours = palette(event.members)
                notes.print(_legend(colours))
            elif isinstance(event, ThinkingEvent):
                thinker = _write_thoughts(notes, event, thinker)
            elif isinstance(event, SegmentEvent):
                thinker = thinker and _end_thoughts(notes)
                author = event.record.winner if event.record else author
                last = event.text[-1:] or last
                _write(out, event.text, colours.get(author))
            elif isinstance(event, ExitEvent):
                exits.append(event.exit)
            elif isinstance(event, WarningEvent):
                warnings.append(event.message)
            elif isinstance(event, FinishEvent):
                result = event.result
    finally:
        if last != "\n":
            _write(out, "\n", None)
    for warning in warnings:
        notes.print(Text(visible(warning), style="yellow"))
    for leaving in exits:
        notes.print(_exit_line(leaving), style="dim")
    assert result is not None
    return result


def _write_thoughts(notes: Console, event: ThinkingEvent, thinker: str) -> str:
    """A member's reasoning as it arrives, with its name if another member's came before. Returns the author's name."""
    if event.member != thinker:
        notes.print(Text(f"{chr(10) if thinker else ''}{visible(event.member)} thinks:", style="dim bold"))
    notes.print(Text(visible(event.text), style="dim"), end="")
    return event.member


def _end_thoughts(notes: Console) -> str:
    notes.print()
    return ""


def _write(out: Console, text: str, colour: str | None) -> None:
    """Write and flush: escaped and in colour on a terminal, unchanged elsewhere."""
    if out.is_terminal:
        out.out(visible(text), style=colour, end="", highlight=False)
    else:
        out.file.write(text)
    out.file.flush()


def _legend(colours: Palette) -> Text:
    return Text("  ").join(Text(f"● {visible(name)}", style=colour) for name, colour in colours.items())


def _exit_line(leaving: MemberExit) -> str:
    whys = {"context": "its context is full", "fault": "it failed", "late": "it stayed late"}
    why = whys.get(leaving.reason, f"retention {number(leaving.retention)}")
    return visible(f"{leaving.member} left after round {leaving.round} ({why})")


def show_summary(result: EnsembleResult, notes: Console) -> None:
    """Each member's part, the speed, and the finish reason."""
    table = Table("member", box=None, pad_edge=False, header_style="dim")
    rows, colours = result.summary(), palette(result.members)
    late = any(row.late_rounds for row in rows)
    for heading in ("segments won", "mean score", "weight", "exit round", *(["late rounds"] if late else [])):
        table.add_column(heading, justify="right")
    for row in rows:
        exit_round = UNKNOWN if row.exit_round is None else str(row.exit_round)
        cells = [str(row.segments_won), number(row.mean_score), number(row.weight), exit_round]
        cells += [str(row.late_rounds)] if late else []
        table.add_row(Text(visible(row.member), style=colours[row.member]), *cells)
    notes.print()
    notes.print(table)
    notes.print("mean score: the probability that the members gave this member's drafts, from 0 to 1", style="dim")
    notes.print(_speed_line(result), style="dim")


def _speed_line(result: EnsembleResult) -> str:
    tokens, seconds = result.usage.completion_tokens, result.total_seconds
    parts = [
        f"first segment {duration(result.first_segment_seconds)}",
        f"{tokens / seconds if seconds else 0:.1f} tokens/s ({tokens} in {duration(seconds)})",
        f"finished: {result.finish_reason}",
    ]
    if result.stop_sequence is not None:
        parts[-1] += f" at {quoted(result.stop_sequence)}"
    if result.agreement is not None:
        parts.append(f"agreement {number(result.agreement.share)}")
    return " · ".join(parts)


def show_rounds(result: EnsembleResult, out: Console) -> None:
    """Every round: candidates, each verifier's scores, the winner, weights, exits, timings."""
    colours = palette(result.members)
    out.print()
    out.print(
        "A score is the probability that a member gives a draft, from 0 to 1. Compare scores within a round.",
        style="dim",
    )
    for record in result.rounds:
        out.print()
        out.print(Text(_round_line(record), style="bold"))
        out.print(_candidates(record, colours))
        for line in _round_notes(record):
            out.print(Text(line, style="dim"))
    for name, usage in result.usage.members.items():
        out.print(Text(visible(f"{name}: {work_of(usage) or UNKNOWN}"), style="dim"))


def show_differences(result: EnsembleResult, out: Console) -> None:
    """The differences between members, numbers and names first, and their agreement on fields."""
    colours, differences, fields = palette(result.members), result.differences, result.fields
    out.print()
    if not differences and not fields:
        out.print("members differ in no word of this answer, within the known text", style="dim")
        return
    if differences:
        table = Table("where members differ", "instead", box=None, pad_edge=False, header_style="dim")
        table.add_column("agree", justify="right")
        for each in differences[:_DIFFERENCES]:
            before, words, after = map(visible, in_context(result.text, each.start, each.end))
            place = Text.assemble(before, (words, MARKS[each.kind]), after)
            table.add_row(place, _others(each.others, colours), number(each.share))
        out.print(table)
        if len(differences) > _DIFFERENCES:
            out.print(f"{len(differences) - _DIFFERENCES} less important ones are in --json and --report", style="dim")
    if fields:
        table = Table("field", "value", "instead", box=None, pad_edge=False, header_style="dim")
        table.add_column("agree", justify="right")
        for field in fields[:_FIELDS]:
            path = f"{field.value + 1}: {field.path}" if fields[-1].value else field.path
            value = visible(in_context(field.text, 0, len(field.text))[1])
            table.add_row(Text(visible(path)), Text(value), _others(field.others, colours), number(field.share))
        out.print(table)
        if len(fields) > _FIELDS:
            out.print(f"{len(fields) - _FIELDS} more fields are in --json and --report", style="dim")


def _others(words: Sequence[MemberWords], colours: Palette) -> Text:
    """Each member's alternative on its own line."""
    lines = [
        Text.assemble(
            (visible(each.member), colours.get(each.member, "")),
            f" {visible(instead(each))}",
            (f"  weight {number(each.weight)}, score {number(each.score)}", "dim"),
        )
        for each in words
    ]
    return Text("\n").join(lines)


def _round_line(record: RoundRecord) -> str:
    timing = record.timing
    stages = f"draft {duration(timing.draft)}, verify {duration(timing.verify)}"
    return visible(f"round {record.index} · {stages}{unverified(record)}{leader_of(record)}")


def _candidates(record: RoundRecord, colours: Palette) -> Table:
    verifiers = list(dict.fromkeys(name for candidate in record.candidates for name in candidate.scores))
    table = Table("", "drafted by", "candidate", box=None, pad_edge=False, header_style="dim")
    table.columns[2].ratio = 1
    table.columns[2].overflow = "fold"
    for name in verifiers:
        table.add_column(Text(visible(name)), justify="right")
    table.add_column("score", justify="right")
    for candidate in record.candidates:
        won = record.winner in candidate.drafters
        names = Text(", ").join(Text(visible(name), style=colours.get(name, "")) for name in candidate.drafters)
        marks = " (ends)" * candidate.ends + " (repeats)" * candidate.repeats
        text = Text(quoted(candidate.text) + marks, style="bold" if won else "")
        scores = [number(candidate.scores.get(name)) for name in verifiers]
        table.add_row("→" if won else "", names, text, *scores, number(candidate.score))
    return table


def _round_notes(record: RoundRecord) -> Iterator[str]:
    if record.agreement is not None:
        yield f"agreement: {number(record.agreement)} of the segment"
    if record.weights:
        yield "weights: " + _pairs(record.weights)
    if record.retention:
        yield "retention: " + _pairs(record.retention)
    yield from map(visible, absences_of(record))
    yield from map(_exit_line, record.exits)


def _pairs(numbers: Mapping[str, float]) -> str:
    return visible(", ".join(f"{name} {number(value)}" for name, value in numbers.items()))


def duration(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f} s"


def show_checkup(checkup: Checkup, out: Console) -> None:
    """Versions, devices and a column for each member."""
    for name, version in checkup.versions.items():
        out.print(f"{name} {version}")
    for device in checkup.devices:
        total, free = format_bytes(device.total), format_bytes(device.free)
        out.print(f"device {device.name}: {visible(device.title)}, {total}, {free} free")
    for name, size in checkup.ollama.items():
        out.print(f"ollama {visible(name)}: {format_bytes(size)}")
    if not checkup.members:
        return
    table = Table("", box=None, pad_edge=False, header_style="bold")
    rows = [_properties(report) for report in checkup.members]
    for report in checkup.members:
        table.add_column(Text(visible(report.name)), overflow="fold")
    for key in rows[0]:
        table.add_row(Text(key, style="dim"), *(Text(visible(row[key])) for row in rows))
    out.print()
    out.print(table)


def _properties(report: MemberReport) -> dict[str, str]:
    return {
        "model": report.model,
        "architecture": report.architecture,
        "backend": report.backend + (f" ({report.why})" if report.why else ""),
        "device": report.device,
        "dtype": report.dtype,
        "quantization": report.quantization or UNKNOWN,
        "parameters": f"{report.parameters / 1e6:,.1f} M" if report.parameters else UNKNOWN,
        "memory": format_bytes(report.memory_bytes) if report.memory_bytes else UNKNOWN,
        "context": UNKNOWN if report.context is None else f"{report.context:,} tokens",
        "template": report.template,
        "attention": report.attention,
        "verification": report.verification,
        "advice": report.advice or UNKNOWN,
        "probe error": f"{report.probe_error:.1e}",
        "graphs": report.graphs,
        "layers": report.layers or UNKNOWN,
        "forward passes": ", ".join(f"{count:,} {way}" for way, count in report.forwards.items() if count) or UNKNOWN,
        "stop tokens": ", ".join(map(str, report.stop_token_ids)),
        "load": duration(report.load_seconds),
    }


def show_members(reports: Iterable[MemberReport], out: Console) -> None:
    """One line per member (`--verbose`)."""
    for report in reports:
        facts = _properties(report)
        chosen = ("architecture", "parameters", "device", "dtype", "verification", "load", "backend")
        out.print(Text(visible(f"{report.name}: " + ", ".join(facts[key] for key in chosen))))


def show_plan(plan: Plan, out: Console) -> None:
    """The planned device and memory of each member; the used and free memory of each device."""
    members = Table("member", "device", "weights as", box=None, pad_edge=False, header_style="dim")
    for heading in ("weights", "caches", "logits", "with 10 %"):
        members.add_column(heading, justify="right")
    for a in plan.assignments:
        parts = "\n".join(f"{d} {format_bytes(n)}" for d, n in a.memory.items()) if len(a.memory) > 1 else a.place
        form = a.number_format if a.quantization is None else f"{a.quantization} ({a.number_format})"
        sizes = (a.need.weights, a.need.caches, a.need.logits, a.need.total)
        place = Text(parts) if a.memory else Text("no memory", style="red")
        members.add_row(Text(visible(a.member)), place, form, *map(format_bytes, sizes))
    devices = Table("device", "", box=None, pad_edge=False, header_style="dim")
    for heading in ("free", "planned", "left"):
        devices.add_column(heading, justify="right")
    for d in plan.devices:
        used = plan.used(d.name)
        devices.add_row(
            d.name, Text(visible(d.title)), format_bytes(d.free), format_bytes(used), format_bytes(d.free - used)
        )
    out.print(members)
    out.print()
    out.print(devices)
    load = plan.workload
    out.print(f"space for {load.answers} × {load.context:,} tokens of context; nothing was loaded", style="dim")
