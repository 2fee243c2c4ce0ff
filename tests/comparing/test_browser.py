"""The report and the voting page in a real browser: filters, keys, contrast, width, and nothing from outside."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page

from specfuse_shared.comparing import ENSEMBLE, Comparison, votes_on
from specfuse_shared.comparing.pages.voting import pairs_of
from tests.comparing.comparisons import answer, made
from tests.support.browser import CHROMIUM, CONTRASTS, PHONE

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

GOOD, BAD = "the sea", "a bird <b>flies</b> & sings 天空"
LONG = "a-member-with-a-long-name/of-an-organisation"


def comparison() -> Comparison:
    """On twelve questions each, the ensemble equals its best member, is worse, and is better; two members wrote it."""
    result = made(
        {"one": [GOOD] * 24 + [BAD] * 12, LONG: [BAD] * 36, ENSEMBLE: ([GOOD] * 12 + [BAD] * 12) * 1 + [GOOD] * 12}
    )
    ours = {
        name: answer(each.text, [("one", each.text[:3]), (LONG, each.text[3:])])
        for name, each in result.answers[ENSEMBLE].items()
    }
    return replace(result, answers={**result.answers, ENSEMBLE: ours}, remarks=("line 7 is left out: <i>no</i> JSON",))


def test_the_verdict_is_first_and_text_is_not_interpreted_as_html(opened: Callable[..., Page]) -> None:
    result = comparison()
    page = opened(result.to_html(), java_script_enabled=False)
    assert page.locator("h1").inner_text() == result.verdict.headline
    assert page.locator(".said b").count() == 0
    assert "line 7 is left out: <i>no</i> JSON" in page.locator("main").inner_text()


def test_filters_show_the_questions_that_they_name_without_scripts(opened: Callable[..., Page]) -> None:
    page = opened(comparison().to_html(), java_script_enabled=False)
    rows = page.locator(".row:visible")
    assert rows.count() == 36
    for label, count in (("it is worse (12)", 12), ("the ensemble is better than the best member (12)", 12)):
        page.get_by_label(label).check()
        assert rows.count() == count
    page.get_by_label("all (36)").check()
    assert rows.count() == 36


def test_an_answer_has_its_authors_colours(opened: Callable[..., Page]) -> None:
    page = opened(comparison().to_html())
    pieces = page.locator("#q1 .ours .seg")
    assert pieces.all_inner_texts() == ["the", " sea"]
    assert [p.get_attribute("title") for p in pieces.all()] == ["one", LONG]
    grounds = [p.evaluate("e => getComputedStyle(e).textDecorationColor") for p in pieces.all()]
    assert len(set(grounds)) == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(opened: Callable[..., Page], scheme: str) -> None:
    result = comparison()
    for html in (result.to_html(), result.to_voting_page()):
        page = opened(html, color_scheme=scheme)
        page.add_style_tag(content=".row { content-visibility: visible !important }")
        ratios = page.evaluate(CONTRASTS)
        assert len(ratios) > 10
        assert ratios[0][0] >= 4.5, ratios[:5]


def test_both_pages_fit_a_phone(opened: Callable[..., Page]) -> None:
    for html in (comparison().to_html(), comparison().to_voting_page()):
        page = opened(html, viewport=PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_the_report_prints_without_filters_and_with_whole_answers(opened: Callable[..., Page]) -> None:
    page = opened(comparison().to_html())
    page.emulate_media(media="print")
    assert not page.locator(".filters").is_visible()
    assert page.locator(".said").first.evaluate("e => getComputedStyle(e).maxBlockSize") == "none"


def test_votes_by_keyboard_are_in_the_saved_copy(opened: Callable[..., Page], tmp_path: Path) -> None:
    output = comparison()
    pairs = pairs_of(output)
    page = opened(output.to_voting_page())
    assert page.locator("#place").inner_text() == f"1 of {len(pairs)}, 0 voted"
    assert page.locator("#left").inner_text() == pairs[0].left
    for pair in pairs[:20]:
        page.keyboard.press({"left": "ArrowLeft", "right": "ArrowRight"}[pair.ours])
    page.keyboard.press("Backspace")
    assert page.locator("#place").inner_text() == f"20 of {len(pairs)}, 20 voted"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("r")
    result = page.locator("#result").inner_text()
    assert re.match(r"Of 19 votes between them the ensemble won 19, 100 % \[83, 100\], one 0; 1 equal: the", result)
    with page.expect_download() as download:
        page.keyboard.press("s")
    saved = tmp_path / "saved.html"
    download.value.save_as(saved)
    votes = votes_on(saved)
    assert votes == {**{p.key: p.ours for p in pairs[:19]}, pairs[19].key: "equal"}
    counted = output.with_votes(votes).votes
    assert counted is not None
    assert (counted.ours, counted.theirs, counted.equal) == (19, 0, 1)
    again = opened(saved.read_text("utf-8"))
    assert again.locator("#place").inner_text() == f"21 of {len(pairs)}, 20 voted"


def test_votes_by_buttons_are_counted(opened: Callable[..., Page]) -> None:
    page = opened(comparison().to_voting_page())
    page.get_by_role("button", name="Right →").click()
    page.get_by_role("button", name="Back ⌫").click()
    assert page.locator("#vote-right").get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="Result").click()
    assert page.locator("#result").inner_text().startswith("Of 1 votes between them")
