"""llama.cpp's C library, as llama-cpp-python brings it, and a model that it has read from a GGUF file.

Calls release the interpreter's lock. The library's messages go to the log; its last errors become Python errors.

Whether llama.cpp's kernels for AMX can be used: some compilers build them so that they end the process.

GCC 12.2 omits most of the tile configuration, and the processor then raises an illegal instruction. So one product
is tried in a separate process, which runs this file as a script: it imports nothing else.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from specfuse_shared.errors import MemberLoadError, MissingExtraError

SIZE, COLUMNS = 64, 20
"""Rows and columns of the weights, and columns of the other operand; all values are one."""
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
    function = getattr(library, name)
    function.restype, function.argtypes = ctypes.c_void_p, kinds
    return function


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


logger = logging.getLogger(__name__)

ALL_LAYERS = -1
_WARNING, _ERROR = 3, 4
_KEPT_LINES = 8

_errors: deque[str] = deque(maxlen=_KEPT_LINES)


@cache
def library() -> Any:
    """The C interface. Raises `MissingExtraError` without the extra, `MemberLoadError` where it cannot be used."""
    try:
        lib: Any = importlib.import_module("llama_cpp.llama_cpp")
    except ModuleNotFoundError as error:
        raise MissingExtraError('MemberConfig(backend="llama.cpp")', "llamacpp") from error
    except (OSError, RuntimeError) as error:
        raise MemberLoadError(f"llama-cpp-python is installed, but its library cannot be loaded: {error}") from error
    lib.specfuse_log = lib.llama_log_callback(_say)  # held as long as the library
    lib.llama_log_set(lib.specfuse_log, ctypes.c_void_p(0))
    lib.llama_backend_init()
    return lib


def _say(level: int, text: bytes | None, _: Any) -> None:
    """A line of the library's; it may come from any thread, and nothing may be raised into C."""
    line = (text or b"").decode("utf-8", "replace").strip()
    if not line:
        return
    if level == _ERROR:
        _errors.append(line)
    logger.debug("%s", line)


def may_repack(lib: Any) -> bool:
    """Whether weights may be laid out anew for the processor's kernels: those for AMX do not run in every build."""
    return b"AMX_INT8 = 1" not in lib.llama_print_system_info() or amx_runs(Path(lib._lib._name).parent)


def last_errors() -> str:
    """The library's last error message; clears it."""
    text = "; ".join(_errors)
    _errors.clear()
    return text


class LlamaModel:
    """Weights and vocabulary of a GGUF file, with LoRA adapters. `close` frees them.

    `gpu_layers`: number of layers on graphics cards, if this build supports one: all cards, or the one with number
    `card`. Raises `MemberLoadError`.
    """

    def __init__(
        self,
        name: str,
        file: Path,
        gpu_layers: int = ALL_LAYERS,
        adapters: Sequence[Path] = (),
        card: int | None = None,
    ) -> None:
        self.lib = library()
        self._name = name
        _errors.clear()
        params = self.lib.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        if card is not None:
            params.split_mode, params.main_gpu = self.lib.LLAMA_SPLIT_MODE_NONE, card
        params.use_extra_bufts = may_repack(self.lib)
        pointer = self.lib.llama_model_load_from_file(str(file).encode(), params)
        if not pointer:
            raise MemberLoadError(
                f"member {name!r}: llama.cpp cannot read {file} ({last_errors() or 'no reason given'}): take a whole "
                'file of a model that it knows, or try MemberConfig(backend="transformers")'
            )
        self.pointer = pointer
        self.close = weakref.finalize(self, self.lib.llama_model_free, pointer)
        self.close.atexit = False  # threads may still run then, and memory goes with the process
        self._vocab = self.lib.llama_model_get_vocab(pointer)
        self.vocabulary_size = int(self.lib.llama_vocab_n_tokens(self._vocab))
        self.adapters = [self._adapter(path) for path in adapters]  # they go with the model

    @property
    def is_recurrent(self) -> bool:
        """Whether it keeps a state from which no token can be taken back."""
        lib = self.lib
        return bool(lib.llama_model_is_recurrent(self.pointer) or lib.llama_model_is_hybrid(self.pointer))

    @property
    def window(self) -> int:
        """Tokens that layers with a sliding window see; 0 where there are none."""
        return int(self.lib.llama_model_n_swa(self.pointer))

    @property
    def context(self) -> int:
        """Tokens of context that it was trained with."""
        return int(self.lib.llama_model_n_ctx_train(self.pointer))

    @property
    def parameters(self) -> int:
        return int(self.lib.llama_model_n_params(self.pointer))

    @property
    def weight_bytes(self) -> int:
        return int(self.lib.llama_model_size(self.pointer))

    @property
    def description(self) -> str:
        """Family, size and quantisation, in the library's words."""
        text = ctypes.create_string_buffer(256)
        self.lib.llama_model_desc(self.pointer, text, ctypes.c_size_t(len(text)))
        return text.value.decode("utf-8", "replace")

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """Ids that end a generation, by the file."""
        ends = self.lib.llama_vocab_is_eog
        return tuple(token for token in range(self.vocabulary_size) if ends(self._vocab, token))

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text; none are added, and control strings in it are plain text."""
        data = text.encode()
        room = len(data) + 8
        ids = (self.lib.llama_token * room)()
        count = self.lib.llama_tokenize(self._vocab, data, len(data), ids, room, False, False)
        if count < 0:
            raise ValueError(f"llama.cpp found {-count} tokens in {len(data)} bytes")
        return list(ids[:count])

    def _adapter(self, path: Path) -> Any:
        adapter = self.lib.llama_adapter_lora_init(self.pointer, str(path).encode())
        if not adapter:
            raise MemberLoadError(
                f"member {self._name!r}: {path} is no LoRA in GGUF form that fits this model: {last_errors()}"
            )
        return adapter
