"""The report in a real browser: visible text, contrast and reachability; no request leaves the file."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from specfuse_shared.events import EnsembleResult
from specfuse_shared.report.html import document, fragment
from specfuse_shared.types import MemberExit
from tests.support.browser import CHROMIUM, CONTRASTS, DESK, PHONE, SHOWN, shown_card
from tests.support.explained import explained, rival_text

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

MEMBERS = ("smollm2-135m", "gemma3-270m", "a-third-member-with-a-long-name/of-an-organisation", "fourth", "fifth")
TURNS = [
    ("smollm2-135m", "Tides rise and fall because the Moon pulls"),
    ("gemma3-270m", " on the oceans.\n\n1. New moon:"),
    ("a-third-member-with-a-long-name/of-an-organisation", "    indented\tand tabbed <b>text</b>"),
    ("fifth", " 天空是蓝色的，因为蓝光散射得更多。"),
    ("smollm2-135m", "\nالسماء زرقاء"),
]
LEAVING = {2: [MemberExit("fourth", 2, "retention", 0.08)], 5: [MemberExit("fifth", 5, "fault")]}
TIDES = explained(TURNS, MEMBERS, leaving=LEAVING)
LONG = explained([(MEMBERS[i % 2], f" word{i}, and a few more,") for i in range(200)], MEMBERS[:2])


def test_the_page_reads_as_the_answer(opened: Callable[..., Page]) -> None:
    page = opened(document(TIDES, "Why?"))
    assert page.locator(".answer").text_content() == TIDES.text
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.answer'))")
    assert page.evaluate("getSelection().toString()") == TIDES.text
    assert page.locator("h1").inner_text() == "Why?"
    assert page.evaluate("getComputedStyle(document.querySelector('.answer')).whiteSpaceCollapse") == "preserve"
    assert not page.locator(".answer b").count()


def test_pointing_at_a_segment_shows_its_rivals_and_their_scores(opened: Callable[..., Page]) -> None:
    page = opened(document(TIDES))
    assert shown_card(page).startswith("Round 1 of 5")
    page.hover(".s2")
    card = shown_card(page)
    assert card.startswith("Round 2 of 5")
    for name in MEMBERS:
        assert name in card
        assert name == "gemma3-270m" or rival_text(2, name).strip() in card
    for number in ("0.500", "0.750", "0.250", "0.200"):
        assert number in card
    assert "fourth left after round 2: retention 0.080" in card
    page.hover(".eyebrow")
    assert shown_card(page).startswith("Round 1 of 5")


def test_a_click_keeps_a_round_and_arrow_keys_walk_through_them(opened: Callable[..., Page]) -> None:
    page = opened(document(TIDES))
    page.click(".s3")
    page.hover(".eyebrow")
    assert shown_card(page).startswith("Round 3 of 5")
    page.keyboard.press("ArrowRight")
    assert shown_card(page).startswith("Round 4 of 5")


def test_the_keyboard_alone_reaches_every_round(opened: Callable[..., Page]) -> None:
    page = opened(document(TIDES))
    page.keyboard.press("Tab")
    for index in range(1, 6):
        assert shown_card(page).startswith(f"Round {index} of 5")
        assert page.locator(f".s{index}").evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
        page.keyboard.press("ArrowDown")


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_a_rounds_card_stays_within_the_window(opened: Callable[..., Page], viewport: dict[str, int]) -> None:
    page = opened(document(LONG), viewport=viewport)
    for segment in (1, 93, 200):
        page.hover(f".s{segment}")
        assert shown_card(page).startswith(f"Round {segment} of 200")
        box = page.locator(".rounds").bounding_box()
        assert box
        assert 0 <= box["x"] <= box["x"] + box["width"] <= viewport["width"]
        assert 0 <= box["y"] <= box["y"] + box["height"] <= viewport["height"]


def test_a_tap_shows_a_round_and_its_card_can_be_scrolled(opened: Callable[..., Page]) -> None:
    page = opened(document(TIDES), viewport=PHONE, has_touch=True, is_mobile=True)
    page.tap(".s2")
    assert shown_card(page).startswith("Round 2 of 5")
    box = page.locator(".rounds").bounding_box()
    assert box
    assert box["y"] + box["height"] <= PHONE["height"]
    page.tap(".c2 h3")
    assert shown_card(page).startswith("Round 2 of 5")


@pytest.mark.parametrize("result", [TIDES, LONG, explained([("alpha", "x" * 300)])], ids=["tides", "long", "word"])
def test_a_phone_never_scrolls_sideways(opened: Callable[..., Page], result: EnsembleResult) -> None:
    page = opened(document(result, "A question that is long " + "and" * 60), viewport=PHONE)
    page.get_by_text("All numbers by round").click()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(opened: Callable[..., Page], scheme: str) -> None:
    page = opened(document(TIDES, "Why?"), color_scheme=scheme)
    page.get_by_text("All numbers by round").click()
    for index in range(1, 6):
        page.hover(f".s{index}")
        ratios = page.evaluate(CONTRASTS)
        assert len(ratios) > 100
        assert ratios[0][0] >= 4.5, ratios[:5]
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
    assert dark is (scheme == "dark")


NOTEBOOK = """<!doctype html><meta charset=utf-8><style>
.output table {{ color: red; border-collapse: separate }}
.output tbody tr:nth-child(odd) td {{ background: red; text-align: right }}
</style><h2>A notebook</h2><p class="muted card">Text</p><table><tr><td class="num text">1</td></tr></table>
<label class="seg"><input type=radio> x</label><svg><rect class="m0" width=9 height=9 /></svg>
<div class="output">{}</div>"""
STYLES = """() => [...document.querySelectorAll("body > :not(.output), body > :not(.output) *")]
  .map(e => Object.fromEntries([...getComputedStyle(e)].map(name => [name, getComputedStyle(e)[name]])))"""


def test_a_notebook_and_its_report_do_not_change_each_others_style(opened: Callable[..., Page]) -> None:
    without, with_report = (opened(NOTEBOOK.format(html)) for html in ("", fragment(TIDES)))
    before, after = without.evaluate(STYLES), with_report.evaluate(STYLES)
    assert len(before) == len(after) > 8
    assert before == after
    cell = with_report.locator(".roomy tbody td").nth(1)
    alone = opened(document(TIDES)).locator(".roomy tbody td").nth(1)
    for name in ("backgroundColor", "color", "textAlign"):
        styles = [c.evaluate(f"e => getComputedStyle(e).{name}") for c in (cell, alone)]
        assert styles[0] == styles[1]


def test_a_notebooks_theme_precedes_the_systems(opened: Callable[..., Page]) -> None:
    html = f'<body data-jp-theme-light="false">{fragment(TIDES)}</body>'
    report = opened(html, color_scheme="light").locator(".specfuse-report")
    assert report.evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(18, 22, 28)"


def test_two_reports_on_a_page_have_separate_selections(opened: Callable[..., Page]) -> None:
    page = opened(fragment(TIDES) + fragment(explained(TURNS, MEMBERS)))
    page.locator(".s3").nth(0).click()
    page.locator(".s5").nth(1).click()
    page.locator(".eyebrow").nth(0).hover()
    assert [card.partition("\n")[0] for card in page.evaluate(SHOWN)] == ["Round 3 of 5", "Round 5 of 5"]


def test_scripts_are_not_needed(opened: Callable[..., Page]) -> None:
    page = opened(document(TIDES), java_script_enabled=False)
    page.hover(".s4")
    assert page.locator(".c4").is_visible()
    assert not page.locator(".c1").is_visible()
