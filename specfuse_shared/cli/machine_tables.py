"""What a person sees of a machine: versions, devices, members as they were loaded, and where they would go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specfuse_shared.cli.terminal import duration, visible
from specfuse_shared.placement.plan import Plan, format_bytes
from specfuse_shared.report.formats import UNKNOWN
from specfuse_shared.types import MemberReport

if TYPE_CHECKING:
    from specfuse_shared.cli.doctor import Checkup


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
        "forwards": ", ".join(f"{count:,} {way}" for way, count in report.forwards.items() if count) or UNKNOWN,
        "stop tokens": ", ".join(map(str, report.stop_token_ids)),
        "load": duration(report.load_seconds),
    }


def show_members(reports: Iterable[MemberReport], out: Console) -> None:
    """One line a member (`--verbose`)."""
    for report in reports:
        facts = _properties(report)
        chosen = ("architecture", "parameters", "device", "dtype", "verification", "load", "backend")
        out.print(Text(visible(f"{report.name}: " + ", ".join(facts[key] for key in chosen))))


def show_plan(plan: Plan, out: Console) -> None:
    """Where each member would go and what it would take there; what is used and free of each device."""
    members = Table("member", "device", "weights as", box=None, pad_edge=False, header_style="dim")
    for heading in ("weights", "caches", "logits", "with 10 %"):
        members.add_column(heading, justify="right")
    for a in plan.assignments:
        parts = "\n".join(f"{d} {format_bytes(n)}" for d, n in a.memory.items()) if len(a.memory) > 1 else a.place
        form = a.number_format if a.quantization is None else f"{a.quantization} ({a.number_format})"
        sizes = (a.need.weights, a.need.caches, a.need.logits, a.need.total)
        place = Text(parts) if a.memory else Text("no room", style="red")
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
    out.print(f"room for {load.answers} × {load.context:,} tokens of context; nothing was loaded", style="dim")
