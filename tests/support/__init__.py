"""Helpers that tests share; a failed `assert` in here shows both sides."""

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("against_naive", "served", "serving")))
