"""Files of questions: rows that are read, rows that are left out with a note, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specfuse_shared import ConfigError
from specfuse_shared.comparing import Question, QuestionSet, own_questions, read_questions


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, "utf-8")
    return file


def test_a_text_has_a_question_a_line(tmp_path: Path) -> None:
    result = read_questions(written(tmp_path, "q.txt", "\ufeffWhy?\n\n  When?  \nWhy?\n"))
    assert [(q.id, q.text, q.kind) for q in result.questions] == [("1", "Why?", "open"), ("2", "When?", "open")]
    assert result.remarks == ("question '3' is the same as '1': it is asked once",)
    pasted = read_questions(written(tmp_path, "q.txt", "One\u2028and two?\r\nThree\fand four?\n"))
    assert [question.text for question in pasted.questions] == ["One\u2028and two?", "Three\fand four?"]


def test_a_table_has_a_header_and_several_references_in_a_cell(tmp_path: Path) -> None:
    text = (
        'id,Question,references,passage,max_tokens\na,"Where, then?",Rome | Roma,It is Rome.,9\nb,How many?,"1,200",,\n'
    )
    first, second = read_questions(written(tmp_path, "q.csv", text)).questions
    assert (first.id, first.text, first.references, first.passage) == (
        "a",
        "Where, then?",
        ("Rome", "Roma"),
        "It is Rome.",
    )
    assert (first.kind, first.max_tokens, first.params().max_tokens) == ("short", 9, 9)
    assert (second.kind, second.references) == ("number", ("1,200",))
    tabbed = read_questions(written(tmp_path, "q.tsv", "question\treference\nWhy, then?\tbecause\n")).questions
    assert [(q.text, q.references) for q in tabbed] == [("Why, then?", ("because",))]


def test_json_lines_can_use_the_field_names_of_datasets(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 7, "prompt": "Who?", "context": "It was Ann.", "references": ["Ann"]},
        {"question": "Which?", "choices": ["a cat", "a dog"], "answer": 1},
        {"prompt": "No comma.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"unset": None}]},
        {"question": "Why?", "reference": "Because light of short waves is scattered more than that of long ones."},
    ]
    result = read_questions(written(tmp_path, "q.jsonl", "\n".join(map(json.dumps, rows)))).questions
    assert [q.kind for q in result] == ["short", "choice", "instructions", "text"]
    assert [q.id for q in result] == ["7", "2", "3", "4"]
    assert (result[1].references, result[1].letter) == (("a dog",), "B")


def test_an_unusable_row_is_left_out_and_reported_and_the_rest_is_kept(tmp_path: Path) -> None:
    lines = [
        '{"question": "Good?"}',
        '{"question": "  "}',
        "{no json",
        '["a list"]',
        '{"quesion": "Typo?"}',
        '{"question": "Which?", "choices": ["one"], "answer": "one"}',
        '{"question": "Which?", "choices": ["one", "two"], "answer": "three"}',
        '{"question": "Number?", "kind": "number", "reference": "many"}',
        '{"question": "Kind?", "kind": "shrt", "reference": "x"}',
        '{"question": "Check?", "instructions": [{"name": "punctuation:no_coma"}]}',
        '{"question": "Check?", "instructions": [{"name": "keywords:existence", "wrods": []}]}',
        '{"question": "Long?", "max_tokens": -1}',
        '{"question": "Also good?", "note": "kept"}',
    ]
    result = read_questions(written(tmp_path, "q.jsonl", "\n".join(lines)))
    assert [q.text for q in result.questions] == ["Good?", "Also good?"]
    texts = dict(remark.split(" is left out: ") for remark in result.remarks if " is left out: " in remark)
    assert list(texts) == [f"line {n}" for n in range(2, 13)]
    assert texts["line 2"] == "the question is empty"
    assert "not JSON" in texts["line 3"]
    assert texts["line 4"] == "it is not a JSON object"
    assert "name the column 'question'" in texts["line 5"]
    assert "there are 1 choices: 2 to 26" in texts["line 6"]
    assert "the reference is 'three'" in texts["line 7"]
    assert "'many' is no number" in texts["line 8"]
    assert "did you mean 'short'?" in texts["line 9"]
    assert "did you mean 'punctuation:no_comma'?" in texts["line 10"]
    assert "'keywords:existence' cannot be checked" in texts["line 11"]
    assert "max_tokens must be at least 1 or None, not -1" in texts["line 12"]
    assert result.remarks[-1] == "columns without effect: note"


def test_a_repeated_id_gets_a_number(tmp_path: Path) -> None:
    text = "id,question\na,One?\na,Two?\na,One?\n"
    result = read_questions(written(tmp_path, "q.csv", text))
    assert [(q.id, q.text) for q in result.questions] == [("a", "One?"), ("a-2", "Two?")]
    assert result.remarks == (
        "two questions have the id 'a': the second one is called 'a-2'",
        "question 'a' is the same as 'a': it is asked once",
    )


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("q.xlsx", b"PK", r"has the ending '\.xlsx': give a \.txt"),
        ("q.txt", b"\xff\xfe\x00", r"is not UTF-8 text \(byte 0\)"),
        ("q.txt", b"\n \n", "there are no questions"),
        ("q.csv", b"query,answer\nx,y\n", "names the columns query, answer: one of them must be 'question'"),
        ("q.csv", b"", r"names the columns \(none\)"),
        ("q.csv", b'question\n"open\n', "unexpected end of data"),
        ("q.jsonl", b"{}\n", "there are no questions.*; line 1 is left out: it has no question"),
    ],
)
def test_a_file_without_a_question_is_refused_by_name(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=rf"{name}.*{message}"):
        read_questions(tmp_path / name)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"none\.txt cannot be read \(No such file"):
        read_questions("none.txt")


def test_an_extra_cell_is_reported(tmp_path: Path) -> None:
    result = read_questions(written(tmp_path, "q.csv", "question,reference\nWhy, then?,so,\nGood?,yes\n"))
    assert [q.text for q in result.questions] == ["Good?"]
    assert result.remarks[0].startswith("line 2 is left out: it has more cells than the header")


def test_columns_are_identified_by_their_position(tmp_path: Path) -> None:
    text = "question,note,note,answer,,\nCapital of France?,x,y,Paris,,\n"
    result = read_questions(written(tmp_path, "q.csv", text))
    assert [(q.references, q.group) for q in result.questions] == [(("Paris",), "short")]
    assert result.remarks == ("columns without effect: note",)
    with pytest.raises(ConfigError, match="names the column 'answer' twice"):
        read_questions(written(tmp_path, "q.csv", "question,answer,answer\nWhy?,a,b\n"))


def test_a_tab_separated_file_is_not_split_at_commas(tmp_path: Path) -> None:
    result = read_questions(written(tmp_path, "q.tsv", "question\nHello, who are you?\n"))
    assert [q.text for q in result.questions] == ["Hello, who are you?"]


def test_a_wrong_quote_costs_its_row(tmp_path: Path) -> None:
    text = 'question,answer\nGood?,yes\n"He said "hi" to me?",yes\nBetter?,yes\n'
    result = read_questions(written(tmp_path, "q.csv", text))
    assert [q.text for q in result.questions] == ["Good?", "Better?"]
    assert result.remarks == ("line 3 is left out: it is no row of a table (',' expected after '\"')",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"context": ["It is", "Rome."]}, "passage must be a text"),
        ({"context": 5}, "passage must be a text, not 5"),
        ({"instructions": 5}, "instructions must be a list"),
        ({"answers": {"en": ["Rome"]}}, "references must be a list, not dict"),
        ({"answers": [["Rome"]]}, "references[0] must be a text"),
        ({"choices": {"a": "Rome"}, "answer": "Rome"}, "choices must be a list"),
    ],
)
def test_a_value_of_another_kind_costs_its_row(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [{"question": "Where?", **row}, {"question": "Good?"}]
    result = read_questions(written(tmp_path, "q.jsonl", "\n".join(map(json.dumps, rows))))
    assert [q.text for q in result.questions] == ["Good?"]
    assert message in result.remarks[0]


def test_answers_in_squads_form_and_numeric_choices_are_read(tmp_path: Path) -> None:
    rows = [
        {"question": "Capital?", "context": "Rome.", "answers": {"text": ["Rome", "Roma"], "answer_start": [0, 0]}},
        {"question": "2+2?", "choices": [1, 2, 3, 4], "answer": 4, "group": 3},
        {"question": "1+1?", "choices": [1, 2, 3, 4], "answer": 2},
    ]
    result = read_questions(written(tmp_path, "q.jsonl", "\n".join(map(json.dumps, rows)))).questions
    assert [q.references for q in result] == [("Rome", "Roma"), ("4",), ("2",)]
    assert result[1].group == "3"


def test_the_prompt_contains_the_passage_the_choices_and_an_instruction() -> None:
    passage = Question("Who?", passage="It was Ann.", references=["Ann"])
    assert passage.prompt == "Answer the question with a few words.\n\nIt was Ann.\n\nWho?"
    choice = Question("Which?", choices=["a cat", "a dog"], references=["a dog"])
    assert choice.prompt == "Which?\nA. a cat\nB. a dog\n\nAnswer with the letter of the right choice."
    assert choice.params(4).grammar is not None
    assert Question("How many?", references=["12"]).prompt.endswith("end with the number that answers the question.")
    assert Question("Why?").prompt == "Why?"


def test_the_token_limit_of_a_question_precedes_the_option_and_the_kinds_default() -> None:
    assert Question("Why?", max_tokens=5).params(50).max_tokens == 5
    assert Question("Why?").params(50).max_tokens == 50
    assert Question("Why?").params().max_tokens == 160


def test_the_packaged_questions_cover_every_kind() -> None:
    packaged = own_questions()
    assert packaged.own
    assert 30 <= len(packaged.questions) <= 40
    assert not packaged.remarks
    assert {q.kind for q in packaged.questions} == {"short", "text", "choice", "number", "instructions"}
    assert all(q.scored for q in packaged.questions)


def test_questions_can_be_texts_and_mappings() -> None:
    result = QuestionSet.of(["Why?", {"text": "Who?", "references": ["Ann"]}, Question("When?")])
    assert [q.id for q in result.questions] == ["1", "2", "3"]
    with pytest.raises(ConfigError, match="did you mean 'references'"):
        QuestionSet.of([{"text": "Who?", "reference": ["Ann"]}])
    with pytest.raises(ConfigError, match="not int"):
        QuestionSet.of([5])
