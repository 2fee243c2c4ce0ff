"""Draw the report of an answer of the demo members with one round selected: docs/report.png.

Its upper part, the answer and the round, is the README's picture: docs/round.png.

Needs Chromium. The picture in the repository was drawn with the font Inter installed (Debian: fonts-inter).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from specfuse_shared import EnsembleConfig, EnsembleEngine, EnsembleResult, SamplingParams, demo_members

QUESTION = "Why is exercise good for you?"
WHOLE, ROUND = (Path(__file__).with_name(name) for name in ("report.png", "round.png"))
WIDTH, HEIGHT, SCALE, MARGIN, COLOURS = 1120, 1200, 2, 16, 96


def answer() -> EnsembleResult:
    config = EnsembleConfig(members=demo_members())
    with EnsembleEngine(config) as engine:
        return engine.generate(QUESTION, SamplingParams(max_tokens=80))


def middle(result: EnsembleResult) -> int:
    """Index of the round to select: the middle one of all rounds with rival drafts."""
    verified = [r.index for r in result.rounds if r.verified]
    return verified[len(verified) // 2]


def draw(page_file: Path, pointed_at: int, folder: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
        page.goto(page_file.as_uri())
        left, top = page.locator(f".s{pointed_at}").evaluate(
            "e => (r => [r.left + 9, r.top + 9])([...e.getClientRects()].sort((a, b) => b.width - a.width)[0])"
        )
        page.mouse.move(left, top)
        for target, top, bottom in ((WHOLE, "body", "figure"), (ROUND, ".stage", ".stage")):
            first, last = (page.locator(place).first.bounding_box() for place in (top, bottom))
            assert first
            assert last
            y = max(0, first["y"] - MARGIN)
            height = last["y"] + last["height"] + MARGIN - y
            page.screenshot(path=folder / target.name, clip={"x": 0, "y": y, "width": WIDTH, "height": height})
            Image.open(folder / target.name).convert("RGB").quantize(COLOURS).save(target, optimize=True)
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        page_file, result = Path(folder, "report.html"), answer()
        page_file.write_text(result.to_html(QUESTION), "utf-8")
        draw(page_file, middle(result), Path(folder))
