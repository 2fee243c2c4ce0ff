"""The README and the documentation: their Python examples run as written, over the real demo models."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_index.core
import pytest
from llama_index.core import Settings

import specfuse_shared
from docs.readme_links import with_absolute_links
from langchain_specfuse import ChatSpecFuse
from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import ConfigError, EnsembleConfig, close_idle_engines, demo_members, lease_engine
from tests.support.pages import ROOT, Example, check, examples_in, text_of
from tests.support.serving import serving

README = "README.md"
SERVER = "http://127.0.0.1:8000"
"""The address at which examples expect a server."""
PLACES = ("langchain_specfuse", "llamaindex_specfuse")
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = [page for page in DOCUMENTS if examples_in(page)]
EXAMPLES = [example.code for example in examples_in(README)]


@pytest.fixture(scope="module")
def _demo() -> Iterator[None]:
    """Keep the demo ensemble loaded, so that all examples share one engine."""
    with lease_engine(EnsembleConfig(members=demo_members())):
        yield
    close_idle_engines()


@pytest.fixture
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which examples write files, and LlamaIndex's global settings, restored afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llama_index.core, "global_tokenizer", llama_index.core.global_tokenizer)
    for name, value in vars(Settings).items():
        monkeypatch.setattr(Settings, name, value)


def run(examples: list[Example]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for example in examples:
        example.take(names)


@contextmanager
def served(examples: list[Example]) -> Iterator[list[Example]]:
    """The examples, with a server over the demo ensemble where they ask one."""
    if not any(SERVER in example.code for example in examples):
        yield examples
        return
    with lease_engine(EnsembleConfig(members=demo_members())) as lease, serving({"demo": lease.engine}) as client:
        address = str(client.base_url).rstrip("/")
        yield [replace(example, code=example.code.replace(SERVER, address)) for example in examples]


@pytest.mark.slow
@pytest.mark.usefixtures("_demo", "_surroundings")
@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_of_the_readme_runs_by_itself(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    run([Example(README, code, None)])
    assert len(capsys.readouterr().out.split()) >= 3


@pytest.mark.slow
@pytest.mark.usefixtures("_demo", "_surroundings")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LlamaIndex's agents use old pydantic
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run_one_after_another(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    with served(examples_in(page)) as examples:
        run(examples)
    assert len(capsys.readouterr().out.split()) >= 3


@pytest.mark.parametrize(
    "wrong",
    [
        "from specfuse_shared import NoSuchName",
        "import specfuse_shared.no_such_module",
        "from langchain_specfuse import ChatSpecFuse\nChatSpecFuse(members='demo', max_token=3)",
        "from specfuse_shared import MemberConfig\nMemberConfig('a/b', gpu=1)",
        "model.no_such_method()",
        "def begun(:",
    ],
)
def test_a_block_that_cannot_run_is_still_checked(wrong: str) -> None:
    right = "from specfuse_shared import MemberConfig\nMemberConfig('a/b', weight=2.0)\nmodel.conjugate()"
    check(ast.parse(f"{right}\nimport no_such\nno_such.thing(any=1)"), {"model": 1})
    with pytest.raises((AssertionError, ImportError, AttributeError, SyntaxError)):
        check(ast.parse(wrong), {"model": 1})


@pytest.mark.parametrize(("page", "kind"), [("docs/langchain.md", ChatSpecFuse), ("docs/llamaindex.md", SpecFuseLLM)])
def test_options_of_other_models_are_accepted_or_refused_as_documented(page: str, kind: Any) -> None:
    table = re.search(r"(?ms)^## Coming from .*?^\| ---.*?\n(.*?)\n\n", text_of(page))
    assert table
    for row in table[1].splitlines():
        *theirs, ours = row.strip("| ").split(" | ")
        named = re.findall(r"`(\w+)", ours)
        for option in re.findall(r"`(\w+)`", " ".join(theirs)):
            if option not in named:
                with pytest.raises(ConfigError) as refused:
                    kind(members=["no/one"], **{option: "any"})
                assert any(name in str(refused.value) for name in named), option
            elif option != "response_format":  # of a call
                assert option in kind.model_fields or option == "model"


PUBLIC = ("specfuse_shared", "specfuse_shared.comparing", "specfuse_shared.errors", "langchain_specfuse",
          "langchain_specfuse.errors", "llamaindex_specfuse")  # fmt: skip


@pytest.mark.parametrize("name", [README, *PAGES, *(str(p.relative_to(ROOT)) for p in ROOT.glob("examples/*.py"))])
def test_examples_import_public_names_only(name: str) -> None:
    codes = [text_of(name)] if name.endswith(".py") else [example.code for example in examples_in(name)]
    imports = [node for code in codes for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    ours = {str(node.module) for node in imports if "specfuse" in str(node.module)}
    assert ours <= set(PUBLIC)
    named = {alias.name for node in imports if node.module == "specfuse_shared" for alias in node.names}
    assert named <= set(specfuse_shared.__all__)


@pytest.mark.parametrize("place", PLACES)
def test_an_example_of_each_framework_has_about_ten_lines(place: str) -> None:
    (code,) = (code for code in EXAMPLES if f"from {place} " in code)
    assert len(code.strip().splitlines()) <= 10


def test_the_first_screen_has_a_picture_the_command_to_install_an_example_and_the_status() -> None:
    screen = "\n".join(text_of(README).splitlines()[:26])
    for what in ("![", "pip install", "from langchain_specfuse import", "**Status:**"):
        assert what in screen


def test_the_readme_is_short() -> None:
    assert len(text_of(README).split()) <= 700


@pytest.mark.parametrize("page", [README, "CONTRIBUTING.md", *DOCUMENTS])
def test_links_of_a_page_exist(page: str) -> None:
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page))
    assert [name for name in linked if not (ROOT / page).parent.joinpath(name).exists()] == []


def test_every_page_of_the_documentation_is_in_its_navigation() -> None:
    named = re.findall(r": ([\w/-]+\.md)$", text_of("mkdocs.yml"), re.M)
    assert sorted(f"docs/{name}" for name in named) == DOCUMENTS


def test_a_release_makes_the_links_of_the_readme_absolute() -> None:
    released = with_absolute_links(text_of(README), "owner/name", "v1")
    relative = re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(README))
    targets = re.findall(
        r"\]\(https://(?:github|raw\.githubusercontent)\.com/owner/name/(?:blob/)?v1/([^)#]+)", released
    )
    assert targets == relative
    assert re.findall(r"\]\((?!https?:)[^)]+\)", released) == []
    assert "![" in released
    assert all(link.startswith("https://raw.") for link in re.findall(r"!\[[^\]]*\]\(([^)]+)", released))
    assert "](https://github.com/owner/name/blob/v1/docs/index.md#limits)" in released
