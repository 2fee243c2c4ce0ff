"""Draw the report and the voting page of a comparison of the demo members: docs/compare.png and docs/vote.png.

python docs/comparison.py [RUN]    RUN: a file of `specfuse-llm compare`, by default compare.jsonl. Needs Chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from specfuse_shared.comparing import compare

HERE = Path(__file__).parent
WIDTH, SCALE, COLOURS = 1120, 2, 96
PICTURES = {"compare.png": 960, "vote.png": 520}
"""Picture → its height in pixels, from the top of the page."""


def main(run: str = "compare.jsonl") -> None:
    comparison = compare("demo", run=run)
    pages = {"compare.png": comparison.to_html(), "vote.png": comparison.to_voting_page()}
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, height in PICTURES.items():
            file = Path(folder, f"{name}.html")
            file.write_text(pages[name], "utf-8")
            page = browser.new_page(viewport={"width": WIDTH, "height": height}, device_scale_factor=SCALE)
            page.goto(file.as_uri())
            page.screenshot(path=Path(folder, name))
            Image.open(Path(folder, name)).convert("RGB").quantize(COLOURS).save(HERE / name, optimize=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
