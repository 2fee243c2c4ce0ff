"""Files of questions: text (one question per line), CSV or TSV with a header, and JSON lines.

Invalid rows are skipped, with a remark.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from specfuse_shared.comparing.questions import Question, numbered
from specfuse_shared.errors import ConfigError, MissingExtraError
from specfuse_shared.validation import parsed_json

NAMES = {
    "text": ("question", "prompt", "text"),
    "references": ("references", "reference", "answers", "answer"),
    "passage": ("passage", "context"),
    "choices": ("choices",),
    "instructions": ("instructions",),
    "id": ("id",),
    "kind": ("kind",),
    "group": ("group",),
    "max_tokens": ("max_tokens",),
}
"""Field of a `Question` → accepted column names."""
LISTS = ("references", "choices")
BETWEEN = "|"
"""Separates several references or choices in a cell."""
_IFEVAL = ("instruction_id_list", "kwargs")
_FEW = 5


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions to ask. `remarks`: exclusions and renamings. `own`: the questions came with this package."""

    questions: tuple[Question, ...]
    remarks: tuple[str, ...] = ()
    own: bool = False

    @classmethod
    def of(cls, given: Sequence[Question | str | Mapping[str, Any]], remarks: Sequence[str] = ()) -> QuestionSet:
        """Questions with unique ids.

        Args:
            given: Questions, their texts, or their fields as mappings.
            remarks: Remarks about the questions, to be shown in a report.

        Returns:
            The questions. Duplicate ids were replaced, and a remark says so.

        Raises:
            ConfigError: There is no question, or one is invalid.

        Example:
            ```python
            from specfuse_shared.comparing import QuestionSet

            print(QuestionSet.of(["Why is the sky blue?", "Name a prime number."]).questions[1].id)
            ```
        """
        made = [_as_question(question) for question in given]
        questions, more = numbered(made)
        return cls(tuple(questions), (*remarks, *more))


def own_questions() -> QuestionSet:
    """The questions that come with this package: general knowledge and invented documents, in English.

    Returns:
        The questions.

    Example:
        ```python
        from specfuse_shared.comparing import own_questions

        print(len(own_questions().questions))
        ```
    """
    text = files("specfuse_shared.comparing").joinpath("own_questions.jsonl").read_text("utf-8")
    return QuestionSet(QuestionSet.of(list(_parsed(_json_rows(text), []))).questions, own=True)


def read_questions(path: str | Path) -> QuestionSet:
    """Questions of a file.

    Args:
        path: A `.txt` file (one question per line), or a `.csv`, `.tsv` or `.jsonl` file with columns.

    Returns:
        The questions, with remarks about ignored columns and rows.

    Raises:
        ConfigError: The file is unreadable or has no question.

    Example:
        ```python
        from pathlib import Path
        from tempfile import mkdtemp

        from specfuse_shared.comparing import read_questions

        file = Path(mkdtemp(), "questions.txt")
        file.write_text("Why is the sky blue?", "utf-8")
        print(read_questions(file).questions[0].prompt)
        ```
    """
    path = Path(path)
    tabs = partial(_table, delimiter="\t")
    readers: dict[str, Callable[[str], Rows]] = {
        ".txt": _lines,
        ".csv": _table,
        ".tsv": tabs,
        ".jsonl": _json_rows,
        ".ndjson": _json_rows,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path} has the ending {path.suffix!r}: give a {', '.join(readers)} file of questions")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a file of questions") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    remarks: list[str] = []
    try:
        question_set = QuestionSet.of(list(_parsed(reader(text), remarks)), remarks)
    except MissingExtraError:
        raise
    except (ConfigError, csv.Error) as error:
        first = f"; {remarks[0]}" if remarks else ""
        raise ConfigError(f"{path}: {error}{first}") from error
    return question_set


def _as_question(item: Question | str | Mapping[str, Any]) -> Question:
    if isinstance(item, Question):
        return item
    if isinstance(item, str):
        return Question(item)
    if isinstance(item, Mapping):
        return Question.from_dict(item)
    raise ConfigError(f"a question is a text, a mapping or a Question, not {type(item).__name__}")


Rows = Iterator[tuple[str, Mapping[str, Any] | str]]
"""The position of a row, and the row; a text describes its error."""


