"""The verifiable instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911), checked from their description.

`lm-eval` has the original checks, but includes a harness and downloads sentence models at import. Here a sentence ends
at a full stop, question or exclamation mark, and a word is a run of letters, digits and apostrophes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specfuse_shared.comparing.libraries import library
from specfuse_shared.errors import ConfigError
from specfuse_shared.validation import check_choice

Check = Callable[..., bool]


def followed(answer: str, instructions: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the answer follows every instruction (strict, by prompt). An empty answer follows none.

    An instruction has a `name` and arguments, such as `{"name": "length_constraints:number_words",
    "num_words": 20, "relation": "less than"}`.
    """
    return bool(answer.strip()) and all(_follows(answer, instruction) for instruction in instructions)


def check_instruction(instruction: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for an instruction that cannot be checked."""
    if not isinstance(instruction, Mapping) or "name" not in instruction:
        raise ConfigError(f"an instruction is a mapping with its name, not {instruction!r}")
    check_choice("an instruction's name", instruction["name"], tuple(CHECKS))
    for name in ("keywords", "forbidden_words"):
        if not isinstance(instruction.get(name) or [], Sequence) or isinstance(instruction.get(name), str):
            raise ConfigError(f"{name} must be a list of words, not {instruction[name]!r}")
    try:
        _follows("A word.", instruction)
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"the instruction {instruction['name']!r} cannot be checked: {error}") from error


def _follows(answer: str, instruction: Mapping[str, Any]) -> bool:
    arguments = {key: value for key, value in instruction.items() if key != "name" and value is not None}
    return CHECKS[instruction["name"]](answer, **arguments)


def _relates(count: int, relation: str, bound: int) -> bool:
    check_choice("the relation", relation, ("less than", "at least"))
    return count < bound if relation == "less than" else count >= bound


def _words(text: str) -> list[str]:
    return re.findall(r"[\w'’]+", text)


def _count(word: str, text: str) -> int:
    return len(re.findall(rf"\b{re.escape(word)}\b", text, re.IGNORECASE))


def _is_language(text: str, language: str) -> bool:
    detector = library("langdetect")
    detector.DetectorFactory.seed = 0
    try:
        return bool(detector.detect(text) == language)
    except detector.LangDetectException:  # only digits and punctuation
        return True


def _sentences(text: str) -> int:
    return len([s for s in re.split(r"(?<=[.!?。！？।])[\"'”’)]*\s+", text.strip()) if re.search(r"\w", s)])


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text.strip())
    inner = parts[bool(not parts[0].strip()) : len(parts) - bool(not parts[-1].strip())]
    return len(inner) == num_paragraphs and all(p.strip() for p in inner)


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [p.strip() for p in re.split(r"\n\n+", text) if p.strip()]
    if len(parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    words = _words(parts[nth_paragraph - 1])
    return bool(words) and words[0].lower() == first_word.lower()


def _is_json(text: str) -> bool:
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text.strip(), re.DOTALL | re.IGNORECASE)
    try:
        json.loads(fenced[1] if fenced else text)
    except ValueError:
        return False
    return True


def _two_responses(text: str) -> bool:
    parts = [p.strip() for p in text.split("******")]
    parts = parts[bool(not parts[0]) : len(parts) - bool(not parts[-1])]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _highlights(text: str, num_highlights: int) -> bool:
    matches = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)
    return sum(any(part.strip() for part in pair) for pair in matches) >= num_highlights


def _quoted(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare.startswith('"') and bare.endswith('"')


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda t, keywords: all(k.lower() in t.lower() for k in keywords),
    "keywords:frequency": lambda t, keyword, frequency, relation: _relates(
        t.lower().count(keyword.lower()), relation, frequency
    ),
    "keywords:forbidden_words": lambda t, forbidden_words: not any(_count(w, t) for w in forbidden_words),
    "keywords:letter_frequency": lambda t, letter, let_frequency, let_relation: _relates(
        t.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": lambda t, language: _is_language(t, language),
    "length_constraints:number_sentences": lambda t, num_sentences, relation: _relates(
        _sentences(t), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda t, num_words, relation: _relates(len(_words(t)), relation, num_words),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda t, num_placeholders: (
        len(re.findall(r"\[.*?\]", t)) >= num_placeholders
    ),
    "detectable_content:postscript": lambda t, postscript_marker: (
        re.search(rf"^\s*{re.escape(postscript_marker)}", t, re.IGNORECASE | re.MULTILINE) is not None
    ),
    "detectable_format:number_bullet_lists": lambda t, num_bullets: (
        len(re.findall(r"^\s*(?:\*(?!\*)|-)\s*\S", t, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda t: any(
        f"My answer is {word}." in t for word in ("yes", "no", "maybe")
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda t, section_spliter, num_sections: (
        len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", t)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda t: any(m.strip() for m in re.findall(r"<<([^\n]+?)>>", t)),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda t, prompt_to_repeat: (
        t.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda t, end_phrase: t.strip().strip('"').lower().endswith(end_phrase.strip().lower()),
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": lambda t, capital_frequency, capital_relation: _relates(
        sum(w.isupper() for w in _words(t)), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda t: t.isupper() and _is_language(t.lower(), "en"),
    "change_case:english_lowercase": lambda t: t.islower() and _is_language(t, "en"),
    "punctuation:no_comma": lambda t: "," not in t,
}
