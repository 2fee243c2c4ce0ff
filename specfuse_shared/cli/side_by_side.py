"""The joint answer and each member's own, in columns that grow at the same time, with differences marked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specfuse_shared.agreement import Difference, differences_of
from specfuse_shared.cli.terminal import MARKS, palette, visible
from specfuse_shared.config import SamplingParams
from specfuse_shared.errors import SpecFuseError
from specfuse_shared.events import EnsembleResult, Event, FinishEvent, SegmentEvent
from specfuse_shared.messages import Message

if TYPE_CHECKING:
    from specfuse_shared.serving.engine import EnsembleEngine

StreamItem = tuple[int, Event | Exception | None]
"""The number of a stream and its event or error; None at its end."""
TOGETHER = "together"
_NARROWEST = 24
"""Minimum characters of a column. On narrower terminals answers are printed below each other."""
_SECONDS_OF_A_WAIT = 0.5
"""On Windows, Ctrl-C is handled between two waits only."""


@dataclass
class Column:
    """One of the answers. `member`: its author, None for the joint one. `problem`: the error if it failed."""

    member: str | None
    style: str
    text: str = ""
    result: EnsembleResult | None = None
    problem: str = ""
    marks: Sequence[Difference] = field(default_factory=list)

    @property
    def title(self) -> Text:
        return Text(visible(self.member or TOGETHER), style=f"bold {self.style}".strip())

    @property
    def shown(self) -> Text:
        """The text so far, with its marks."""
        marked, at = Text(), 0
        for mark in self.marks:
            marked.append(visible(self.text[at : mark.start]))
            marked.append(visible(self.text[mark.start : mark.end]), MARKS[mark.kind])
            at = mark.end
        marked.append(visible(self.text[at:]))
        return marked.append(f"\n{visible(self.problem)}", "yellow") if self.problem else marked


class Columns:
    """The answers to one question; the joint one comes first."""

    def __init__(self, members: Sequence[str]) -> None:
        colours = palette(members)
        self.joint = Column(None, "")
        self._columns = [self.joint, *(Column(name, colours[name]) for name in members)]

    def run(self, engine: EnsembleEngine, messages: Sequence[Message], params: SamplingParams, out: Console) -> None:
        """Ask, and show the answers as they arrive; without a terminal, one after another at the end.

        A failed answer shows its error in its column. Ctrl-C stops all answers; their text so far remains.
        """
        streams: list[Iterator[Event]] = []
        try:
            for column in self._columns:
                members = None if column.member is None else [column.member]
                streams.append(engine.stream(messages, params, members=members))
            if not out.is_terminal:
                for _ in self._next_events(streams):
                    pass
                return
            with Live(self._grid(out), console=out, transient=True, auto_refresh=False) as live:
                for _ in self._next_events(streams):
                    live.update(self._grid(out), refresh=True)
        finally:
            for stream in streams:
                stream.close()  # type: ignore[attr-defined]

    def _next_events(self, streams: Sequence[Iterator[Event]]) -> Iterator[None]:
        """Read all streams until they have ended, and yield after each event."""
        items = SimpleQueue[StreamItem]()
        for number, stream in enumerate(streams):
            threading.Thread(target=_pass_on, args=(number, stream, items.put), daemon=True).start()
        open_streams = len(streams)
        while open_streams:
            try:
                number, event = items.get(timeout=_SECONDS_OF_A_WAIT)
            except Empty:
                continue
            column = self._columns[number]
            if event is None:
                open_streams -= 1
            elif isinstance(event, SegmentEvent):
                column.text += event.text
            elif isinstance(event, FinishEvent):
                column.result = event.result
            elif isinstance(event, SpecFuseError):
                column.problem = str(event)
            elif isinstance(event, Exception):
                raise event
            yield

    def show_differences(self, out: Console, notes: Console) -> None:
        """The answers with differences marked, and a list of the numbers and names among them."""
        for column, marks in zip(self._columns, differences_of([c.text for c in self._columns]), strict=True):
            column.marks = marks
        if out.is_terminal:
            out.print(self._grid(out))
        else:
            for column in self._columns:
                out.file.write(f"{visible(column.member or TOGETHER)}: {column.text}\n")
                if column.problem:
                    notes.print(Text(f"{visible(column.member or TOGETHER)}: {visible(column.problem)}"))
        for column in self._columns:
            facts = [column.text[mark.start : mark.end] for mark in column.marks if mark.kind != "word"]
            if facts:
                listed = ", ".join(dict.fromkeys(facts))
                line = f"{column.member or TOGETHER}, unlike another one: {listed}"
                notes.print(Text(visible(line), style="dim"))

    def _grid(self, out: Console) -> Table | Group:
        if out.width < _NARROWEST * len(self._columns):
            return Group(*(part for column in self._columns for part in (column.title, column.shown, "")))
        table = Table.grid(expand=True, padding=(0, 2, 0, 0))
        for _ in self._columns:
            table.add_column(ratio=1, overflow="fold")
        table.add_row(*(column.title for column in self._columns))
        table.add_row(*(column.shown for column in self._columns))
        return table


def _pass_on(number: int, stream: Iterator[Event], put: Callable[[StreamItem], None]) -> None:
    """Pass on the events of a stream, then its error if it fails, then None."""
    try:
        for event in stream:
            put((number, event))
    except Exception as error:
        put((number, error))
    put((number, None))
