"""`specfuse_shared.__all__` is the whole public interface, and importing it brings no framework."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any

import pytest

import specfuse_shared
from specfuse_shared import errors, events, policies

DOCUMENTED = {
    "EnsembleConfig",
    "EnsembleEngine",
    "EnsembleResult",
    "LoadProgress",
    "MemberConfig",
    "MemberReport",
    "Message",
    "RoundRecord",
    "SamplingParams",
    "ToolCall",
    "demo_encoder",
    "demo_members",
}
ERRORS = {n for n, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, errors.SpecFuseError)}
EVENTS = {"Event", *(e.__name__ for e in typing.get_args(events.Event))}
PROTOCOLS = {n for n, v in vars(policies).items() if inspect.isclass(v) and n.endswith("Policy")}


def public() -> dict[str, Any]:
    return {name: getattr(specfuse_shared, name) for name in specfuse_shared.__all__}


def own_classes(annotation: Any) -> Iterator[type]:
    """The classes of this project that an annotation names, at any depth."""
    if inspect.isclass(annotation) and annotation.__module__.startswith("specfuse_shared"):
        yield annotation
    for part in typing.get_args(annotation):
        for inner in part if isinstance(part, list) else [part]:
            yield from own_classes(inner)


def exposed(thing: Any) -> Iterator[type]:
    """The classes of this project in the annotations of a public class or function."""
    if isinstance(thing, UnionType):
        yield from own_classes(thing)
    callables = [thing] if inspect.isfunction(thing) else []
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing):
            for annotation in typing.get_type_hints(thing).values():
                yield from own_classes(annotation)
        members = inspect.getmembers(
            thing, lambda m: inspect.isfunction(m) or inspect.ismethod(m) or isinstance(m, property)
        )
        for name, member in members:
            if not name.startswith("_") or name in {"__init__", "__call__"}:
                callables.append(member.fget if isinstance(member, property) else member)
    for function in callables:
        for annotation in typing.get_type_hints(function).values():
            yield from own_classes(annotation)


def test_every_documented_name_is_public() -> None:
    missing = (DOCUMENTED | ERRORS | EVENTS | PROTOCOLS) - set(specfuse_shared.__all__)
    assert not missing


def test_no_name_is_private_or_listed_twice() -> None:
    names = list(specfuse_shared.__all__)
    assert len(names) == len(set(names))
    assert not [name for name in names if name.startswith("_") and name != "__version__"]


def test_every_class_that_a_public_signature_names_is_public() -> None:
    classes = [thing for thing in public().values() if inspect.isclass(thing)]
    hidden = {
        f"{name} shows {output.__module__}.{output.__qualname__}"
        for name, thing in public().items()
        for output in exposed(thing)
        if output not in classes
    }
    assert not hidden


@pytest.mark.parametrize("name", specfuse_shared.__all__)
def test_every_public_class_and_function_is_documented(name: str) -> None:
    thing = getattr(specfuse_shared, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert (inspect.getdoc(thing) or "").strip()


def test_importing_the_engine_imports_no_framework() -> None:
    code = (
        "import sys, specfuse_shared\n"
        "for name in specfuse_shared.__all__: getattr(specfuse_shared, name)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('langchain', 'langchain_core', 'llama_index')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["EnsembleConfig", "MemberConfig", "SamplingParams"])
def test_every_setting_has_a_docstring(name: str) -> None:
    settings = public()[name]
    (definition,) = ast.parse(inspect.getsource(settings)).body
    assert isinstance(definition, ast.ClassDef)
    documented = [
        field.target.id
        for field, below in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and below.value.value
    ]
    assert documented == [field.name for field in dataclasses.fields(settings)]


def test_the_reference_shows_every_public_name() -> None:
    pages = Path(__file__).parents[1].joinpath("docs", "api").glob("*.md")
    listed = {name for page in pages for name in re.findall(r"(?m)^::: [\w.]+\.(\w+)$", page.read_text("utf-8"))}
    assert set(specfuse_shared.__all__) - listed - {*vars(errors)} == {"Event"}, "Event is the union of those shown"
