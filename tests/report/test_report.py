"""The HTML report of a real answer and of special cases; text is never read as HTML."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from specfuse_shared import EnsembleEngine, Message, SamplingParams
from specfuse_shared.events import EnsembleResult
from specfuse_shared.report.html import MAX_DIFFERENCES, SHOWN, fragment, number, pieces_of
from specfuse_shared.types import FinishReason, MemberAbsence, MemberExit
from tests.support.explained import differing, explained, rival_text, round_of, unverified

TIDES = [("alpha", "The tides"), ("beta", " follow the Moon,"), ("alpha", " and the Sun.")]
VOID = {"br", "input", "img", "meta", "link", "hr"}
CELLS = {"dt", "dd", "td", "th", "p", "li", "h3"}


class Page(HTMLParser):
    """Tag, attributes and text of every element; cells and paragraphs are set apart by a space."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag, f"</{tag}> closes another element"
        if tag in CELLS:
            self.handle_data(" ")

    def handle_data(self, data: str) -> None:
        for index in self._open:
            self.elements[index][2].append(data)

    def texts(self, kind: str) -> list[str]:
        """Texts of the elements with this class or tag."""
        return [
            "".join(text)
            for tag, attrs, text in self.elements
            if tag == kind or kind in (attrs.get("class") or "").split()
        ]

    def attributes(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs, _ in self.elements if name in attrs]


def page(result: EnsembleResult, title: str | None = None) -> Page:
    return Page(result.to_html(title))


def words(text: str) -> str:
    return " ".join(text.split())


def cards(result: EnsembleResult) -> list[str]:
    return [words(text) for text in page(result).texts("card")]


# ── a real answer ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def real(tiny_engine: EnsembleEngine) -> EnsembleResult:
    return tiny_engine.generate([Message("user", "How do the tides follow the moon?")], SamplingParams(max_tokens=60))


def test_the_answer_of_a_real_run_is_its_segments_one_a_round(real: EnsembleResult) -> None:
    output = page(real)
    assert output.texts("answer") == [real.text]
    assert output.texts("seg") == [record.text for record in real.rounds]
    assert len(output.texts("card")) == len(real.rounds)


def test_every_round_of_a_real_run_shows_rivals_scores_weights_and_time(real: EnsembleResult) -> None:
    assert any(record.verified for record in real.rounds)
    for record, card in zip(real.rounds, cards(real), strict=True):
        for candidate in record.candidates:
            assert words(candidate.text) in card
            assert all(number(score) in card for score in candidate.scores.values())
            assert candidate.score is None or number(candidate.score) in card
        if record.verified:
            assert all(number(weight) in card for weight in record.weights.values())
        assert "draft" in card


def test_the_summary_and_usage_of_every_member_are_shown(real: EnsembleResult) -> None:
    members, _ = page(real).texts("roomy")
    for row in real.summary():
        usage = real.usage.members[row.member]
        numbers = f"{row.segments_won} {number(row.mean_score)} {number(row.weight)}"
        tokens = f"{usage.prompt} {usage.drafted} {usage.fed} {usage.answer}"
        assert f"{row.member} {numbers} {tokens} to the end" in words(members)


# ── the answer's text ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "segments",
    [
        ["<script>alert(1)</script>", "</style></section>", "&amp; <img src=x onerror=alert(2)>"],
        ["```python\n", "def f(x):\n    return x\t# tab", "\n\n\n", "  end  \n"],
        ["السماء زرقاء", " لأن الضوء", " يتشتت"],
        ["天空是蓝色的，", "因为蓝光", "散射得更多。🌊"],
        ["\n starts with a line end", "\r\nand a carriage return\r", "\u202eturned"],
        ["{{ members }}", "{% raw %}", "{# no comment #}"],
    ],
)
def test_text_stays_exactly_the_text(segments: list[str]) -> None:
    result = explained([(("alpha", "beta")[i % 2], text) for i, text in enumerate(segments)])
    output = page(result)
    assert output.texts("answer") == ["".join(segments)] == [result.text]
    assert output.texts("seg") == segments


