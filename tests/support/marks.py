"""Marks of cases."""

from __future__ import annotations

from typing import Any

import pytest


def weekly(*cases: Any) -> list[Any]:
    """Cases of `pytest.mark.parametrize` that run weekly; a tuple has the values of several names."""
    return [pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=pytest.mark.weekly) for c in cases]
