"""Keeps messages text: a control string of a member that stands in a message is encoded as plain text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specfuse_shared.messages import Message, Tool
from specfuse_shared.text.roles import Turn
from specfuse_shared.text.turn_marks import TurnMarks

APART = " . "
"""Between texts that are looked at together; no control string has it."""
_SENTINEL = re.compile("\ue000([0-9a-f]{8}):(\\d+)\ue001")


class TextGuard:
    """Replaces control strings inside message text by sentinels before rendering, and restores them as text.

    `marks`: what turns look like, which is broken in every text. `clean`: no text holds a control string.
    """

    def __init__(
        self, has_control: Callable[[str], bool], control: re.Pattern[str] | None, marks: TurnMarks, clean: bool
    ) -> None:
        self._nonce = secrets.token_hex(4)
        self._has_control = has_control
        self._control = control
        self._marks = marks
        self._clean = clean
        self._texts: list[str] = []

    def turn(self, message: Message) -> Turn:
        turn: Turn = {"role": message.role, "content": self.protect(message.content)}
        if message.name:
            turn["name"] = self.protect(message.name)
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "id": self.protect(call.id or ""),
                    "function": {"name": self.protect(call.name), "arguments": self._protect_all(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            turn["tool_call_id"] = self.protect(message.tool_call_id)
        return turn

    def tool(self, tool: Tool) -> dict[str, Any]:
        function: dict[str, Any] = self._protect_all(tool.as_function()["function"])
        return {"type": "function", "function": function}

    def protect(self, text: str) -> str:
        """`text` with every control string replaced; all of it where the tokenizer still finds one."""
        text = self._marks.broken(text)
        if self._clean or not self._has_control(text):
            return text
        replaced = self._control.sub(lambda m: self._sentinel(m.group()), text) if self._control else text
        seen = _SENTINEL.sub(lambda m: " " if m[1] == self._nonce else m[0], replaced)
        return self._sentinel(text) if self._has_control(seen) else replaced

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """The rendered prompt as (piece, is plain text)."""
        parts, end = list[tuple[str, bool]](), 0
        for found in _SENTINEL.finditer(rendered):
            if found[1] == self._nonce:
                parts += [(rendered[end : found.start()], False), (self._texts[int(found[2])], True)]
                end = found.end()
        return [*parts, (rendered[end:], False)]

    def _sentinel(self, text: str) -> str:
        self._texts.append(text)
        return f"\ue000{self._nonce}:{len(self._texts) - 1}\ue001"

    def _protect_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, Mapping):
            return {self.protect(str(k)): self._protect_all(v) for k, v in value.items()}
        return [self._protect_all(v) for v in value] if isinstance(value, (list, tuple)) else value


def texts_of(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[str]:
    """Every text of a conversation that may reach a prompt."""
    for message in messages:
        yield from filter(None, (message.content, message.name, message.tool_call_id))
        for call in message.tool_calls:
            yield from (call.id or "", call.name, *_strings_in(call.arguments))
    for tool in tools:
        yield from _strings_in(tool.as_function())


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _strings_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings_in(each)
