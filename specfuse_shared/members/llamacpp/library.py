"""llama.cpp's C library, as llama-cpp-python brings it, and a model that it has read from a GGUF file.

Calls release the interpreter's lock. What the library says goes to the log; the last errors become those of Python.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import weakref
from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from specfuse_shared.errors import MemberLoadError, MissingExtraError
from specfuse_shared.members.llamacpp.kernels import amx_runs

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
    """What the library said last of what went wrong, and forgets it."""
    said = "; ".join(_errors)
    _errors.clear()
    return said


class LlamaModel:
    """Weights and vocabulary of a GGUF file, and LoRA adapters beside them. `close` frees them.

    `gpu_layers`: how many layers go onto graphics cards, if this build has a use for one: all, or the one of number
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
