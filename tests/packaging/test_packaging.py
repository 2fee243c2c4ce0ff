"""The wheel holds the three packages and their types, and each works with only the dependencies that it declares."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("specfuse_shared", "langchain_specfuse", "llamaindex_specfuse")
EXTRAS = (
    "langchain",
    "llamaindex",
    "adapters",
    "demo",
    "grammar",
    "compare",
    "bench",
    "metrics",
    "serve",
    "servers",
    "llamacpp",
    "ray",
    "quant",
    "docs",
    "test",
    "all",
)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that the source tree is unchanged."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def metadata(unpacked: Path) -> Distribution:
    (info,) = unpacked.glob("*.dist-info")
    return Distribution.at(info)


def closure(requirements: list[str], extras: frozenset[str]) -> set[str]:
    """Names of all distributions that these requirements need, from the installed metadata."""
    names: set[str] = set()
    recorded: set[tuple[str, str]] = set()
    todo = [(text, extra) for text in requirements for extra in (extras or {""})]
    while todo:
        text, extra = todo.pop()
        expected = Requirement(text)
        name = canonicalize_name(expected.name)
        if (text, extra) in recorded or (expected.marker and not expected.marker.evaluate({"extra": extra})):
            continue
        recorded.add((text, extra))
        names.add(name)
        todo += [(r, e) for r in requires(name) for e in ("", *expected.extras)]
    return names


def requires(name: str) -> list[str]:
    try:
        return distribution(name).requires or []
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed here: make setup")


def run_with_extra(metadata: Distribution, unpacked: Path, extra: str, code: str) -> str:
    """Run code with only the base requirements and one extra ("" for none); its output."""
    declared = closure(metadata.requires or [], frozenset({"", extra}))
    script = Path(__file__).with_name("only_declared.py")
    command = [sys.executable, str(script), json.dumps(sorted(declared)), str(unpacked)]
    run = subprocess.run([*command, code], capture_output=True, text=True, check=False, cwd=unpacked)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_wheel_contains_the_three_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert not [name for name in names if "test" in name.lower()]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_marked_as_typed(wheel: Path, package: str) -> None:
    assert f"{package}/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_the_wheel_declares_its_extras_command_and_licence(metadata: Distribution) -> None:
    assert set(metadata.metadata.get_all("Provides-Extra") or []) == set(EXTRAS)
    assert [(e.name, e.value) for e in metadata.entry_points] == [("specfuse-llm", "specfuse_shared.__main__:main")]
    assert metadata.metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in (metadata.read_text("licenses/LICENSE") or "")


def test_the_engine_and_its_command_work_without_any_extra(metadata: Distribution, unpacked: Path) -> None:
    code = (
        "import specfuse_shared, specfuse_shared.cli.commands, sys\n"
        "for name in specfuse_shared.__all__: getattr(specfuse_shared, name)\n"
        "print(specfuse_shared.__file__, 'langchain_core' in sys.modules, 'llama_index' in sys.modules)"
    )
    file, *frameworks = run_with_extra(metadata, unpacked, "", code).split()
    assert Path(file).is_relative_to(unpacked)
    assert frameworks == ["False", "False"]


def test_a_report_is_drawn_without_any_extra(metadata: Distribution, unpacked: Path) -> None:
    code = (
        "from specfuse_shared import EnsembleResult, FinishReason, Usage\n"
        "usage = Usage(1, 0, 'lone')\n"
        "print(EnsembleResult('', FinishReason.STOP, None, usage, (), ('lone',), None, 0.0, None, 0.0).to_html())"
    )
    html = run_with_extra(metadata, unpacked, "", code)
    assert html.startswith("<!doctype html>")
    assert "<style>\n:is(.specfuse-report" in html


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "extra"), [("langchain_specfuse", "langchain"), ("llamaindex_specfuse", "llamaindex")]
)
def test_an_adapter_imports_with_its_own_extra_alone(
    metadata: Distribution, unpacked: Path, package: str, extra: str
) -> None:
    code = f"import {package}\nfor name in {package}.__all__: getattr({package}, name)\nprint({package}.__file__)"
    assert Path(run_with_extra(metadata, unpacked, extra, code).strip()).is_relative_to(unpacked)


@pytest.mark.parametrize(
    ("package", "extra", "installed"),
    [
        ("langchain_specfuse", "langchain", ""),
        ("langchain_specfuse", "langchain", "llamaindex"),
        ("llamaindex_specfuse", "llamaindex", ""),
        ("llamaindex_specfuse", "llamaindex", "langchain"),
    ],
)
def test_an_adapter_without_its_extra_names_the_extra(
    metadata: Distribution, unpacked: Path, package: str, extra: str, installed: str
) -> None:
    code = f"try:\n    import {package}\nexcept ImportError as error:\n    print(type(error).__name__, error)"
    text = run_with_extra(metadata, unpacked, installed, code)
    assert text.startswith("MissingExtraError ")
    assert f'pip install ".[{extra}]" in a clone' in text


@pytest.mark.slow
def test_comparing_works_with_its_extra_alone_and_asks_for_it_without(metadata: Distribution, unpacked: Path) -> None:
    code = (
        "from specfuse_shared.comparing import ENSEMBLE, Answer, Comparison, own_questions\n"
        "from specfuse_shared.comparing.run.asking import systems_of\n"
        "from specfuse_shared import EnsembleConfig\n"
        "asked = own_questions().questions\n"
        "answers = {q.id: Answer('Jupiter', 'stop', 1, 1, 1.0, 1) for q in asked}\n"
        "askers = systems_of(EnsembleConfig(['a', 'b']))\n"
        "found = Comparison(asked, tuple(askers), {a.name: answers for a in askers}, {})\n"
        "print(found.verdict.outcome, len(found.to_html()) > 10_000)"
    )
    assert run_with_extra(metadata, unpacked, "compare", code).split("\n")[0] == "not seen True"
    without = "import sys; sys.stderr = sys.stdout; from specfuse_shared.cli.commands import main; main(['compare'])"
    assert 'needs the "compare" extra' in run_with_extra(metadata, unpacked, "", without)


@pytest.mark.slow
def test_the_server_works_with_its_extra_alone_and_asks_for_it_without(metadata: Distribution, unpacked: Path) -> None:
    code = (
        "import sys\n"
        "from specfuse_shared.api_server import page, run\n"
        "from importlib.resources import files\n"
        "static = files('specfuse_shared.api_server') / 'static'\n"
        "print(all((static / name).read_text() for name, _ in page.FILES.values()), 'langchain_core' in sys.modules)"
    )
    assert run_with_extra(metadata, unpacked, "serve", code).split() == ["True", "False"]
    without = "import sys; sys.stderr = sys.stdout; from specfuse_shared.cli.commands import main; main(['serve'])"
    assert 'needs the "serve" extra' in run_with_extra(metadata, unpacked, "", without)
