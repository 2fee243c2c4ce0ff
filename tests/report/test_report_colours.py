"""The report's member colours are distinguishable for all kinds of colour vision, on light and dark paper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import specfuse_shared

STYLE = (Path(specfuse_shared.__file__).parent / "report" / "templates" / "report.css").read_text("utf-8")

# Machado, Oliveira, Fernandes (2009), severity 1, on linear RGB
SIGHT = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_LMS = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
TO_OKLAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
LUMINANCE = [0.2126, 0.7152, 0.0722]
COLOURS = torch.tensor(
    [
        [[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in pair]
        for pair in re.findall(r"\.m\d \{ --m: light-dark\((#\w{6}), (#\w{6})\)", STYLE)
    ]
)
LINEAR = torch.where(COLOURS <= 0.04045, COLOURS / 12.92, ((COLOURS + 0.055) / 1.055) ** 2.4)  # (member, theme, RGB)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_member_colours_differ_in_every_kind_of_colour_vision(theme: int, sight: str) -> None:
    simulated = (LINEAR[:, theme] @ torch.tensor(SIGHT[sight]).float().T).clamp(0, 1)
    lab = (simulated @ torch.tensor(TO_LMS).T) ** (1 / 3) @ torch.tensor(TO_OKLAB).T
    assert len(lab) == 6
    assert torch.pdist(lab).min() > 0.11  # 0.02 is just noticeable


@pytest.mark.parametrize(("theme", "paper"), [(0, 1.0), (1, 0.0078)], ids=["light", "dark"])
def test_member_colours_contrast_with_the_paper(theme: int, paper: float) -> None:
    """`paper`: relative luminance of #fff and #12161c."""
    luminance = LINEAR[:, theme] @ torch.tensor(LUMINANCE)
    contrast = (luminance.clamp(min=paper) + 0.05) / (luminance.clamp(max=paper) + 0.05)
    assert contrast.min() >= 3
