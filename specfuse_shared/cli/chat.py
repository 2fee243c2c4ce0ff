"""`specfuse-llm chat`: a conversation in a terminal, with the members loaded once.

Ctrl-C stops an answer, not the program. Lines that begin with "/" are commands.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from specfuse_shared.cli import side_by_side, terminal
from specfuse_shared.cli.setup import (
    MEMBER,
    SAMPLING,
    BackendOption,
    EnsembleFileOption,
    MaxTokens,
    MembersOption,
    Preset,
    Quantization,
    Seed,
    System,
    Temperature,
    Verbose,
    chosen_ensemble,
    consoles,
    in_options,
    loaded,
)
from specfuse_shared.config import SamplingParams
from specfuse_shared.errors import SpecFuseError
from specfuse_shared.events import EnsembleResult, Event, SegmentEvent
from specfuse_shared.messages import Message

if TYPE_CHECKING:
    from specfuse_shared.serving.engine import EnsembleEngine

PROMPT = "> "
LEAVE = "Ctrl-Z and Enter" if os.name == "nt" else "Ctrl-D"
WELCOME = f"Ask; /help lists commands; Ctrl-C stops an answer, {LEAVE} leaves."


def chat(
    member: MembersOption = None,
    config: EnsembleFileOption = None,
    system: System = None,
    max_tokens: MaxTokens = SAMPLING.max_tokens,
    temperature: Temperature = SAMPLING.temperature,
    seed: Seed = None,
    preset: Preset = "default",
    backend: BackendOption = MEMBER["backend"],
    quantization: Quantization = None,
    verbose: Verbose = False,
) -> int:
    """Chat with the ensemble."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    ensemble = chosen_ensemble(member, config, preset, {"backend": backend, "quantization": quantization})
    out, notes = consoles()
    with loaded(ensemble, verbose) as engine:
        ChatSession(engine, params, system, out, notes).run(sys.stdin.isatty())
    return 0


class ChatSession:
    """The conversation so far, and the commands of a chat."""

    def __init__(
        self, engine: EnsembleEngine, params: SamplingParams, system: str | None, out: Console, notes: Console
    ) -> None:
        self._engine = engine
        self._params = params
        self._out = out
        self._notes = notes
        self._system = [Message("system", system)] if system else []
        self.messages: list[Message] = list(self._system)
        self._last: EnsembleResult | None = None
        self._commands: Mapping[str, tuple[Callable[[str], None], str]] = {
            "/each": (self._answer_each, "QUESTION: each member's own answer next to the joint one"),
            "/members": (self._show_members, "the members and their devices"),
            "/why": (self._show_rounds, "every round of the last answer"),
            "/differ": (self._show_differences, "where members would have written something else in the last answer"),
            "/save": (self._save, "FILE: write the conversation as JSON"),
            "/clear": (self._clear, "start a new conversation"),
            "/help": (self._help, "this list"),
            "/exit": (self._leave, f"leave; {LEAVE}, too"),
        }

    def run(self, interactive: bool) -> None:
        """Run until the input ends. `interactive`: the input is a terminal."""
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 gives input() editing and a history
            self._notes.print(WELCOME, style="dim")
        while (line := self._line(interactive)) is not None:
            with suppress(_Left):
                self._take(line.strip())
                continue
            return

    def _line(self, interactive: bool) -> str | None:
        """The next line; an empty one for Ctrl-C, None at the end."""
        try:
            return input(PROMPT if interactive else "")
        except KeyboardInterrupt:
            self._notes.print()
            return ""
        except UnicodeDecodeError:
            self._say("that line is not UTF-8 text: type or paste it again")
            return ""
        except EOFError:
            if interactive:
                self._notes.print()
            return None

    def _take(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name in self._commands:
            self._commands[name][0](rest.strip())
        elif name.startswith("/"):
            self._say(f"no command {name}: /help lists them")
        elif line:
            self._answer(line)

    def _answer(self, question: str) -> None:
        """Text received before Ctrl-C is part of the conversation. A refused question is not."""
        messages, pieces = self.messages, list[str]()
        self._last = None
        try:
            messages = [*self.messages, Message("user", question)]
            with closing(self._engine.stream(messages, self._params)) as events:  # type: ignore[type-var]
                self._last = terminal.show_answer(_collected(events, pieces), self._out, self._notes)
        except KeyboardInterrupt:
            self._say("stopped")
        except SpecFuseError as error:
            self._say(in_options(str(error)))
        if pieces:
            self.messages = [*messages, Message("assistant", "".join(pieces))]

    def _answer_each(self, question: str) -> None:
        """The joint answer is part of the conversation, even if Ctrl-C stopped it. The members' own answers are not."""
        if not question:
            self._say("/each QUESTION: the question is missing")
            return
        messages, self._last = self.messages, None
        columns = side_by_side.Columns(self._engine.config.names)
        try:
            messages = [*self.messages, Message("user", question)]
            columns.run(self._engine, messages, self._params, self._out)
        except KeyboardInterrupt:
            self._say("stopped")
        except SpecFuseError as error:
            self._say(in_options(str(error)))
        columns.show_differences(self._out, self._notes)
        self._last = columns.joint.result
        if answer := columns.joint.text:
            self.messages = [*messages, Message("assistant", answer)]

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    def _show_members(self, _: str) -> None:
        terminal.show_members(self._engine.describe(), self._notes)

    def _show_rounds(self, _: str) -> None:
        if self._last is None:
            self._say("there is no whole answer to explain")
            return
        terminal.show_rounds(self._last, self._notes)
        terminal.show_summary(self._last, self._notes)

    def _show_differences(self, _: str) -> None:
        if self._last is None:
            self._say("there is no whole answer to explain")
            return
        terminal.show_differences(self._last, self._notes)

    def _save(self, name: str) -> None:
        if not name:
            self._say("/save FILE: the file is missing")
            return
        turns = [{"role": message.role, "content": message.content} for message in self.messages]
        try:
            Path(name).expanduser().write_text(json.dumps(turns, ensure_ascii=False, indent=1) + "\n", "utf-8")
        except (OSError, RuntimeError, ValueError) as error:  # "~" of an unknown user, an invalid name
            self._say(f"not saved: {name}: {getattr(error, 'strerror', None) or error}")
        else:
            self._say(f"saved: {name}")

    def _clear(self, _: str) -> None:
        self.messages, self._last = list(self._system), None

    def _help(self, _: str) -> None:
        for name, (_run, what) in self._commands.items():
            self._say(f"{name:9} {what}")

    def _leave(self, _: str) -> None:
        raise _Left

    def _say(self, text: str) -> None:
        self._notes.print(terminal.visible(text), style="dim")


class _Left(Exception):
    """The user left the chat."""


def _collected(events: Iterable[Event], pieces: list[str]) -> Iterator[Event]:
    """The events. Collects their text in `pieces`."""
    for event in events:
        if isinstance(event, SegmentEvent):
            pieces.append(event.text)
        yield event