def test_nul_becomes_the_replacement_character() -> None:
    assert page(explained([("alpha", "a\0b")])).texts("answer") == ["a\ufffdb"]


HOSTILE = "<script>alert('x')</script>\"'></style>"


def test_text_of_models_and_names_never_becomes_markup() -> None:
    leaving = {1: [MemberExit(f"b{HOSTILE}", 1, "fault")]}
    result = explained([(HOSTILE, HOSTILE)], (HOSTILE, f"b{HOSTILE}"), leaving=leaving, stop_sequence=HOSTILE)
    output = page(result, HOSTILE)
    assert {tag for tag, _, _ in output.elements} == {tag for tag, _, _ in page(explained(TIDES), "plain").elements}
    assert output.texts("answer") == output.texts("h1") == [HOSTILE]
    assert not [name for _, attrs, _ in output.elements for name in attrs if name.startswith("on")]


def test_text_cut_at_a_stop_string_is_not_in_the_answer_but_in_its_round() -> None:
    turns = [("alpha", "Thought: rain."), ("beta", "\nObser"), ("alpha", "vation: none")]
    result = explained(turns, text="Thought: rain.", stop_sequence="\nObservation")
    output = page(result)
    assert output.texts("answer") == ["Thought: rain."]
    assert output.texts("seg") == ["Thought: rain.", "", ""]
    first, second, third = cards(result)
    assert "Cut from the answer" not in first
    assert "Cut from the answer: Obser" in second
    assert "Cut from the answer: vation: none" in third
    assert r'at the stop string "\nObservation"' in words(output.texts("facts")[0])


def test_pieces_equal_the_text_for_any_rounds() -> None:
    gapped = [round_of(1, 2, ("alpha", "cd"), ("alpha",)), round_of(2, 3, ("alpha", "xyz"), ("alpha",))]
    pieces = list(pieces_of("abcdefgh", gapped))
    assert [(piece.text, piece.number) for piece in pieces] == [("ab", 0), ("cd", 1), ("ef", 2), ("gh", 0)]
    assert [(piece.text, piece.number) for piece in pieces_of("ab", [])] == [("ab", 0)]
    assert list(pieces_of("", [])) == []


# ── kinds of rounds and answers ──────────────────────────────────────────────────────────────────


def test_a_card_lists_the_winner_first_and_its_rivals_by_score() -> None:
    card = cards(explained(TIDES, ("alpha", "beta", "gamma")))[1]
    order = [card.index(text) for text in ("follow the Moon,", rival_text(2, "alpha"), rival_text(2, "gamma"))]
    assert order == sorted(order)
    assert card.startswith("Round 2 of 3 3 candidates, judged by 3 members 2 beta ✓ won 7 tokens 0.583")
    assert "Draft ↓ judge → 1 2 3 Score 2 0.500 0.750 0.500 0.583 1 0.750 0.250 0.250 0.417" in card
    assert "Weight 0.333 0.333 0.333" in card
    assert "Retention 1 0.250 2 0.500 3 0.250" in card


def test_a_card_marks_the_candidate_that_repeats() -> None:
    result = explained(TIDES, ("alpha", "beta", "gamma"))
    winner, rival, third = result.rounds[1].candidates
    record = replace(result.rounds[1], candidates=(winner, replace(rival, score=0.0, repeats=True), third))
    before, card, after = cards(replace(result, rounds=(result.rounds[0], record, *result.rounds[2:])))
    assert card.count("7 tokens, repeats what was said 0.000") == 1
    assert "repeats" not in before + after


