"""AMX kernels are used only if they work in the installed build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specfuse_shared import demo_members

pytest.importorskip("llama_cpp")

DECODES = """
import sys
from pathlib import Path
from specfuse_shared.members.llamacpp import library
from specfuse_shared.members.llamacpp.context import LlamaContext
library.may_repack = lambda lib: True
LlamaContext("repacked", library.LlamaModel("repacked", Path(sys.argv[1])), 300, 1, "f16").plain(range(1000, 1040), 1)
"""


def test_a_folder_without_the_library_has_no_kernels(tmp_path: Path) -> None:
    from specfuse_shared.members.llamacpp.library import amx_runs

    assert not amx_runs(tmp_path)


@pytest.mark.slow
def test_the_kernels_are_used_exactly_if_a_quantised_file_runs_on_them() -> None:
    """They fail in GCC 12.2's build of llama.cpp 0.5.0 on a processor with AMX; without AMX there are none."""
    from specfuse_shared.members.llamacpp.library import amx_runs, library, may_repack

    lib = library()
    has_amx = b"AMX_INT8 = 1" in lib.llama_print_system_info()
    file = demo_members()[0].model
    decoded = subprocess.run([sys.executable, "-c", DECODES, file], capture_output=True, timeout=200, check=False)
    assert may_repack(lib) == (decoded.returncode == 0)
    assert amx_runs(Path(lib._lib._name).parent) == (has_amx and decoded.returncode == 0)
