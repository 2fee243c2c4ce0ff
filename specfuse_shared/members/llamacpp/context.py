"""A context of llama.cpp: one cache for all answers of a member, whose cells belong to sequences; and its runner.

A copy of a sequence copies nothing: its cells then belong to both. Tokens of many sequences go through the model in
one batch, and a token may belong to several.

The runner gives a lane and its answers access to a model: its context, prefixes of earlier answers, and counts.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specfuse_shared.errors import MemberLoadError
from specfuse_shared.members.llamacpp.library import LlamaModel, last_errors
from specfuse_shared.runtime.cuda_streams import ModelStream
from specfuse_shared.runtime.kv_cache import SHORTEST_PREFIX, common_length

SEQUENCES = 64
"""Of a context; the library keeps a row of logits for each, and for some models a state."""
BATCH_TOKENS = 512
BATCH_OUTPUTS = 128
"""Maximum tokens of a batch, and of tokens with logits: the library reserves memory for both."""
SPARE_CELLS = 256
"""Cells besides those that answers may take: the library takes some in blocks."""
_NO_ROOM, _ABORTED = 1, 2
_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}
"""The library's numbers of the types of a cache."""


@dataclass(frozen=True, slots=True)
class FedToken:
    """A token at `position` of some sequences; `wanted`: its logits."""

    token: int
    position: int
    sequences: Sequence[int]
    wanted: bool


class LlamaContext:
    """`tokens` cells for all sequences of `model`. `close` frees them. Raises `MemberLoadError` if memory is
    insufficient.

    The library writes to all memory of a cache at once, so it begins with `first` cells, and grows when they are full.
    `reclaim_memory`: called if no cell is free and none can be added; returns whether it freed any.
    """

    def __init__(
        self, name: str, model: LlamaModel, tokens: int, threads: int, cache_type: str, first: int | None = None
    ) -> None:
        lib = self._lib = model.lib
        self.model = model
        self.tokens = tokens
        self.allocated = min(tokens, first or tokens)
        self.reclaim_memory: Callable[[], bool] = lambda: False
        params = self._params = lib.llama_context_default_params()
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_outputs_max = BATCH_OUTPUTS
        params.n_seq_max = self.sequences = SEQUENCES
        params.kv_unified = params.swa_full = params.no_perf = True
        params.type_k = params.type_v = _TYPES[cache_type]
        if cache_type == "f32":  # its flash attention on a processor calculates in half precision
            params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.n_threads = params.n_threads_batch = threads
        if not (pointer := self._made(self.allocated)):
            raise MemberLoadError(
                f"member {name!r}: llama.cpp has no memory for a cache of {self.allocated} tokens, or cannot run this "
                f"model ({last_errors() or 'no reason given'}): lower MemberConfig(cache_tokens=…)"
            )
        self._take(pointer)
        self._free = list(range(SEQUENCES - 1, -1, -1))

    def use_threads(self, count: int) -> None:
        self._params.n_threads = self._params.n_threads_batch = count
        self._lib.llama_set_n_threads(self._pointer, count, count)

    def _made(self, tokens: int) -> Any:
        """A context of the library with this number of cells; None if memory is insufficient."""
        self._params.n_ctx = tokens + SPARE_CELLS
        return self._lib.llama_init_from_model(self.model.pointer, self._params)

    def _take(self, pointer: Any) -> None:
        self._pointer = pointer
        self._memory = self._lib.llama_get_memory(pointer)
        self.close = weakref.finalize(self, _free, self._lib, pointer, self.model)
        self.close.atexit = False
        self._use_adapters()

    def _grow(self) -> bool:
        """Twice the cells, with all that is in them; whether that could be done."""
        lib, tokens = self._lib, min(self.tokens, 2 * self.allocated)
        if tokens == self.allocated or not (made := self._made(tokens)):
            return False
        size = lib.llama_state_get_size(self._pointer)
        state = (ctypes.c_uint8 * size)()
        lib.llama_state_get_data(self._pointer, state, size)
        if not lib.llama_state_set_data(made, state, size):
            lib.llama_free(made)
            return False
        let_go = self.close
        self._take(made)
        let_go()
        self.allocated = tokens
        return True

    # ── sequences ────────────────────────────────────────────────────────────────────────────────

    def new_sequence(self) -> int:
        """An empty sequence. Raises `MemoryError` where there are too many."""
        while not self._free:
            if not self.reclaim_memory():
                raise MemoryError(f"llama.cpp keeps at most {self.sequences} sequences")
        return self._free.pop()

    def copy(self, sequence: int, length: int) -> int:
        """A new sequence with the first `length` tokens of another."""
        made = self.new_sequence()
        self._lib.llama_memory_seq_cp(self._memory, sequence, made, 0, length)
        return made

    def share(self, sequence: int, target: int, start: int, end: int) -> None:
        """Let another sequence have the tokens from `start` to `end`, too."""
        self._lib.llama_memory_seq_cp(self._memory, sequence, target, start, end)

    def cut(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1)

    def free(self, *sequences: int) -> None:
        for sequence in sequences:
            self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            self._free.append(sequence)

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        """A sequence for a while."""
        sequence = self.new_sequence()
        try:
            yield sequence
        finally:
            self.free(sequence)

    # ── forward passes ───────────────────────────────────────────────────────────────────────────

    def plain(self, ids: Sequence[int], count: int) -> torch.Tensor:
        """Logits (wanted, V) after the last tokens of a text that is read alone."""
        with self.borrowed() as sequence:
            offset = len(ids) - count
            rows = self.decode([FedToken(t, n, (sequence,), n >= offset) for n, t in enumerate(ids)])
        return torch.stack(rows)

    def decode(self, tokens: Sequence[FedToken]) -> list[torch.Tensor]:
        """Feed tokens, parents first; logits (V) of those that are wanted. Raises `MemoryError`, `RuntimeError`.

        What is in the cache of the fed sequences afterwards is unknown if it raises.
        """
        rows: list[torch.Tensor] = []
        for batch in _batches(tokens):
            self._decode(batch)
            if count := sum(token.wanted for token in batch):
                rows += self._logits(count)
        return rows

    def _decode(self, tokens: Sequence[FedToken]) -> None:
        batch = _Batch(self._lib, tokens)
        while (status := self._lib.llama_decode(self._pointer, batch.struct)) == _NO_ROOM:
            if not (self._grow() or self.reclaim_memory()):
                raise MemoryError(f"llama.cpp's cache of {self.tokens} tokens is full: raise cache_tokens")
        if status != 0:
            errors = last_errors()
            if status == -2:
                raise MemoryError(f"llama.cpp had no memory for a batch of {len(tokens)} tokens: {errors}")
            raise RuntimeError(f"llama.cpp failed ({status}) on a batch of {len(tokens)} tokens: {errors}")

    def _logits(self, count: int) -> list[torch.Tensor]:
        """A copy: the library's own rows belong to its last batch."""
        size = self.model.vocabulary_size
        first = self._lib.llama_get_logits(self._pointer)
        rows = (ctypes.c_float * (count * size)).from_address(ctypes.addressof(first.contents))
        return list(torch.frombuffer(rows, dtype=torch.float32).clone().view(count, size))

    def _use_adapters(self) -> None:
        if adapters := self.model.adapters:
            pointers = (self._lib.llama_adapter_lora_p_ctypes * len(adapters))(*adapters)
            scales = (ctypes.c_float * len(adapters))(*[1.0] * len(adapters))
            self._lib.llama_set_adapters_lora(self._pointer, pointers, len(adapters), scales)