@pytest.mark.parametrize(
    ("active", "drafters", "tokens", "message"),
    [
        (("alpha", "beta"), ("alpha", "beta"), 5, "all 2 members agreed, no vote was needed"),
        (("alpha", "beta"), ("alpha", "beta"), 0, "forced by the grammar"),
        (("alpha", "beta"), ("alpha",), 5, "the only candidate, no vote was needed"),
        (("alpha",), ("alpha",), 5, "written alone, no vote was needed"),
    ],
)
def test_a_round_without_votes_gives_the_reason(
    active: tuple[str, ...], drafters: tuple[str, ...], tokens: int, message: str
) -> None:
    record = unverified(round_of(1, 0, ("alpha", "Yes."), active), drafters, tokens)
    (card,) = cards(replace(explained([("alpha", "Yes.")]), rounds=(record,)))
    assert message in card
    assert "judge →" not in card
    assert "Retention" not in card


def test_the_savings_of_speculation_are_reported() -> None:
    plain = explained([("alpha", "Yes.")])
    alpha = replace(plain.usage.members["alpha"], forwards=13, answer=20, guessed=9, accepted=5)
    usage = replace(plain.usage, members={**plain.usage.members, "alpha": alpha})
    page = Page(fragment(replace(plain, usage=usage)))
    assert "alpha: 0.65 forward passes per token, 5 of 9 guesses right." in " ".join(page.texts("muted"))


def test_exits_and_faults_name_the_member_the_round_and_the_reason() -> None:
    members = ("alpha", "beta", "gamma", "delta")
    leaving = {
        1: [MemberExit("beta", 1, "retention", 0.125)],
        2: [MemberExit("gamma", 2, "fault")],
        3: [MemberExit("delta", 3, "context")],
    }
    turns = [("alpha", "One,"), ("alpha", " two,"), ("alpha", " three.")]
    result = explained(turns, members, leaving=leaving)
    table = words(page(result).texts("roomy")[0])
    texts = [
        "left after round 1: retention 0.125",
        "left in round 2: it failed",
        "left in round 3: its context was full",
    ]
    for name, why, card in zip(members[1:], texts, cards(result), strict=True):
        assert f"{name} {why}" in card
        assert why in table
    assert table.count("to the end") == 1


def test_one_member_alone_has_no_matrix_weights_or_retention() -> None:
    lone = explained([("alpha", "Alone.")], ("alpha",))
    result = replace(lone, rounds=(unverified(lone.rounds[0], ("alpha",)),))
    assert "judge →" not in cards(result)[0]
    assert [words(text) for text in page(result).texts("figcaption")] == [
        "Time seconds of each round, by stage",
        "Time in all 0.97 s",
    ]


def test_an_empty_answer_is_reported() -> None:
    ended = explained([("alpha", "")])
    assert page(ended).texts("answer") == [""]
    assert "The answer is empty." in ended.to_html()
    nothing = explained([], total_seconds=0.0, first_segment_seconds=None, prefill_seconds=0.0)
    output = page(nothing)
    assert output.texts("answer") == [""]
    assert output.texts("card") == output.texts("figure") == []


def test_two_hundred_rounds_are_drawn_with_few_tick_labels() -> None:
    result = explained([(("alpha", "beta")[i % 3 > 0], f" word{i}") for i in range(200)])
    output = page(result)
    assert output.texts("answer") == [result.text]
    assert len(output.texts("card")) == 200
    assert words(output.texts("ticks")[0]) == "20406080100120140160180200"


# ── charts ───────────────────────────────────────────────────────────────────────────────────────


def bars(result: EnsembleResult, chart: int) -> Iterator[list[tuple[str, float, float]]]:
    """(class, top edge, height) of the bars of each column."""
    plot = result.to_html().split('<div class="plot"')[chart + 1].partition("</svg>")[0]
    for column in plot.split("<g>")[1:]:
        results = re.findall(
            r'<rect class="(?!ground)([^"]+)" x="[^"]+" y="([^"]+)" width="[^"]+" height="([^"]+)"', column
        )
        yield [(css, float(y), float(height)) for css, y, height in results]


