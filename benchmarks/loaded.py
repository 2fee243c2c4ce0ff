"""Engines over members that are in memory already, and prompts of a wanted length for them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, Message
from specfuse_shared.loading.progress import OnLoadProgress
from specfuse_shared.members.assembly import Assembly, assemble
from specfuse_shared.members.local.member import LocalMember

SENTENCE = "The observatory keeps a log of every clear night, its moon, its wind and its visitors. "
SEGMENT = 10


class LoadedEngine(EnsembleEngine):
    """An engine over loaded members. Random weights repeat themselves, which is no reason to end an answer."""

    def __init__(self, members: Sequence[LocalMember], **settings: Any) -> None:
        names = [MemberConfig(member.name, name=member.name) for member in members]
        usual: dict[str, Any] = {
            "segment_tokens": SEGMENT,
            "first_segment_tokens": None,
            "exit": "never",
            "reuse_prefixes": False,
            "repetition_guard": False,
        }
        super().__init__(EnsembleConfig(names, **{**usual, **settings}))
        self._loaded = members

    def _assemble(self, on_progress: OnLoadProgress | None) -> Assembly:
        return assemble(self._loaded, self._metrics.forward)


@contextmanager
def engine_over(
    some: Sequence[LocalMember], every: Sequence[LocalMember] = (), **settings: Any
) -> Iterator[EnsembleEngine]:
    """An engine over some of the members; what earlier ones left with any of `every` is given back before."""
    for member in every or some:
        member.runner.free_spare()
        member.runner.drop_steps()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with LoadedEngine(some, **settings) as engine:
        yield engine.load()


def prompt(some: Sequence[LocalMember], size: int, start: str = "") -> list[Message]:
    """A question behind filler, so that the longest member prompt has about `size` tokens."""

    def asked(sentences: int) -> list[Message]:
        return [Message("user", start + SENTENCE * sentences + "Describe the log of the observatory at length.")]

    def length(sentences: int) -> int:
        return max(len(member.encode_prompt(asked(sentences))) for member in some)

    each = (length(20) - length(10)) / 10
    return asked(max(0, int((size - length(0)) / each)))


def forwards_of(members: Sequence[LocalMember]) -> Counter[str]:
    """How many of all members were replayed, ran in a fixed shape, and ran as they came, so far."""
    return sum((Counter(member.report.forwards) for member in members), Counter())


def told(forwards: Counter[str]) -> str:
    return ", ".join(f"{forwards[way]} {way}" for way in ("replayed", "static", "dynamic"))
