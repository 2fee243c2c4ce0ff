"""Whether llama.cpp's kernels for AMX can be used: some compilers build them so that they end the process.

GCC 12.2 leaves out most of what sets the tiles up, and the processor refuses what it finds in its place. So one product
is tried in a process of its own, which is this file as a script: it imports nothing else.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

SIZE, COLUMNS = 64, 20
"""Rows and columns of the weights, and columns of what they are multiplied with; all numbers are one."""
_CLOSE = 0.1
"""Numbers are rounded to 8 bits."""
_Q4_0, _F32 = 2, 0
_BLOCK = b"\x00\x3c" + b"\x99" * 16
"""Of 32 weights: their scale (1 in half precision), and 4 bits for each, of which 8 is taken."""
_SECONDS = 60


@cache
def amx_runs(folder: Path) -> bool:
    """Whether the library of this folder multiplies with AMX; once for each process of ours."""
    try:
        tried = subprocess.run(
            [sys.executable, "-I", __file__, str(folder)], capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def multiplies(folder: Path) -> bool:
    """Multiply with the kernels for AMX, in this process; whether what comes out is right."""
    base, cpu = (_load(folder, name) for name in ("ggml-base", "ggml-cpu"))
    amx, plain = _amx_memory(base, cpu), _call(base, "ggml_backend_cpu_buffer_type")()
    if amx is None:
        return False
    init, new = _call(base, "ggml_init", _InitParams), _call(base, "ggml_new_tensor_2d", *_PIECES)
    there, here = (init(_InitParams(1 << 20, None, True)) for _ in range(2))
    weights, ones = new(there, _Q4_0, SIZE, SIZE), new(here, _F32, SIZE, COLUMNS)
    product = _call(base, "ggml_mul_mat", *_POINTERS[:3])(here, weights, ones)
    graph = _call(base, "ggml_new_graph", ctypes.c_void_p)(here)
    _call(base, "ggml_build_forward_expand", *_POINTERS[:2])(graph, product)
    allocate = _call(base, "ggml_backend_alloc_ctx_tensors_from_buft", *_POINTERS[:2])
    allocate(there, amx), allocate(here, plain)
    write = _call(base, "ggml_backend_tensor_set", *_MOVED)
    blocks, floats = _BLOCK * (SIZE * SIZE // 32), (ctypes.c_float * (SIZE * COLUMNS))(*[1.0] * SIZE * COLUMNS)
    write(weights, blocks, 0, len(blocks))
    write(ones, floats, 0, ctypes.sizeof(floats))
    backend = _call(cpu, "ggml_backend_cpu_init")()
    _call(base, "ggml_backend_graph_compute", *_POINTERS[:2])(backend, graph)
    _call(base, "ggml_backend_tensor_get", *_MOVED)(product, floats, 0, ctypes.sizeof(floats))
    return all(abs(each - SIZE) < _CLOSE for each in floats)


_POINTERS = (ctypes.c_void_p,) * 3
_PIECES = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_MOVED = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


def _load(folder: Path, name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(next(iter(sorted(folder.glob(f"*{name}.*"))))))


def _call(library: ctypes.CDLL, name: str, *kinds: Any) -> Any:
    """A function of the library that gives a pointer, or nothing."""
    found = getattr(library, name)
    found.restype, found.argtypes = ctypes.c_void_p, kinds
    return found


def _amx_memory(base: ctypes.CDLL, cpu: ctypes.CDLL) -> int | None:
    """The kind of memory in which weights lie that AMX multiplies with; None where there is none."""
    registry = _call(cpu, "ggml_backend_cpu_reg")()
    device = _call(base, "ggml_backend_reg_dev_get", ctypes.c_void_p, ctypes.c_size_t)(registry, 0)
    ask = _call(base, "ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_char_p)
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(
        ask(registry, b"ggml_backend_dev_get_extra_bufts")
    )(device)
    name_of = base.ggml_backend_buft_name
    name_of.restype, name_of.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
    number = 0
    while kind := listed[number]:
        if name_of(kind) == b"AMX":
            return int(kind)
        number += 1
    return None


if __name__ == "__main__":
    sys.exit(0 if multiplies(Path(sys.argv[1])) else 1)
