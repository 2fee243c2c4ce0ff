"""Draws the page of `specfuse-llm serve` while the demo members answer: docs/page.png, in a real browser.

python docs/page.py [ADDRESS]    of a server that runs; http://127.0.0.1:8000 unless said otherwise. Needs Chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

QUESTION = "How do bees make honey?"
WIDTH, HEIGHT, SCALE, COLOURS = 1280, 880, 2, 96
TARGET = Path(__file__).with_name("page.png")
GROWN = 9
"""Segments to wait for: by then the answer has a few lines, and is still being written."""


def grow(page: Page, address: str) -> None:
    """Two answers, the second one while it grows."""
    page.goto(address)
    expect(page.locator("#status")).to_have_text("Ready", timeout=120_000)
    page.fill("#tokens", "12")
    page.fill("#question", "Name three rivers of Africa.")
    page.click("#send")
    expect(page.locator("#status")).to_have_text("Finished", timeout=120_000)
    page.fill("#tokens", "120")
    page.fill("#question", QUESTION)
    page.click("#send")
    expect(page.locator(f".s{GROWN}")).to_be_attached(timeout=120_000)


def main(address: str = "http://127.0.0.1:8000") -> None:
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
        grow(page, address)
        page.screenshot(path=Path(folder, TARGET.name))
        Image.open(Path(folder, TARGET.name)).convert("RGB").quantize(COLOURS).save(TARGET, optimize=True)
        page.keyboard.press("Escape")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
