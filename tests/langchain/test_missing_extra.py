"""Without its framework, the adapter's error names the extra to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from specfuse_shared.errors import MissingExtraError


def test_a_missing_framework_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("langchain_specfuse", "langchain_core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "langchain_core", None)
    with pytest.raises(MissingExtraError) as caught:
        importlib.import_module("langchain_specfuse")
    says, install = str(caught.value).split(": ")
    assert says == 'langchain_specfuse needs the "langchain" extra'
    assert install == 'pip install ".[langchain]" in a clone of the repository'
