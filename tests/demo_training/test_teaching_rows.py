"""The synthetic conversations on which the demo's members were trained to use tools."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import quality_rows
from applications import NEEDED, NOT_NEEDED, TOOLS
from teaching_rows import BRIEFLY, FRAMES, PLAINLY, SENTENCE, TALK, TASK_FIRST, notes, tools
from teaching_rows import TOOLS as TAUGHT
from train_demo_adapter import BREVITY, read_rows

from specfuse_shared.comparing import Question
from specfuse_shared.messages import Message, Tool
from specfuse_shared.text.chat_template import PromptEncoder
from specfuse_shared.text.tool_calls import CallReader, ToolUse
from tests.support.tiny import byte_level_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("rows") / "tools.jsonl"
    tools(file, rows=200)
    again = file.with_name("again.jsonl")
    tools(again, rows=200)
    assert file.read_text() == again.read_text()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_calls_can_be_parsed_by_the_engine_and_fit_their_schema(rows: list[dict[str, Any]]) -> None:
    kinds = {"call": 0, "text": 0}
    for row in rows:
        reader, offered = CallReader(), {tool["function"]["name"]: tool["function"] for tool in row["tools"]}
        list(reader.feed(row["answer"]))
        list(reader.finish())
        kinds["call" if reader.calls else "text"] += 1
        for call in reader.calls:
            jsonschema.validate(call.arguments, offered[call.name]["parameters"])
        grammar = ToolUse([Tool.from_dict(tool) for tool in row["tools"]]).grammar()
        assert grammar is not None
        [Message.from_dict(message) for message in row["messages"]]
    assert min(kinds.values()) > 60


def test_measured_questions_are_not_in_the_training_rows() -> None:
    assert [question for question, _ in NEEDED if was_taught(question)] == []
    assert not set(NOT_NEEDED) & {question for question, _ in TALK}
    assert not {tool.__name__ for tool in TOOLS} & {tool.name for tool in TAUGHT}


@pytest.mark.parametrize("question", ["Multiply 6 by 14.", "What is 17 times 25?", "is it hot in Lisbon"])
def test_a_question_of_a_training_form_is_detected(question: str) -> None:
    assert was_taught(question)


def test_no_measured_prompt_has_the_wording_of_a_training_row() -> None:
    row = {"id": "0", "task": "rag", "prompt": "Who keeps the mill?", "context": "Ada keeps the mill.\n\nIt is red."}
    row_with_reference = {**row, "references": ["Ada"]}
    measured = [quality_rows.question(row_with_reference, task, 8).prompt for task in quality_rows.INSTRUCTIONS]
    compared = Question(text=row["prompt"], passage=row["context"], references=["Ada"]).prompt
    examples = [example_prompt(name) for name in ("rag_langchain", "rag_llamaindex")]
    assert [prompt for prompt in (*measured, compared, *examples) if is_framed_as_taught(prompt)] == []


@pytest.mark.parametrize(
    "prompt",
    [
        "Answer the question in one short sentence.\n\nAda keeps the mill.\n\nWho keeps the mill?",
        "Use the notes to answer the question in one short sentence.\n\nNotes:\n{context}\n\nQuestion: {question}",
        "Ada keeps the mill.\n\nWho keeps the mill?\nAnswer briefly.",
        "Be brief.\n\nWho keeps the mill?",
    ],
)
def test_a_prompt_with_a_training_frame_is_detected(prompt: str) -> None:
    assert is_framed_as_taught(prompt)


def example_prompt(name: str) -> str:
    """The prompt of an example, which may need packages that are not installed."""
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    [call] = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "PROMPT"]
    assert isinstance(call, ast.Call)
    return str(ast.literal_eval(call.args[0]))


def was_taught(question: str) -> bool:
    """Whether the question has a training form, regardless of case and final punctuation."""
    return any(_form(form).fullmatch(question) for tool in TAUGHT for form in tool.questions)


def is_framed_as_taught(prompt: str) -> bool:
    """Whether the prompt has a training frame of passages, or a training instruction, around any text."""
    hows = "|".join(map(re.escape, (*BRIEFLY, *SENTENCE, *PLAINLY)))
    frames = [re.escape(frame).replace(r"\{how\}", f"(?:{hows})") for frame in (*FRAMES, TASK_FIRST)]
    framed = [re.sub(r"\\\{\w+\\\}", ".+", frame) for frame in frames]
    escaped = map(re.escape, BREVITY)
    instructions = [form for text in escaped for form in (rf"{text}\n\n.+", rf".+\n\n{text}")]
    return any(re.fullmatch(form, prompt, re.DOTALL | re.IGNORECASE) for form in (*framed, *instructions))


def _form(form: str) -> re.Pattern[str]:
    filled = re.sub(r"\\\{\w+\\\}", ".+", re.escape(form.rstrip(".?!")))
    return re.compile(filled + r"[.?!]?", re.IGNORECASE)


def test_rows_of_both_kinds_can_be_trained_on(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    prompts = PromptEncoder(byte_level_tokenizer(), None, {}, "tiny")
    file = tmp_path / "some.jsonl"
    passage = {"prompt": "How many?\n\n" + "word " * 40, "references": ["Two"]}
    short = {"prompt": "How many?", "references": ["Two"]}
    file.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], passage, short)))
    result = read_rows(file, prompts, 7, 10_000)
    assert [len(ways) for ways in result] == [1, 3, 3]
    assert all(answer[-1] == 7 for ways in result for _, answer in ways)


def test_notes_contain_the_right_passage_and_another_one(tmp_path: Path) -> None:
    plain, out = tmp_path / "plain.jsonl", tmp_path / "notes.jsonl"
    texts = {
        "Which bus?": ("The bus to the mill is the 46. " * 8).strip(),
        "Who?": ("Ada keeps the mill. " * 12).strip(),
    }
    rows = [{"prompt": f"{q}\n\n{text}", "references": ["The 46."]} for q, text in texts.items()]
    short = {"prompt": "Why?", "references": ["No passage."]}
    plain.write_text("".join(json.dumps(row) + "\n" for row in (*rows, short)))
    notes(plain, out)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    prompts = [row["messages"][0]["content"] for row in results]
    assert len(results) == 4
    assert all(text in prompt for text in texts.values() for prompt in prompts)
    assert [sum(question in prompt for prompt in prompts) for question in texts] == [2, 2]
    assert {row["answer"] for row in results} == {"The 46."}
