"""Pages of the documentation and their Python examples: their requirements, and how they are run or checked.

A comment above a block states a requirement: `<!-- needs: fastapi -->` names a module, and the block runs if it is
installed. Other requirements, such as `<!-- needs: a GPU -->`, are never met in tests: such a block is compiled, its
imports are imported, and its names and keyword arguments must exist.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?ms)^(?:<!-- needs: ([^\n]*?) -->\n)?```python\n(.*?)^```")
Names = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A block of Python, after empty lines that give it the page's line numbers."""

    page: str
    code: str
    needs: str | None

    @property
    def runs(self) -> bool:
        """Its requirements are installed."""
        return self.needs is None or (self.needs.isidentifier() and find_spec(self.needs) is not None)

    def take(self, names: Names) -> None:
        """Run it with the names of earlier blocks, or check it if it cannot run."""
        if self.runs:
            exec(compile(self.code, self.page, "exec", dont_inherit=True), names)
        else:
            check(ast.parse(self.code, self.page), names)


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def examples_in(page: str) -> list[Example]:
    text = text_of(page)
    return [
        Example(page, "\n" * text.count("\n", 0, block.start(2)) + block[2], block[1]) for block in BLOCK.finditer(text)
    ]


def check(tree: ast.Module, names: Names) -> None:
    """Raises for an import, an attribute or a keyword argument that does not exist in an installed package."""
    names_here = {**names, **dict(_imported(tree))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            _found(node, names_here)
        if isinstance(node, ast.Call) and (called := _found(node.func, names_here)) is not None:
            for keyword in node.keywords:
                assert keyword.arg is None or _takes(called, keyword.arg), (
                    f"line {node.lineno}: {ast.unparse(node.func)} takes no {keyword.arg}"
                )


def _imported(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in filter(lambda alias: _is_here(alias.name), node.names):
                module = import_module(alias.name)
                yield alias.asname or alias.name.partition(".")[0], module
        if isinstance(node, ast.ImportFrom) and node.module and _is_here(node.module):
            for alias in node.names:
                yield alias.asname or alias.name, getattr(import_module(node.module), alias.name)


def _is_here(module: str) -> bool:
    """False if its package is not installed; a module of an installed package must exist."""
    package = find_spec(module.partition(".")[0])
    if package is None or package.origin is not None:
        return package is not None
    try:  # a namespace of several packages
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _found(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression of names and attributes; None if it is unknown before the block runs."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := _found(node.value, names)) is not None:
        assert hasattr(owner, node.attr), f"line {node.lineno}: {ast.unparse(node)} does not exist"
        return getattr(owner, node.attr)
    return None


def _takes(called: Any, keyword: str) -> bool:
    if isinstance(called, type) and issubclass(called, BaseModel):
        fields = called.model_fields
        return keyword in fields or keyword in (field.alias for field in fields.values())
    parameters = inspect.signature(called).parameters
    return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
