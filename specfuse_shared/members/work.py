"""Coroutines run by hand: answers, which wait for stages of members, and stages, which wait for forward passes."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Generic, TypeVar

W = TypeVar("W")
R = TypeVar("R")
T = TypeVar("T")


class Work(Generic[W, R, T]):
    """A coroutine that its owner continues whenever it has the result that the coroutine waits for.

    `pending`: the request that it waits for. Once it is `done`: its `value`, or the `error` that it raised.

    Args:
        steps: awaits objects of type `W`, whose `__await__` yields themselves, and gets an `R` for each.
    """

    __slots__ = ("_begun", "_steps", "done", "error", "pending", "value")

    def __init__(self, steps: Coroutine[W, R, T]) -> None:
        self._steps = steps
        self._begun = False
        self.pending: W | None = None
        self.value: T | None = None
        self.error: Exception | None = None
        self.done = False

    def resume(self, result: R | None = None) -> None:
        """Run it up to its next request, or to its end. `result`: of the last request; none at first."""
        self.pending = None
        try:
            # a coroutine that has not begun takes None alone
            self.pending = self._steps.send(result if self._begun else None)  # type: ignore[arg-type]
            self._begun = True
        except StopIteration as stop:
            self.value, self.done = stop.value, True
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """It is over with this error."""
        self.error, self.done = error, True

    def close(self) -> None:
        """Stop it where it waits. Safe to call twice."""
        self._steps.close()
