"""The page in a real browser: its visible text, its controls, its Stop button, and its content policy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from specfuse_shared import EnsembleEngine, SamplingParams
from specfuse_shared.agreement import differences_of
from specfuse_shared.api_server.models import Models
from specfuse_shared.api_server.page import FILES
from specfuse_shared.loading.progress import LoadProgress
from specfuse_shared.report.html import MAX_DIFFERENCES, NOTHING, SHOWN
from tests.support.browser import CHROMIUM, CONTRASTS, DESK, PHONE, shown_card
from tests.support.serving import reciting, serving, until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


DIFFERENT = [
    [
        "In July 1969 Neil Armstrong walked there.",
        "In July 1969 Armstrong walked there. It was Neil",
        "In July 1968 Buzz walked",
    ],
    ["- Ships: 1,969 of NASA's\n2. I'm sure, McDonald", "1969 ships; im Hafen", ""],
    ["東京タワー 333 m 🎉", "Город Киев стоит", "naïve café_au 3.5-fold"],
    ["a.b.c x’y", "A.B.C", "٣ ships"],
    ['They read "the white whale" and “dune”', "E-mail of the U.S.: −5 °C, 1914-1918", "email of the US: 5 °C, -5"],
]
COLOURS = """() => [...document.querySelectorAll("#report .seg:not(:has(:checked))")]
  .map(s => [s.className.match(/m\\d/)[0], getComputedStyle(s).backgroundColor])"""


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, EnsembleEngine]]:
    """A server whose answers repeat themselves until they are stopped, and its engine."""
    with (
        EnsembleEngine(reciting(tmp_path_factory.mktemp("endless"), endless=True)) as engine,
        serving({"endless": engine}) as client,
    ):
        yield client, engine


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """`opened(client, **context)` → the page; afterwards its console must be empty, with no request to another host."""
    complaints: list[str] = []
    elsewhere: list[str] = []
    contexts = []

    def open_page(client: httpx.Client, expected: str = "Ready", **settings: Any) -> Page:
        contexts.append(browser.new_context(**{"viewport": DESK, **settings}))
        page, address = contexts[-1].new_page(), str(client.base_url)
        page.on("console", lambda m: complaints.append(m.text) if "Failed to load resource" not in m.text else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request", lambda r: elsewhere.append(r.url) if not r.url.startswith((address, "data:", "blob:")) else None
        )
        page.goto(address)
        expect(page.locator("#status")).to_have_text(expected)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert elsewhere == []


def segments(page: Page) -> int:
    return page.locator("#report .seg").count()


def ask(page: Page, question: str = "Why is the sea salty?", tokens: int = 24) -> None:
    page.fill("#question", question)
    page.fill("#tokens", str(tokens))
    page.click("#send")


def test_the_page_shows_an_answer_as_it_is_generated(
    opened: Callable[..., Page], endless: tuple[httpx.Client, EnsembleEngine]
) -> None:
    page = opened(endless[0])
    ask(page, tokens=3000)
    for _ in range(3):
        count = max(1, segments(page))
        until(lambda before=count: segments(page) > before)
        assert page.locator("#report .facts dd").first.inner_text() == "not yet"
        assert page.locator("#status").inner_text() == "The members are writing …"
        assert shown_card(page).startswith("Round ")
        assert not shown_card(page).startswith("Round 1\n"), "the newest round is the one to see"
    page.keyboard.press("Escape")


def test_an_answer_is_in_its_members_colours(opened: Callable[..., Page], client: httpx.Client) -> None:
    page = opened(client)
    ask(page, tokens=300)
    expect(page.locator("#status")).to_have_text("Finished", timeout=120_000)
    assert page.locator("#report .facts dd").first.inner_text() in ("length", "stop")
    assert page.locator("#asked").inner_text() == "Why is the sea salty?"
    answer = page.locator("#report .answer").text_content()
    assert answer == (page.locator("#spoken").text_content() or "").replace("\0", "\ufffd")  # which HTML cannot hold
    colours = page.evaluate(COLOURS)
    assert {member for member, _ in colours} == {"m0", "m1"}, "both members wrote"
    assert len({ground for _, ground in colours}) == 2, "each member has another colour"
    for heading in ("Weights", "Time", "Members"):
        assert page.locator("#report").get_by_text(heading, exact=True).first.is_visible()


def test_the_page_continues_a_conversation(opened: Callable[..., Page], client: httpx.Client) -> None:
    page = opened(client)
    requests: list[list[dict[str, str]]] = []
    page.on("request", lambda r: requests.append(r.post_data_json["messages"]) if r.method == "POST" else None)
    assert not page.locator("#follow-field").is_visible()
    page.locator("form summary").click()
    page.fill("#system", "Be brief.")
    answers = []
    for question in ("Who?", "And when?"):
        ask(page, question, tokens=8)
        expect(page.locator("#status")).to_have_text("Finished")
        answers.append(page.locator("#spoken").text_content() or "")
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}
    assert requests[0] == [system, user]
    assert requests[1][:2] == requests[0]
    assert requests[1][2]["role"] == "assistant"
    assert requests[1][2]["content"].strip() == answers[0].strip()
    assert requests[1][3] == {"role": "user", "content": "And when?"}
    assert page.locator("#before li").all_text_contents()[0] == "Who?"
    page.get_by_label("Go on from this answer").uncheck()
    ask(page, "Something else?", tokens=8)
    expect(page.locator("#status")).to_have_text("Finished")
    assert requests[2] == [system, {"role": "user", "content": "Something else?"}]
    assert page.locator("#before li").count() == 0
    page.locator("#history button").last.click()
    page.get_by_label("Go on from this answer").check()
    ask(page, "Whose?", tokens=8)
    expect(page.locator("#status")).to_have_text("Finished")
    assert [turn["content"] for turn in requests[3] if turn["role"] == "user"] == ["Who?", "Whose?"]


def test_a_segments_card_opens_by_mouse_and_by_keyboard(opened: Callable[..., Page], client: httpx.Client) -> None:
    page = opened(client)
    ask(page, tokens=40)
    expect(page.locator("#status")).to_have_text("Finished")
    count = page.locator(".seg").count()
    assert count > 3
    page.hover(".s2")
    assert shown_card(page).startswith(f"Round 2 of {count}")
    assert "chat" in shown_card(page)
    page.click(".s3")
    page.hover("h1")
    assert shown_card(page).startswith("Round 3")
    page.focus("#question")
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.seg input')"):
            break
    assert shown_card(page).startswith("Round 3")
    page.keyboard.press("ArrowLeft")
    assert shown_card(page).startswith("Round 2")
    assert page.locator(".s2").evaluate("e => getComputedStyle(e).outlineStyle") == "solid"


def test_a_chosen_round_stays_chosen_while_the_answer_grows(
    opened: Callable[..., Page], endless: tuple[httpx.Client, EnsembleEngine]
) -> None:
    page = opened(endless[0])
    ask(page, tokens=3000)
    until(lambda: segments(page) > 3)
    page.locator(".s1 input").evaluate("e => { e.focus(); e.click() }")
    count = page.locator(".seg").count()
    until(lambda: segments(page) > count)
    assert page.evaluate("document.activeElement.matches('.s1 input') && document.activeElement.checked")
    page.keyboard.press("Escape")


@pytest.mark.parametrize("how", ["button", "key"])
def test_stopping_stops_the_compute(
    opened: Callable[..., Page], endless: tuple[httpx.Client, EnsembleEngine], how: str
) -> None:
    client, engine = endless
    until(lambda: engine.metrics().running == 0)
    page, cancelled = opened(client), engine.metrics().requests["cancelled"]
    ask(page, tokens=3000)
    until(lambda: segments(page) > 1)
    assert engine.metrics().running == 1
    page.click("#stop") if how == "button" else page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped: the members compute no more")
    until(lambda: engine.metrics().running == 0, 5)
    assert engine.metrics().requests["cancelled"] == cancelled + 1
    assert page.locator("#report .facts dd").first.inner_text() == "stopped"
    assert page.locator("#report .seg").count() > 1
    assert page.locator("#send").is_enabled()


def test_an_error_is_shown(opened: Callable[..., Page], client: httpx.Client) -> None:
    page = opened(client)
    ask(page, "sea " * 5000)
    expect(page.locator("#problem")).to_contain_text("maximum context length is 4096")
    assert page.locator("#problem").get_attribute("role") == "alert"
    ask(page, "Hi", 4)
    expect(page.locator("#status")).to_have_text("Finished")
    expect(page.locator("#problem")).to_be_hidden()


def test_text_of_people_and_models_is_text(opened: Callable[..., Page], client: httpx.Client) -> None:
    page = opened(client)
    evil = '<img src=x onerror=alert(1)><script>alert(2)</script> style="x" {{7*7}}'
    ask(page, evil, 8)
    expect(page.locator("#status")).to_have_text("Finished")
    assert page.locator("#asked").inner_text() == evil
    assert page.locator("nav button").first.inner_text().startswith(evil)
    assert page.locator("main img, main script").count() == 0


def test_history_shows_reports_again_and_saves_them_as_files(
    opened: Callable[..., Page], client: httpx.Client, tmp_path: Path
) -> None:
    page = opened(client)
    texts = []
    for question in ("Why is the sea salty?", "What is a tide?"):
        ask(page, question, 16)
        expect(page.locator("#status")).to_have_text("Finished")
        expect(page.locator("#asked")).to_have_text(question)
        texts.append(page.locator("#report .answer").text_content())
    page.get_by_role("button", name="Why is the sea salty?").click()
    expect(page.locator("#asked")).to_have_text("Why is the sea salty?")
    assert page.locator("#report .answer").text_content() == texts[0]
    assert page.locator("#asked").evaluate("e => e === document.activeElement")
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "answer.html")
    saved = (tmp_path / "answer.html").read_text("utf-8")
    assert saved.startswith("<!doctype html>")
    assert '<h1 dir="auto">Why is the sea salty?</h1>' in saved


def test_the_page_shows_loading_and_readiness(
    opened: Callable[..., Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EnsembleEngine(reciting(tmp_path)) as engine:
        models, begun, go_on = Models({"two": engine}), threading.Event(), threading.Event()
        observe = models._observe

        def hold(ensemble: str, progress: LoadProgress) -> None:
            observe(ensemble, progress)
            if progress.stage == "reading the weights":
                begun.set()
                go_on.wait(30)

        monkeypatch.setattr(models, "_observe", hold)
        with serving(models) as client:
            thread = threading.Thread(target=models.load)
            thread.start()
            assert begun.wait(30)
            page = opened(client, "Loading: two: ann (1 of 2): reading the weights")
            assert page.locator("#send").is_disabled()
            go_on.set()
            expect(page.locator("#status")).to_have_text("Ready", timeout=20_000)
            thread.join()
            ask(page, tokens=8)
            expect(page.locator("#status")).to_have_text("Finished")


def test_the_page_asks_for_a_key_if_the_server_needs_one(opened: Callable[..., Page], tiny: EnsembleEngine) -> None:
    with serving({"tiny": tiny}, key="open sesame") as client:
        page = opened(client, "A key is needed")
        page.fill("#key", "open sesame")
        page.keyboard.press("Tab")
        expect(page.locator("#status")).to_have_text("Ready")
        ask(page, tokens=8)
        expect(page.locator("#status")).to_have_text("Finished")


def test_differences_between_members_are_listed_after_the_answer(
    opened: Callable[..., Page], client: httpx.Client, tiny: EnsembleEngine
) -> None:
    page = opened(client)
    running: list[str] = page.evaluate(
        """() => { window.seen = []; new MutationObserver(() => {
          if (document.querySelector("#report .facts dd")?.innerText === "not yet")
            window.seen.push(...document.querySelectorAll("#report .differences"));
        }).observe(document.getElementById("report"), { childList: true, subtree: true }); return window.seen }"""
    )
    ask(page, tokens=80)
    expect(page.locator("#status")).to_have_text("Finished")
    assert running == page.evaluate("window.seen") == []
    expect(page.get_by_role("heading", name="Where members differ")).to_be_visible()
    result = tiny.generate("Why is the sea salty?", SamplingParams(max_tokens=80)).differences
    rows = page.locator("#report .differences tbody > tr")
    assert rows.count() == min(len(result), MAX_DIFFERENCES) > SHOWN
    marks = [page.locator("#report .differences mark").nth(n).text_content() or "" for n in range(SHOWN)]
    assert [mark.replace(NOTHING, "") for mark in marks] == [
        " ".join(each.text.split()).replace("\0", "\ufffd") or "" for each in result[:SHOWN]
    ]
    assert rows.first.inner_text().count(result[0].others[0].member) == 1
    more = page.get_by_text(f"{len(result) - SHOWN} more")
    assert rows.nth(SHOWN).is_hidden()
    more.click()
    assert rows.nth(SHOWN).is_visible()


# ── each member by itself ────────────────────────────────────────────────────────────────────────


def ask_each(page: Page, question: str = "Why is the sea salty?", tokens: int = 24) -> None:
    page.get_by_label("Each member by itself, too").check()
    ask(page, question, tokens)


def columns(page: Page) -> list[str]:
    return page.locator("#beside article p:not(.problem)").all_text_contents()


def test_each_members_answer_is_shown_next_to_the_joint_one(opened: Callable[..., Page], client: httpx.Client) -> None:
    page = opened(client)
    ask_each(page)
    expect(page.locator("#status")).to_have_text("Finished")
    assert page.locator("#beside h3").all_text_contents() == ["together", "chat", "base"]
    reported = columns(page)
    assert reported[0] == page.locator("#spoken").text_content()
    for name, text in zip(("chat", "base"), reported[1:], strict=True):
        options = {"model": f"tiny/{name}", "messages": [{"role": "user", "content": "Why is the sea salty?"}]}
        answer = client.post("/v1/chat/completions", json={**options, "max_tokens": 24}).json()
        assert text == answer["choices"][0]["message"]["content"]
    tops = [page.locator("#beside article").nth(n).bounding_box()["y"] for n in range(3)]
    assert len(set(tops)) == 1, "side by side"
    ask(page, "And without?", 8)
    page.get_by_label("Each member by itself, too").uncheck()
    expect(page.locator("#status")).to_have_text("Finished")
    ask(page, "And now?", 8)
    expect(page.locator("#status")).to_have_text("Finished")
    expect(page.locator("#beside")).to_be_hidden()
    page.get_by_role("button", name="Why is the sea salty?").click()
    assert columns(page) == reported, "the history has them, too"


def test_differences_are_marked_as_in_python(opened: Callable[..., Page], client: httpx.Client) -> None:
    page = opened(client)
    for texts in DIFFERENT:
        result = page.evaluate("texts => import('/each.js').then(each => each.differences(texts))", texts)
        expected = [[[d.start, d.end, d.kind] for d in spans] for spans in differences_of(texts)]
        assert result == expected, texts
    names = ["together", "chat", "base"]
    page.evaluate(
        "columns => import('/each.js').then(each => each.drawColumns(document.getElementById('beside'), columns))",
        [{"name": n, "text": t, "problem": "", "over": True} for n, t in zip(names, DIFFERENT[0], strict=True)],
    )
    marks = [page.locator("#beside article").nth(n).locator("mark").all_text_contents() for n in range(3)]
    assert marks == [
        ["1969", "Neil", "Armstrong", "there"],
        ["1969", "Armstrong", "there", "Neil"],
        ["1968", "Buzz"],
    ]
    assert page.locator("#beside mark.name").first.evaluate("e => getComputedStyle(e).fontWeight") == "600"


def test_stopping_stops_every_member(opened: Callable[..., Page], endless: tuple[httpx.Client, EnsembleEngine]) -> None:
    client, engine = endless
    until(lambda: engine.metrics().running == 0)
    page = opened(client)
    ask_each(page, tokens=3000)
    until(lambda: all(columns(page)) and len(columns(page)) == 3)
    assert engine.metrics().running == 3
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped: the members compute no more")
    until(lambda: engine.metrics().running == 0, 5)
    assert page.locator("#beside .problem:visible").all_text_contents() == ["Stopped", "Stopped"]


def test_the_column_of_a_failed_member_shows_the_error(opened: Callable[..., Page], client: httpx.Client) -> None:
    page = opened(client)
    page.route(
        "**/v1/chat/completions",
        lambda route: (
            route.fulfill(status=500, json={"error": {"message": "<b>out of order</b>"}})
            if route.request.post_data_json["model"] == "tiny/base"
            else route.continue_()
        ),
    )
    ask_each(page)
    expect(page.locator("#status")).to_have_text("Finished")
    assert page.locator("#beside .problem:visible").all_text_contents() == ["It failed: <b>out of order</b>"]
    assert all(columns(page)[:2])


def test_the_switch_is_reached_by_keyboard_and_hidden_for_one_member(
    opened: Callable[..., Page], client: httpx.Client
) -> None:
    page = opened(client)
    page.focus("#temperature")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "each"
    page.keyboard.press("Space")
    assert page.get_by_label("Each member by itself, too").is_checked()
    page.select_option("#model", "tiny/chat")
    expect(page.locator("#each-field")).to_be_hidden()
    ask(page, tokens=8)
    expect(page.locator("#status")).to_have_text("Finished")
    expect(page.locator("#beside")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_answers_side_by_side_can_be_read_on_a_phone(
    opened: Callable[..., Page], client: httpx.Client, scheme: str
) -> None:
    page = opened(client, color_scheme=scheme, viewport=PHONE)
    ask_each(page, tokens=16)
    expect(page.locator("#status")).to_have_text("Finished")
    ratios = page.evaluate(CONTRASTS)
    assert ratios[0][0] >= 4.5, ratios[:5]
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    lefts = {page.locator("#beside article").nth(n).bounding_box()["x"] for n in range(3)}
    assert len(lefts) == 1, "below each other"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast_and_a_phone_never_scrolls_sideways(
    opened: Callable[..., Page], client: httpx.Client, scheme: str
) -> None:
    page = opened(client, color_scheme=scheme, viewport=PHONE)
    ask(page, tokens=16)
    expect(page.locator("#status")).to_have_text("Finished")
    ratios = page.evaluate(CONTRASTS)
    assert len(ratios) > 50
    assert ratios[0][0] >= 4.5, ratios[:5]
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert (page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)") is (scheme == "dark")


def test_every_control_has_an_accessible_name(opened: Callable[..., Page], client: httpx.Client) -> None:
    page = opened(client)
    for role, name in [("textbox", "Question"), ("combobox", "Model"), ("spinbutton", "Tokens"), ("button", "Ask")]:
        assert page.get_by_role(role, name=name).count() >= 1
    ask(page, tokens=16)
    expect(page.locator("#status")).to_have_text("Finished")
    assert page.get_by_role("log").count() == 1
    assert page.get_by_role("navigation", name="Answers").count() == 1
    assert page.get_by_role("radio").count() == page.locator(".seg").count()


def test_the_policy_lets_no_script_style_or_connection_in(client: httpx.Client) -> None:
    for path in FILES:
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
    page = client.get("/").text
    assert "<style" not in page
    assert " style=" not in page
    assert " on" not in page.partition("<body>")[2].replace(" on ", "")