def test_columns_stack_the_weights_and_retention_of_active_members() -> None:
    leaving = {2: [MemberExit("gamma", 2, "retention", 0.2)]}
    result = explained(TIDES, ("alpha", "beta", "gamma"), leaving=leaving)
    for chart, numbers in ((0, [r.weights for r in result.rounds]), (1, [r.retention for r in result.rounds])):
        columns = list(bars(result, chart))
        assert [len(column) for column in columns] == [3, 3, 2]
        for column, parts in zip(columns, numbers, strict=True):
            assert [height for _, _, height in column] == pytest.approx(list(parts.values()), abs=1e-3)
            assert column[0][1] + column[0][2] == pytest.approx(1, abs=1e-3)
            for below, above in itertools.pairwise(column):
                assert above[1] + above[2] == pytest.approx(below[1], abs=1e-3)


def test_the_time_of_each_stage_is_shown_by_round_and_in_all() -> None:
    result = explained(TIDES)
    assert [css for css, _, _ in next(bars(result, 2))] == ["draft", "verify"]
    output = page(result)
    assert "Round 2: draft 0.25 s, verify 0.12 s" in output.texts("title")
    assert "prefill 0.50 s draft 0.75 s verify 0.38 s other 0.10 s" in words(output.texts("legend")[1])
    head, *rows = map(words, output.texts("roomy")[-1].split("Exits"))
    assert head == "Round Written by Score Weights Retention Draft Verify"
    assert rows[0].count("0.25 s 0.12 s") == len(result.rounds)
    facts = words(output.texts("facts")[0])
    assert "First segment 0.88 s prompt read in 0.50 s" in facts
    assert "Tokens 40 after a prompt of 31 Time 1.73 s 23.2 tokens/s" in facts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "stop the answer was complete"),
        ({"finish_reason": FinishReason.LENGTH}, "length max_tokens or context reached"),
        ({"finish_reason": FinishReason.REPETITION}, "repetition it could only say the same again"),
        ({"stop_sequence": "END"}, 'stop at the stop string "END"'),
        ({"seed": 7}, "3 verified, seed 7"),
    ],
)
def test_the_facts_have_the_finish_reason(changes: dict[str, object], message: str) -> None:
    assert message in words(page(explained(TIDES, **changes)).texts("facts")[0])


# ── one file, one element ────────────────────────────────────────────────────────────────────────


def test_the_file_loads_nothing_from_outside() -> None:
    html = explained(TIDES).to_html("Why?")
    assert html.startswith("<!doctype html>")
    output = Page(html)
    assert {tag for tag, _, _ in output.elements} & {"script", "link", "img", "iframe", "object"} == set()
    assert not re.search(r"@import|url\(|https?:", html)
    assert not output.attributes("src")
    assert not output.attributes("href")
    assert output.texts("title")[0] == "Why? · SpecFuse report"
    assert "default-src 'none'" in html, "nothing from outside can be loaded either"


def test_a_notebook_gets_one_element_with_scoped_styles() -> None:
    html = explained(TIDES)._repr_html_()
    assert html == fragment(explained(TIDES))
    assert html.startswith('<section class="specfuse-report">')
    assert html.endswith("</section>")
    assert not re.search(r"<(html|head|body|h1)[ >]", html)
    (outside,) = Page(html).texts("style")
    while "{" in outside:
        outside = re.sub(r"\{[^{}]*\}", ";", outside)
    assert {rule.strip()[:39] for rule in outside.split(";")} == {":is(.specfuse-report, #specfuse-report)", ""}


def test_reports_of_two_answers_have_separate_selections() -> None:
    one, second = (set(page(explained(TIDES, seed=seed)).attributes("name")) for seed in (1, 2))
    assert one & second == {"viewport", "generator"}


