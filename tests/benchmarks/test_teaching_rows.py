"""The made-up conversations from which the demo's members learned to work with tools."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from agents import NEEDED, NOT_NEEDED, TOOLS
from teaching_rows import TALK, passages, tools
from teaching_rows import TOOLS as TAUGHT
from train_demo_adapter import read_rows

from specfuse_shared.messages import Message, Tool
from specfuse_shared.text.chat_template import PromptEncoder
from specfuse_shared.text.tool_calls import CallReader, ToolUse
from tests.engine.tiny import byte_level_tokenizer


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("rows") / "tools.jsonl"
    tools(file, rows=200)
    again = file.with_name("again.jsonl")
    tools(again, rows=200)
    assert file.read_text() == again.read_text()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_calls_are_ones_that_the_engine_would_read_and_fit_their_schema(rows: list[dict[str, Any]]) -> None:
    kinds = {"call": 0, "text": 0}
    for row in rows:
        reader, offered = CallReader(), {tool["function"]["name"]: tool["function"] for tool in row["tools"]}
        list(reader.feed(row["answer"]))
        list(reader.finish())
        kinds["call" if reader.calls else "text"] += 1
        for call in reader.calls:
            jsonschema.validate(call.arguments, offered[call.name]["parameters"])
        grammar = ToolUse([Tool.from_dict(tool) for tool in row["tools"]]).grammar(None)
        assert grammar is not None
        [Message.from_dict(message) for message in row["messages"]]
    assert min(kinds.values()) > 60


def test_what_is_measured_is_not_what_was_taught() -> None:
    questions = {question.format_map(_Any()) for tool in TAUGHT for question in tool.questions}
    assert not {question for question, _ in NEEDED} & questions
    assert not set(NOT_NEEDED) & {question for question, _ in TALK}
    assert not {tool.__name__ for tool in TOOLS} & {tool.name for tool in TAUGHT}


class _Any(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return random.Random(key).choice(["a", "b"])


def test_rows_of_both_kinds_can_be_learned_from(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    prompts = PromptEncoder(byte_level_tokenizer(), None, {}, "tiny")
    file = tmp_path / "some.jsonl"
    passage = {"prompt": "How many?\n\n" + "word " * 40, "references": ["Two"]}
    short = {"prompt": "How many?", "references": ["Two"]}
    file.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], passage, short)))
    found = read_rows(file, prompts, 7, 10_000)
    assert [len(ways) for ways in found] == [1, 3, 3]
    assert all(answer[-1] == 7 for ways in found for _, answer in ways)
    out = tmp_path / "passages.jsonl"
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps(row) + "\n" for row in (passage, short)))
    passages(plain, out)
    assert [json.loads(line) for line in out.read_text().splitlines()] == [passage]
