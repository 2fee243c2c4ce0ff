"""Questions with optional references, passages, choices and verifiable instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from specfuse_shared.comparing.instructions import check_instruction
from specfuse_shared.comparing.metrics import number_in
from specfuse_shared.config import SamplingParams
from specfuse_shared.errors import ConfigError
from specfuse_shared.text.grammars.grammar import Grammar
from specfuse_shared.validation import Settings, check, check_choice, listed, tuple_of, validated

MOST_TOKENS = {"open": 160, "short": 32, "text": 128, "number": 128, "choice": 8, "instructions": 160}
"""Kind → default of `max_tokens`."""
KINDS = tuple(MOST_TOKENS)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FEW_WORDS = 6
"""References of at most this number of words are short answers."""
_PLEAS = {"short": "Answer the question with a few words."}
_ENDINGS = {
    "number": "Think step by step and end with the number that answers the question.",
    "choice": "Answer with the letter of the right choice.",
}
Text = Annotated[str, Field(coerce_numbers_to_str=True, strict=False)]
Texts = Annotated[
    Sequence[str],
    tuple_of(Text),
    BeforeValidator(listed),
    AfterValidator(lambda texts: tuple(filter(str.strip, texts))),
]
"""Texts without empty ones."""


@validated
class Question(Settings):
    """One question, with how its answers are scored."""

    text: str
    """The question itself."""
    id: Text = ""
    """Name of the question in records; a number if unset."""
    references: Texts = ()
    """Good answers; for a choice, the right one."""
    passage: str = ""
    """A text to answer from; it precedes the question in the prompt."""
    choices: Texts = ()
    """Answers to choose from."""
    instructions: Annotated[Sequence[Mapping[str, Any]], tuple_of(Mapping[str, Any])] = ()
    """Instructions that a program can check (`specfuse_shared.comparing.instructions`)."""
    kind: str | None = None
    """How answers are scored: "short" (F1, contains), "text" (ROUGE-L, or chrF in other languages), "number",
    "choice", "instructions", or "open" (not at all). Inferred if unset."""
    group: Text | None = None
    """Name of the group of rows that are averaged together; `kind` if unset."""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """The most tokens of an answer, counted by the reference member; the default of its kind if unset."""

    def __post_init__(self) -> None:
        check(bool(self.text.strip()), "the question is empty")
        for instruction in self.instructions:
            check_instruction(instruction)
        object.__setattr__(self, "kind", self.kind or self._kind())
        check_choice("the question's kind", self.kind, KINDS)
        object.__setattr__(self, "group", self.group or self.kind)
        self._check_kind()

    def _kind(self) -> str:
        if self.instructions:
            return "instructions"
        if self.choices:
            return "choice"
        if not self.references:
            return "open"
        if not self.passage and all(number_in(text, whole=True) is not None for text in self.references):
            return "number"
        return "short" if all(len(text.split()) <= FEW_WORDS for text in self.references) else "text"

    def _check_kind(self) -> None:
        """Check that the kind's required fields exist."""
        if self.kind == "instructions":
            check(bool(self.instructions), "a question of instructions has none: add instructions")
        elif self.kind != "open":
            check(bool(self.references), f"a question of kind {self.kind!r} needs references")
        if self.kind == "choice":
            check(2 <= len(self.choices) <= len(LETTERS), f"there are {len(self.choices)} choices: 2 to {len(LETTERS)}")
            check(len(set(self.choices)) == len(self.choices), "a choice occurs twice")
            check_choice("the reference", self.references[0], self.choices)
        if self.kind == "number":
            for text in self.references:
                check(number_in(text, whole=True) is not None, f"the reference {text!r} is no number")

    @property
    def scored(self) -> bool:
        """Whether an answer can be right or wrong."""
        return self.kind != "open"

    @property
    def letter(self) -> str:
        """The letter of the right choice."""
        return LETTERS[self.choices.index(self.references[0])]

    @property
    def asked(self) -> str:
        """The question with its choices."""
        return self.text + "".join(f"\n{letter}. {text}" for letter, text in zip(LETTERS, self.choices, strict=False))

    @property
    def prompt(self) -> str:
        """The prompt that members see, verbatim."""
        kind = self.kind or ""
        plea = _PLEAS.get(kind, "") if self.passage else ""
        parts = (plea, self.passage, self.asked, _ENDINGS.get(kind, ""))
        return "\n\n".join(part for part in parts if part)

    def params(self, max_tokens: int | None = None) -> SamplingParams:
        """The sampling of an answer: greedy, and for choices with a grammar of their letters.

        Args:
            max_tokens: The most tokens of the answer, instead of the question's or its kind's limit.

        Returns:
            The parameters.

        Example:
            ```python
            from specfuse_shared.comparing import Question

            print(Question("Which planet is the largest?", references=["Jupiter"]).params().max_tokens)
            ```
        """
        grammar = Grammar.choice(list(LETTERS[: len(self.choices)])) if self.kind == "choice" else None
        limit = MOST_TOKENS[self.kind or "open"]
        longest = self.max_tokens or (max(max_tokens, limit) if max_tokens and grammar else max_tokens) or limit
        return SamplingParams(max_tokens=longest, grammar=grammar)


def numbered(questions: Sequence[Question]) -> tuple[list[Question], list[str]]:
    """The questions with unique ids and without duplicates, and remarks about changes."""
    by_id: dict[str, Question] = {}
    first_text: dict[str, str] = {}
    remarks: list[str] = []
    for n, question in enumerate(questions, 1):
        name = question.id or str(n)
        if (earlier := first_text.get(question.prompt)) is not None:
            remarks.append(f"question {name!r} is the same as {earlier!r}: it is asked once")
            continue
        fresh, more = name, 2
        while fresh in by_id:
            fresh, more = f"{name}-{more}", more + 1
        if fresh != name:
            remarks.append(f"two questions have the id {name!r}: the second one is called {fresh!r}")
        by_id[fresh] = replace(question, id=fresh)
        first_text[question.prompt] = fresh
    if not by_id:
        raise ConfigError("there are no questions: give at least one")
    return list(by_id.values()), remarks
