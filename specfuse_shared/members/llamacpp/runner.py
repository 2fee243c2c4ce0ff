"""What a lane and its answers need of a model on llama.cpp: a context, what earlier answers left in it, and a count."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specfuse_shared.members.llamacpp.context import LlamaContext
from specfuse_shared.runtime.cache.prefix_cache import SHORTEST_PREFIX, common_length
from specfuse_shared.runtime.cuda_streams import ModelStream

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


class CacheRoom:
    """The cache as those who share memory know it."""

    def __init__(self) -> None:
        self.make_room: Callable[[], bool] = lambda: False


class LlamaRunner:
    """Runs answers in `context`; what they remember stays there as sequences of its own.

    `held`: tokens of running answers, `holders`: those whose prompts can be copied. `reused_tokens`: of prompts that
    were not read again.
    """

    device = torch.device("cpu")
    """Where logits come."""
    reserve_bytes = 0

    def __init__(self, context: LlamaContext, bytes_per_token: int) -> None:
        self.context = context
        self.bytes_per_token = bytes_per_token
        self.pool = CacheRoom()
        self.stream = ModelStream(self.device)
        self.held: dict[int, int] = {}
        self.holders = weakref.WeakSet[Holder]()
        self.limit = 0
        self.reused_tokens = 0
        self._prefixes: list[_Prefix] = []
        context.make_room = self._forget_oldest

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
        held = [(common_length(ids, reusable), sequence) for sequence, ids in self._held(read)]
        kept, running = max(sizes, default=0), max(held, default=(0, 0))
        size = max(kept, running[0])
        if size < read + SHORTEST_PREFIX:
            return None
        self.reused_tokens += size - read
        if running[0] >= kept:
            return running[1], size
        prefix = self._prefixes.pop(sizes.index(kept))
        self._prefixes.append(prefix)
        return prefix.sequences[0], size

    def _held(self, more_than: int) -> list[tuple[int, tuple[int, ...]]]:
        cached = [holder.cached for holder in self.holders]
        return [found for found in cached if found is not None and len(found[1]) > more_than]

    def remember(self, ids: Sequence[int], sequences: Sequence[int]) -> None:
        """Keep sequences that hold `ids`, in place of those that it begins with; or free them."""
        ids = tuple(ids)
        most = min(self.limit // max(1, self.bytes_per_token), self.context.allocated // 2)
        sizes = {id(prefix): common_length(prefix.ids, ids) for prefix in self._prefixes}
        if not SHORTEST_PREFIX <= len(ids) <= most or len(ids) in sizes.values():
            self.context.free(*sequences)
            return
        self._drop([prefix for prefix in self._prefixes if sizes[id(prefix)] == len(prefix.ids)])
        self._prefixes.append(_Prefix(ids, tuple(sequences)))
        while len(self._prefixes) > _MOST_PREFIXES or sum(len(prefix.ids) for prefix in self._prefixes) > most:
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
