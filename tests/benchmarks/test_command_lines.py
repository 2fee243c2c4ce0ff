"""The benchmarks' command lines: each has help, and the ones in the documentation exist with their options."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
WITH_COMMANDS = ("applications", "clients", "elections", "engine", "peers", "predictions", "quality", "serving")
ALONE = {"first_hour": "main", "gpu": "main", "step_costs": "chosen_models"}
"""Programs without commands, and the functions that read their options."""
HELPERS = {"bench_members", "figures", "llama_peer", "quality_rows", "variants", "vllm_peer"}


def commands_of(program: str) -> dict[str, Any]:
    """Name → command; its class depends on Typer's version of click."""
    group: Any = typer.main.get_command(import_module(program).app)
    return dict(group.commands)


def cited() -> Iterator[tuple[str, str]]:
    """The programs in the code of the documentation and the Makefile, with their arguments."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "Makefile"]
    for file in files:
        for match in re.finditer(r"benchmarks/(\w+)\.py((?: [^`\n#]*)?)", file.read_text("utf-8")):
            yield match[1], match[2].strip()


def test_every_file_is_a_program_or_a_helper() -> None:
    assert {file.stem for file in BENCHMARKS.glob("*.py")} == {*WITH_COMMANDS, *ALONE, *HELPERS}


@pytest.mark.parametrize("program", WITH_COMMANDS)
def test_every_command_has_help(program: str) -> None:
    for name in commands_of(program):
        result = CliRunner().invoke(import_module(program).app, [name, "--help"])
        assert result.exit_code == 0, result.output
        assert "Usage:" in result.output
    assert f"benchmarks/{program}.py" in (import_module(program).__doc__ or "")


@pytest.mark.parametrize("program", ALONE)
def test_every_program_without_commands_has_help(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Callable[[], object] = getattr(import_module(program), ALONE[program])
    monkeypatch.setattr(sys, "argv", [f"{program}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        read()
    assert ended.value.code == 0
    assert f"benchmarks/{program}.py" in capsys.readouterr().out


def test_every_cited_command_line_exists() -> None:
    for program, rest in set(cited()):
        assert program in (*WITH_COMMANDS, *ALONE), f"there is no benchmarks/{program}.py"
        if program in ALONE:
            continue
        name, *words = rest.split()
        command = commands_of(program).get(name)
        assert command is not None, f"benchmarks/{program}.py has no command {name!r}"
        options = {option for parameter in command.params for option in parameter.opts}
        used = {word.strip("[]()") for word in words if word.strip("[]()").startswith("--")}
        assert used <= options, f"benchmarks/{program}.py {name} has no {used - options}"


def test_the_documentation_cites_many_programs() -> None:
    assert len({program for program, _ in cited()}) > 8
