"""Roles that a chat template does not know, normalised: each step works on top of the ones before it."""

from __future__ import annotations

import itertools
import re
from typing import Any

from specfuse_shared.text.tool_calls import call_text

Turn = dict[str, Any]
"""A message as chat templates read it."""


_RESULT = re.compile(r"^([^\S\n]*R)(esult of .*:)", re.MULTILINE)
"""A line of a user that looks like the head of a tool's result."""


def as_given(turns: list[Turn]) -> list[Turn]:
    return turns


def told(turns: list[Turn], text: str) -> list[Turn]:
    """The conversation with a further system text."""
    return merge_system([*turns, {"role": "system", "content": text}])


def merge_system(turns: list[Turn]) -> list[Turn]:
    """All system messages as one, in front."""
    system = [t["content"] for t in turns if t["role"] == "system"]
    rest = [t for t in turns if t["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *rest] if system else rest


def tools_as_text(turns: list[Turn]) -> list[Turn]:
    """Tool calls as text of the assistant, tool results as quotes of the user, whose own texts cannot look like one."""

    def plain(turn: Turn) -> Turn:
        if turn["role"] == "tool":
            quoted = "\n".join(f"> {line}" for line in turn["content"].split("\n"))
            return {"role": "user", "content": f"Result of {turn.get('name') or 'tool'}:\n{quoted}"}
        if turn["role"] == "user":
            return {**turn, "content": _RESULT.sub(r"\1\\\2", turn["content"])}
        calls = [call_text(c["function"]["name"], c["function"]["arguments"]) for c in turn.get("tool_calls", ())]
        return {"role": turn["role"], "content": "\n".join(filter(None, [turn["content"], *calls]))}

    return [plain(t) for t in turns]


def alternate(turns: list[Turn]) -> list[Turn]:
    """Neighbours of one role as one message; a conversation that starts with the assistant gets an empty question."""
    groups = (list(group) for _, group in itertools.groupby(turns, key=lambda turn: turn["role"]))
    merged = [
        group[0] if len(group) == 1 else {"role": group[0]["role"], "content": "\n\n".join(t["content"] for t in group)}
        for group in groups
    ]
    start = 1 if merged[0]["role"] == "system" else 0
    if len(merged) == start or merged[start]["role"] == "assistant":
        merged.insert(start, {"role": "user", "content": "(the conversation so far)" if len(merged) > start else ""})
    return merged


def fold_system(turns: list[Turn]) -> list[Turn]:
    """The system text in front of the first user message."""
    if turns[0]["role"] != "system":
        return turns
    system, first, *rest = turns
    return [{"role": "user", "content": f"{system['content']}\n\n{first['content']}".strip()}, *rest]


def marked(turn: Turn, mark: str) -> tuple[Turn, list[str]]:
    """The turn with markers for its text and the names of its calls, and these markers."""
    marks, marked = [], dict(turn)
    if turn["content"].strip():
        marked["content"] = f"{mark}text"
        marks.append(marked["content"])
    if "tool_calls" in turn:
        names = [f"{mark}call-{number}-" for number in range(len(turn["tool_calls"]))]
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": name}}
            for call, name in zip(turn["tool_calls"], names, strict=True)
        ]
        marks += names
    return marked, marks


STEPS = (as_given, merge_system, tools_as_text, alternate, fold_system)
"""In this order, until a template keeps every message."""