def _free(lib: Any, pointer: Any, model: LlamaModel) -> None:
    """Free a context; `model` is kept alive until then."""
    lib.llama_free(pointer)


class _Batch:
    """Tokens as the library takes them; holds the memory that `struct` points to."""

    def __init__(self, lib: object, tokens: Sequence[FedToken]) -> None:
        count, library = len(tokens), lib
        flat = [sequence for token in tokens for sequence in token.sequences]
        starts, at = [], 0
        for token in tokens:
            starts.append(at)
            at += len(token.sequences)
        self._sequences = (ctypes.c_int32 * len(flat))(*flat)
        base, size = ctypes.addressof(self._sequences), ctypes.sizeof(ctypes.c_int32)
        self._rows = (ctypes.c_void_p * count)(*[base + size * start for start in starts])
        self._ids = (ctypes.c_int32 * count)(*[token.token for token in tokens])
        self._positions = (ctypes.c_int32 * count)(*[token.position for token in tokens])
        self._counts = (ctypes.c_int32 * count)(*[len(token.sequences) for token in tokens])
        self._wanted = (ctypes.c_int8 * count)(*[token.wanted for token in tokens])
        self.struct = library.llama_batch(  # type: ignore[attr-defined]
            n_tokens=count,
            token=self._ids,
            embd=None,
            pos=self._positions,
            n_seq_id=self._counts,
            seq_id=ctypes.cast(self._rows, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self._wanted,
        )


def _batches(tokens: Sequence[FedToken]) -> Iterator[list[FedToken]]:
    """The tokens in pieces that the library takes."""
    batch: list[FedToken] = []
    outputs = 0
    for token in tokens:
        if len(batch) == BATCH_TOKENS or outputs + token.wanted > BATCH_OUTPUTS:
            yield batch
            batch, outputs = [], 0
        batch.append(token)
        outputs += token.wanted
    if batch:
        yield batch


_MOST_PREFIXES = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Prefix:
    ids: tuple[int, ...]
    sequences: tuple[int, ...]


class Holder(Protocol):
    """An answer that runs."""

    @property
    def cached(self) -> tuple[int, tuple[int, ...]] | None:
        """Its sequence and the committed ids in it; None where they cannot be copied."""
        ...


class CacheCapacity:
    """The cache as those who share memory know it."""

    def __init__(self) -> None:
        self.reclaim_memory: Callable[[], bool] = lambda: False


class LlamaRunner:
    """Runs answers in `context`; their prefixes stay there as additional sequences.

    `held`: tokens of running answers, `holders`: answers whose prompts can be copied. `reused_tokens`: prompt tokens
    that were not read again.
    """

    device = torch.device("cpu")
    """Where logits come."""
    reserve_bytes = 0
    reports_argmax = False

    def __init__(self, context: LlamaContext, bytes_per_token: int) -> None:
        self.context = context
        self.bytes_per_token = bytes_per_token
        self.pool = CacheCapacity()
        self.stream = ModelStream(self.device)
        self.held: dict[int, int] = {}
        self.holders = weakref.WeakSet[Holder]()
        self.limit = 0
        self.reused_tokens = 0
        self._prefixes: list[_Prefix] = []
        context.reclaim_memory = self._forget_oldest

    @property
    def is_recurrent(self) -> bool:
        return self.context.model.is_recurrent

    @property
    def cache_bytes(self) -> int:
        return sum(list(self.held.values())) * self.bytes_per_token

    @property
    def prefix_bytes(self) -> int:
        return sum(len(prefix.ids) for prefix in list(self._prefixes)) * self.bytes_per_token

    def known(self, prompt: Sequence[int], read: int) -> tuple[int, int] | None:
        """A sequence that holds more of `prompt` than the `read` tokens, but not its last one, and how many.

        Earlier answers left it, or an answer that runs has it; no state that cannot be cut is among them.
        """
        reusable = tuple(prompt[:-1])
        sizes = [common_length(prefix.ids, reusable) for prefix in self._prefixes]
        running_prefixes = [(common_length(ids, reusable), sequence) for sequence, ids in self._held(read)]
        remembered, running = max(sizes, default=0), max(running_prefixes, default=(0, 0))
        size = max(remembered, running[0])
        if size < read + SHORTEST_PREFIX:
            return None
        self.reused_tokens += size - read
        if running[0] >= remembered:
            return running[1], size
        prefix = self._prefixes.pop(sizes.index(remembered))
        self._prefixes.append(prefix)
        return prefix.sequences[0], size

    def _held(self, more_than: int) -> list[tuple[int, tuple[int, ...]]]:
        cached = [holder.cached for holder in self.holders]
        return [entry for entry in cached if entry is not None and len(entry[1]) > more_than]

    def remember(self, ids: Sequence[int], sequences: Sequence[int]) -> None:
        """Keep sequences that hold `ids`, in place of those that it begins with; or free them."""
        ids = tuple(ids)
        limit = min(self.limit // max(1, self.bytes_per_token), self.context.allocated // 2)
        sizes = {id(prefix): common_length(prefix.ids, ids) for prefix in self._prefixes}
        if not SHORTEST_PREFIX <= len(ids) <= limit or len(ids) in sizes.values():
            self.context.free(*sequences)
            return
        self._drop([prefix for prefix in self._prefixes if sizes[id(prefix)] == len(prefix.ids)])
        self._prefixes.append(_Prefix(ids, tuple(sequences)))
        while len(self._prefixes) > _MOST_PREFIXES or sum(len(prefix.ids) for prefix in self._prefixes) > limit:
            self._forget_oldest()

    def remember_at_most(self, limit: int) -> None:
        """At most `limit` bytes from now on."""
        self.limit = limit
        while self._prefixes and self.prefix_bytes > limit:
            self._forget_oldest()

    def free_spare(self) -> bool:
        """Free what earlier answers left; whether there was anything."""
        had = bool(self._prefixes)
        self._drop(list(self._prefixes))
        return had

    def drop_steps(self) -> bool:
        """It captures none."""
        return False

    def close(self) -> None:
        """Give all memory back. Safe to call twice."""
        self._prefixes.clear()
        self.context.close()
        self.context.model.close()

    def _forget_oldest(self) -> bool:
        oldest = self._prefixes[:1]
        self._drop(oldest)
        return bool(oldest)

    def _drop(self, prefixes: Sequence[_Prefix]) -> None:
        for prefix in prefixes:
            self._prefixes.remove(prefix)
            self.context.free(*prefix.sequences)
