"""Further measures of the quality benchmark."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from quality import STRETCH, coherence, cosines


def test_the_cosine_is_to_the_nearest_reference() -> None:
    def encode(texts: list[str]) -> NDArray[np.float32]:
        """Embeddings of the sea, the moon, and the opposite of both."""
        kinds = {"s": [1.0, 0.0], "m": [0.6, 0.8]}
        return np.array([kinds.get(text[:1], [-1.0, 0.0]) for text in texts], dtype=np.float32)

    result = cosines([["sea", "moon"], ["moon"], ["sea"], ["sea"]], ["moon", "sea", "x", " "], encode)
    assert result == pytest.approx([100.0, 60.0, 0.0, 0.0])


def test_coherence_compares_neighbours_and_the_end_with_the_question() -> None:
    def encode(texts: list[str]) -> NDArray[np.float32]:
        """Embeddings of texts about the sea and about the moon."""
        return np.array([[1.0, 0.0] if "sea" in text else [0.0, 1.0] for text in texts], dtype=np.float32)

    sea, moon = "sea " * STRETCH, "moon " * STRETCH
    assert coherence("The sea?", sea + sea + "moon", encode) == {"neighbours": 100.0, "on_topic": 100.0}
    assert coherence("The sea?", sea + sea + moon, encode) == {"neighbours": 50.0, "on_topic": 0.0}
    assert coherence("The sea?", sea, encode) == {}