def test_the_types_need_no_template_engine_before_a_report() -> None:
    code = "import sys, specfuse_shared; specfuse_shared.EnsembleResult; print('jinja2' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_differences_are_listed_with_each_members_words() -> None:
    weights = {"alpha": 0.5, "beta": 0.3, "gamma": 0.2}
    drafts = {"beta": "In 1968 <b>Buzz</b> went…", "gamma": "In 1969 <b>Neil</b> ran…"}
    output = page(differing([("In 1969 <b>Neil</b> went", drafts)], weights, over=True))
    [section] = output.texts("differences")
    assert words(section) == (
        "In the answer Instead Agree Round "
        "In 1969 <b>Neil</b> went 2 beta “1968” weight 0.300, score 0.250 0.700 1 "
        "In 1969 <b>Neil</b> went 2 beta “Buzz” weight 0.300, score 0.250 0.700 1 "
        "In 1969 <b>Neil</b> went 3 gamma “ran” and the end weight 0.200, score 0.250 0.800 1"
    )
    assert output.texts("mark") == ["1969", "Neil", "went"]
    assert output.texts("number") == ["1969"]
    assert page(explained([("alpha", " one")], ("alpha",))).texts("differences") == []


def test_further_differences_are_collapsed_and_the_least_important_left_out() -> None:
    rounds = [(f" same w{n}", {"beta": f" same x{n}"}) for n in range(MAX_DIFFERENCES + 3)]
    output = page(differing(rounds, {"alpha": 0.75, "beta": 0.25}))
    assert [text.count("beta") for text in output.texts("differences")] == [SHOWN, MAX_DIFFERENCES - SHOWN]
    assert f"{MAX_DIFFERENCES - SHOWN} more" in words(output.texts("details")[0])
    assert "3 less important ones are left out." in words(output.texts("details")[0])


def test_fields_are_listed_with_their_alternatives() -> None:
    rounds = [('{"n": 42, "to": ["<b>"]}', {"beta": '{"n": 41, "to": ["<i>"]}'})]
    html = differing(rounds, {"alpha": 0.75, "beta": 0.25}, over=True).to_html()
    _, _, fields = html.partition("Field by field")
    assert '<th scope="row">$.n</th>' in fields
    assert "$.to[0]" in fields
    assert "&#34;&lt;b&gt;&#34;" in fields
    assert "&#34;&lt;i&gt;&#34;" in fields
    assert "<i>" not in fields


def test_a_growing_answer_lists_no_differences_yet() -> None:
    answer = differing([("It is 42", {"beta": "It is 41"})], {"alpha": 0.75, "beta": 0.25})
    assert "Where members differ" in fragment(answer)
    assert "Where members differ" not in fragment(answer, running=True)


def test_reasoning_is_shown_as_text_after_the_answer() -> None:
    result = explained([("alpha", "Yes."), ("beta", " No.")], thinking={"beta": "Is it <b>so</b>?"})
    html = result.to_html()
    assert "What" in html
    assert "thought before it answered" in html
    assert "Is it &lt;b&gt;so&lt;/b&gt;?" in html
    assert "thought before" not in explained([("alpha", "Yes.")]).to_html()


def test_the_report_names_late_members_with_their_rounds_and_exits() -> None:
    result = explained(TIDES, leaving={3: [MemberExit("beta", 3, "late")]})
    first, second, third = result.rounds
    rounds = (
        replace(unverified(first, ["alpha"]), absent=(MemberAbsence("beta", "draft", 5),)),
        replace(second, active=("alpha", "beta", "gamma"), absent=(MemberAbsence("gamma", "verify", 5),)),
        replace(unverified(third, ["alpha"]), absent=(MemberAbsence("beta"),)),
    )
    page = Page(replace(result, rounds=rounds).to_html())
    cards = [" ".join(text.split()) for text in page.texts("card")]
    assert "written by the only member that was on time, no vote was needed" in cards[0]
    assert "beta sat this round out: late with its draft" in cards[0]
    assert "gamma sat this round out: late with its verdicts" in cards[1]
    assert "2 candidates, judged by 2 members" in cards[1]
    assert "beta sat this round out: still at work for an earlier round" in cards[2]
    [row] = [" ".join(text.split()) for text in page.texts("tr") if "late in" in text]
    assert "left in round 3: it stayed late; late in 2 rounds" in row
