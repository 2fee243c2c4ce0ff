"""A real browser: its path, its start, and measurements in it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium")
QUIET = ["disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update"]
DESK, PHONE = {"width": 1200, "height": 800}, {"width": 400, "height": 800}

CONTRASTS = """() => {
  const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const paint = (...colours) => {
    pixel.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1) }
    const [r, g, b] = [...pixel.getImageData(0, 0, 1, 1).data].map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const grounds = e => e ? [...grounds(e.parentElement), getComputedStyle(e).backgroundColor] : ["white"];
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode, e = text.parentElement, style = getComputedStyle(e);
    if (!text.data.trim() || !e.checkVisibility({ visibilityProperty: true }) || e.closest("style, svg")) continue;
    const pairs = [style.color, ...["::before", "::after"].map(p => getComputedStyle(e, p))
      .filter(s => s.content != "none").map(s => s.color)];
    for (const colour of pairs) {
      const [low, high] = [paint(...grounds(e)), paint(...grounds(e), colour)].sort((a, b) => a - b);
      found.push([(high + 0.05) / (low + 0.05), text.data.trim().slice(0, 30), e.className]);
    }
  }
  return found.sort((a, b) => a[0] - b[0]);
}"""

SHOWN = """() => [...document.querySelectorAll(".card")]
  .filter(card => card.checkVisibility({ visibilityProperty: true })).map(card => card.innerText)"""


def shown_card(page: Page) -> str:
    """The text of the visible round."""
    (card,) = page.evaluate(SHOWN)
    return str(card)