def _parsed(rows: Rows, remarks: list[str]) -> Iterator[Question]:
    unused: dict[str, None] = {}
    for where, row in rows:
        if isinstance(row, str):
            remarks.append(f"{where} is left out: {row}")
            continue
        try:
            question = _question(row)
        except MissingExtraError:
            raise
        except ConfigError as error:
            remarks.append(f"{where} is left out: {error}")
            continue
        unused.update(dict.fromkeys(_unused(row)))
        yield question
    if unused:
        remarks.append(f"columns without effect: {', '.join(list(unused)[:_FEW])}{' …' if len(unused) > _FEW else ''}")


def _question(row: Mapping[str, Any]) -> Question:
    values: dict[str, Any] = {}
    for field, names in NAMES.items():
        value = next((row[name] for name in names if row.get(name) not in (None, "", [])), None)
        if value is not None:
            values[field] = value
    if not any(name in row for name in NAMES["text"]):
        raise ConfigError(f"it has no question: name the column {NAMES['text'][0]!r}")
    if any(name in row for name in _IFEVAL):
        values["instructions"] = _ifeval(row)
    values["id"] = str(values.get("id", ""))
    choices = values.get("choices")
    answer = values.get("references")
    if isinstance(answer, Mapping) and isinstance(answer.get("text"), list):  # as SQuAD has them
        values["references"] = answer["text"]
    texts = choices if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices) else []
    if type(answer) is int and 0 <= answer < len(texts):  # the index of a choice, unless choices are numbers
        values["references"] = [texts[answer]]
    return Question(**{"text": "", **values})


def _ifeval(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The instructions of a row as IFEval has them."""
    names, settings = (row.get(name) for name in _IFEVAL)
    if not isinstance(names, list) or not isinstance(settings, list) or len(names) != len(settings):
        raise ConfigError("instruction_id_list and kwargs must be lists of the same length")
    return [
        {**(dict(setting) if isinstance(setting, Mapping) else {}), "name": name}
        for name, setting in zip(names, settings, strict=True)
    ]


def _unused(row: Mapping[str, Any]) -> Iterable[str]:
    known_names = {*_IFEVAL, *(name for names in NAMES.values() for name in names)}
    return (str(name) for name in row if name not in known_names)


def _lines(text: str) -> Rows:
    for n, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {n}", {"question": line.strip()}


def _json_rows(text: str) -> Rows:
    for n, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parsed_json(line)
        except ValueError as error:
            yield f"line {n}", f"it is not JSON ({error})"
            continue
        yield f"line {n}", row if isinstance(row, Mapping) else "it is not a JSON object"


def _table(text: str, delimiter: str | None = None) -> Rows:
    delimiter = delimiter or ("\t" if "\t" in text.partition("\n")[0] else ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    columns = [name.strip().lower() for name in next(reader, [])]
    if not set(columns) & set(NAMES["text"]):
        raise ConfigError(
            f"its first line names the columns {', '.join(columns) or '(none)'}: one of them must be 'question'"
        )
    known_names = {name for names in NAMES.values() for name in names}
    if twice := [name for name, count in Counter(columns).items() if count > 1 and name in known_names]:
        raise ConfigError(f"its first line names the column {twice[0]!r} twice: leave one of them out")
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield f"line {reader.line_num}", f"it is no row of a table ({error})"
            continue
        if row is None:
            return
        if len(row) > len(columns):
            yield f"line {reader.line_num}", "it has more cells than the header: put quotes around cells with commas"
        elif any(cell.strip() for cell in row):
            cells = {column: cell for column, cell in zip(columns, row, strict=False) if column}
            yield f"line {reader.line_num}", _split(cells)


def _split(cells: Mapping[str, str]) -> dict[str, Any]:
    """Cells with several references or choices as lists, numbers as numbers."""
    lists = {name for field in LISTS for name in NAMES[field]}
    row: dict[str, Any] = {}
    for name, cell in cells.items():
        row[name] = (
            [part.strip() for part in cell.split(BETWEEN)] if name in lists and BETWEEN in cell else cell.strip()
        )
    if str(row.get("max_tokens", "")).isdecimal():
        row["max_tokens"] = int(row["max_tokens"])
    return row
