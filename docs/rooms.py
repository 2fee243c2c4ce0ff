"""Write the table of packages in `specfuse_shared` into docs/architecture.md, in import order, or check it.

The check also refuses files that are too large.

python docs/rooms.py [--check]
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import grimp

PAGE = Path(__file__).parent / "architecture.md"
BEGIN, END = "<!-- rooms: drawn by `make rooms` -->", "<!-- end of rooms -->"
ROOT = "specfuse_shared"
PACKAGES = (ROOT, "langchain_specfuse", "llamaindex_specfuse")
LINES = 900
"""Maximum lines per file: a longer file holds more than one concept."""


def packages() -> dict[str, set[str]]:
    """Package or module of the root → the ones it imports."""
    graph = grimp.build_graph(ROOT, exclude_type_checking_imports=True)
    for name in graph.find_children(ROOT):
        if graph.find_children(name):
            graph.squash_module(name)
    names = sorted(graph.find_children(ROOT) - {f"{ROOT}.__main__"})
    imports = {name: graph.find_modules_directly_imported_by(name) & {*names} - {name} for name in names}
    return {name.partition(".")[2]: {used.partition(".")[2] for used in uses} for name, uses in imports.items()}


def table(uses: dict[str, set[str]]) -> str:
    """One row per package, from the user interface down to shared helpers; each imports only packages below it."""
    height: dict[str, int] = {}
    while len(height) < len(uses):
        ready = [name for name in uses if name not in height and uses[name] <= height.keys()]
        if not ready:
            raise SystemExit(f"these import each other: {', '.join(sorted(uses.keys() - height.keys()))}")
        height |= {name: 1 + max((height[used] for used in uses[name]), default=0) for name in ready}
    rows = ["| package | contents |", "| --- | --- |"]
    for name in sorted(uses, key=lambda name: (-height[name], name)):
        is_package = Path(__file__).parent.parent.joinpath(ROOT, name).is_dir()
        rows.append(f"| `{name}{'/' if is_package else ''}` | {purpose(name, in_full=is_package)} |")
    return "\n".join(rows)


def purpose(name: str, in_full: bool) -> str:
    """The first sentence of a docstring, or the part before its colon."""
    first = (importlib.import_module(f"{ROOT}.{name}").__doc__ or "").strip().splitlines()[0]
    return re.split(r"\. " if in_full else r"[.:] ", first)[0].rstrip(".") + "."


def too_large() -> list[str]:
    """Files that have to be split."""
    files = [path for package in PACKAGES for path in (Path(__file__).parent.parent / package).rglob("*.py")]
    long = {path: len(path.read_text("utf-8").splitlines()) for path in files}
    return [f"{path} has {lines} lines" for path, lines in long.items() if lines > LINES]


def main() -> None:
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    drawn = f"{before}{BEGIN}\n\n{table(packages())}\n\n{END}{after}"
    if "--check" not in sys.argv:
        PAGE.write_text(drawn, "utf-8")
        return
    if drawn != page:
        raise SystemExit("docs/architecture.md does not match the imports: run make rooms")
    if large := too_large():
        raise SystemExit(f"more than {LINES} lines: {'; '.join(large)}")


if __name__ == "__main__":
    main()
