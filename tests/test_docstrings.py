"""The examples of public docstrings run, and they document the arguments of the functions."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import langchain_specfuse
import llamaindex_specfuse
import specfuse_shared
import specfuse_shared.comparing
from specfuse_shared import EnsembleEngine

PACKAGES = (specfuse_shared, specfuse_shared.comparing, langchain_specfuse, llamaindex_specfuse)
BLOCK = re.compile(r"^Example:\n    ```python\n(.*?)^    ```$", re.MULTILINE | re.DOTALL)
ARGUMENT = re.compile(r"^    (\*{0,2}\w+): ", re.MULTILINE)


def is_ours(thing: object) -> bool:
    module = getattr(thing, "__module__", None) or ""
    return module.split(".")[0] in ("specfuse_shared", "langchain_specfuse", "llamaindex_specfuse")


def documented() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Name, function and docstring of every public function and method of ours."""
    visited = set[int]()
    for package in PACKAGES:
        for name in package.__all__:
            thing = getattr(package, name)
            if id(thing) in visited or not is_ours(thing):
                continue
            visited.add(id(thing))
            if inspect.isfunction(thing):
                yield name, thing, inspect.getdoc(thing) or ""
            elif inspect.isclass(thing):
                for attribute, value in list(vars(thing).items()):
                    function = getattr(value, "__func__", value)
                    if inspect.isfunction(function) and is_ours(function) and not attribute.startswith("_"):
                        yield f"{name}.{attribute}", function, inspect.getdoc(function) or ""


FUNCTIONS = {name: (function, doc) for name, function, doc in documented()}
EXAMPLES = {name: textwrap.dedent(block[1]) for name, (_, doc) in FUNCTIONS.items() if (block := BLOCK.search(doc))}


def test_every_public_function_and_method_has_an_example() -> None:
    assert FUNCTIONS.keys() - EXAMPLES.keys() == set()


@pytest.mark.parametrize("name", [name for name, (_, doc) in FUNCTIONS.items() if "\nArgs:\n" in doc])
def test_every_argument_is_described(name: str) -> None:
    function, doc = FUNCTIONS[name]
    section = re.split(r"^\w+:$", doc.partition("\nArgs:\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = [
        stars.get(parameter.kind, "") + parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    assert ARGUMENT.findall(section) == parameters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of all examples, so that comparisons reuse the answers in `run.jsonl`."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(
    name: str,
    demo_engine: EnsembleEngine,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    exec(compile(EXAMPLES[name], name, "exec"), {"__name__": "__main__", "engine": demo_engine})
    assert "print(" not in EXAMPLES[name] or capsys.readouterr().out
