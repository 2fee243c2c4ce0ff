"""Faults injected into one member, between its forward pass and the reader of the logits."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specfuse_shared import EnsembleEngine
from specfuse_shared.members.local.session import LocalSession
from specfuse_shared.members.stages import Draft, Op
from tests.support.against_naive import local_members


def _raise(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("injected")


def _out_of_memory(_: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("injected: out of memory")


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exception": _raise,
    "NaN": lambda logits: torch.full_like(logits, float("nan")),
    "out of memory": _out_of_memory,
}


@contextmanager
def fault_in(
    engine: EnsembleEngine, stage: str, fault: Callable[[torch.Tensor], torch.Tensor], only: str | None
) -> Iterator[None]:
    """Break the second member's logits in one stage: of every request, or of the one whose prompt holds `only`.

    The stage comes from the feed, so the fault sits between the real forward pass and the reader of its logits.
    """
    target = local_members(engine)[1]
    runner, plain_step = target.runner, target.runner.step
    marks: dict[Any, str] = {}
    plain_stage = LocalSession.stage

    def marked(session: Any, op: Op) -> Any:
        chosen = session._member is target and (only is None or only in target.codec.decode(session._prompt))
        if chosen and isinstance(op, Draft) and op.commit and stage == "commit":
            session.sequence.commit = lambda branch: broken_commit(session.sequence, branch)
        return observed(plain_stage(session, op), op.stage if chosen else "")

    @types.coroutine
    def observed(inner: Any, mark: str) -> Any:
        result = None
        try:
            while True:
                request = inner.send(result)
                marks[request.sequence] = mark
                result = yield request
        except StopIteration as stop:
            return stop.value

    def broken_commit(sequence: Any, branch: Any) -> None:
        """A commit runs no forward pass where the winner was verified, so the fault is in keeping its rows."""
        if fault is not FAULTS["NaN"]:
            fault(torch.empty(0))
        type(sequence).commit(sequence, branch)
        sequence._end = fault(sequence._end)

    def step(segments: Any) -> Any:
        poisoned = [sequence._row for sequence, at in marks.items() if at == stage]  # taken at the first forward
        if any(s.row in poisoned for s in segments) and fault is not FAULTS["NaN"]:
            fault(torch.empty(0))
        output = plain_step(segments)
        return [fault(rows) if s.row in poisoned else rows for s, rows in zip(segments, output, strict=True)]

    LocalSession.stage = marked  # type: ignore[assignment, method-assign]
    runner.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalSession.stage = plain_stage  # type: ignore[method-assign]
        del runner.step
