"""Draw the page of `specfuse-llm serve` in a browser: docs/page.png during an answer of the demo members, docs/each.png
with the joint answer and each member's own.

python docs/page.py [ADDRESS]    ADDRESS: a running demo server; by default one is started. Needs Chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

QUESTION, FACTS = "Why is exercise good for you?", "Who was the first person on the Moon, and in which year?"
WIDTH, HEIGHT, SCALE, COLOURS = 1280, 880, 2, 96
WHILE, EACH = (Path(__file__).with_name(name) for name in ("page.png", "each.png"))
GROWN = 5
"""Segments to wait for: the answer then has a few lines and is not finished."""


def grow(page: Page, address: str) -> None:
    """Ask two questions; wait until the second answer has some segments."""
    page.goto(address)
    expect(page.locator("#status")).to_have_text("Ready", timeout=600_000)
    page.fill("#tokens", "12")
    page.fill("#question", "Name three rivers of Africa.")
    page.click("#send")
    expect(page.locator("#status")).to_have_text("Finished", timeout=600_000)
    page.fill("#tokens", "120")
    page.fill("#question", QUESTION)
    page.click("#send")
    expect(page.locator(f".s{GROWN}")).to_be_attached(timeout=120_000)


def ask_each(page: Page, address: str) -> None:
    """Ask one question with each member's own answer."""
    page.goto(address)
    expect(page.locator("#status")).to_have_text("Ready", timeout=600_000)
    page.fill("#tokens", "60")
    page.get_by_label("Each member by itself, too").check()
    page.fill("#question", FACTS)
    page.click("#send")
    expect(page.locator("#status")).to_have_text("Finished", timeout=600_000)


def save(page: Page, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page.screenshot(path=Path(folder, target.name))
        Image.open(Path(folder, target.name)).convert("RGB").quantize(COLOURS).save(target, optimize=True)


@contextmanager
def served() -> Iterator[str]:
    """Address of a demo server that stops with the block."""
    command = [sys.executable, "-m", "specfuse_shared", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            matches = (re.search(r"listening at (http://\S+)", line) for line in process.stderr)
            yield next(match[1] for match in matches if match)
        finally:
            process.terminate()


def draw(address: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
        ask_each(page, address)
        save(page, EACH)
        grow(page, address)
        save(page, WHILE)
        page.keyboard.press("Escape")
        browser.close()


def main(address: str | None = None) -> None:
    if address is not None:
        draw(address)
        return
    with served() as started:
        draw(started)


if __name__ == "__main__":
    main(*sys.argv[1:])
