"""Answers for a page: no longer than a reader needs to judge them."""

from __future__ import annotations

import re


def shortened(text: str, words: int) -> str:
    """The text's first so many words, as they stand there, with an ellipsis where more follow."""
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    return text if len(ends) <= words else f"{text[: ends[words - 1]]} …"
