"""Without its framework, the adapter's error names the extra to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from specfuse_shared.errors import MissingExtraError


def test_a_missing_framework_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("llamaindex_specfuse", "llama_index")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llama_index", None)
    with pytest.raises(MissingExtraError) as caught:
        importlib.import_module("llamaindex_specfuse")
    says, install = str(caught.value).split(": ")
    assert says == 'llamaindex_specfuse needs the "llamaindex" extra'
    assert install == 'pip install ".[llamaindex]" in a clone of the repository'
