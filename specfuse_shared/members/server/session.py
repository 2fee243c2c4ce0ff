"""One answer of a member behind a server: its stages ask for requests, each of which says all that it needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from specfuse_shared.errors import ServerError, SpecFuseError
from specfuse_shared.members.server.dialect import Continuation, ScoredLine
from specfuse_shared.members.session import Session, Stage
from specfuse_shared.members.stages import Top
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.sampler import allowed_ids, number_of_draw
from specfuse_shared.settings.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specfuse_shared.members.server.member import ServerMember

T = TypeVar("T")


@dataclass(slots=True)
class SentIds:
    """The ids of one answer, which go with every request; the server caches what it likes."""

    prompt: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    computed_tokens: int = 0
    forwards: int = 0

    def keep(self, branch: Branch) -> None:
        self.answer = self.answer[: branch.base] + branch.tokens

    def begin_answer(self) -> None:
        self.prompt, self.answer = self.prompt + self.answer, ()

    def release(self, remember: bool = False) -> None:
        """There is nothing to free."""


class ServerSession(Session[SentIds]):
    """One answer of a `ServerMember`. Its stages yield coroutines, and are sent what those return."""

    def __init__(self, member: ServerMember, prompt: Sequence[int], params: SamplingParams, seed: int) -> None:
        super().__init__(member.text, member.stop_ids, SentIds(), prompt, params)
        self._member = member
        self._params = params
        self._seed = seed
        self._round = self._drawn = 0

    def prefill(self) -> Stage[None]:
        """Have the server read the prompt, so that its cache knows it when drafts and verdicts are asked for."""
        self.sequence.prompt = self._prompt
        yield self._member.ready()
        yield self._member.dialect.continued(Continuation(self._prompt, 1, SamplingParams(), 0, self._stop_ids))

    def _start(self, round_index: int) -> None:
        self._round, self._drawn = round_index, 0

    def _next(self, ids: Sequence[int], count: int, min_tokens_left: int, alone: bool) -> Stage[tuple[list[int], bool]]:
        if self._constraint is not None:
            return (yield from self._next_allowed(ids))
        held = max(0, min_tokens_left - len(ids))
        banned = self._stop_ids if held else ()
        sampled, ended = yield self._continued(ids, min(count, held or count), banned)
        sayable = sampled if alone else self._sayable(sampled)
        if sampled and not sayable:  # such tokens are many and hardly ever come, so they are banned when one has
            sampled, ended = yield self._continued(ids, min(count, held or count), banned + self._member.special_ids)
            sayable = sampled
        self._drawn += len(sayable)
        self.sequence.computed_tokens += len(sayable)
        return sayable, ended and len(sayable) == len(sampled)

    def _next_allowed(self, ids: Sequence[int]) -> Stage[tuple[list[int], bool]]:
        """A token that the grammar allows; where it allows one alone, nobody is asked."""
        assert self._constraint is not None
        special = set(self._member.special_ids)
        allowed = tuple(token for token in allowed_ids(self._constraint.allowed()) if token not in special)
        if len(allowed) == 1:
            [token] = allowed
            if token in self._stop_ids:
                return [], True
        else:
            sampled, ended = yield self._continued(ids, 1, (), allowed)
            if ended:
                return [], True
            [token] = sampled
        self._drawn += 1
        self.sequence.computed_tokens += 1
        self._constraint.advance(token)
        return [token], False

    def _judge(self, branches: Sequence[Branch], stops: Sequence[Sequence[int]]) -> Stage[list[list[float]]]:
        known = self.sequence.prompt + self.sequence.answer
        start = len(self.sequence.prompt)
        lines = [
            ScoredLine(known[: start + branch.base], branch.tokens, tuple(stop_ids))
            for branch, stop_ids in zip(branches, stops, strict=True)
        ]
        judged: list[list[float]] = yield self._member.dialect.judged(lines)
        self.sequence.computed_tokens += sum(len(branch.tokens) for branch in branches)
        return judged

    def _find_tops(self, branch: Branch, count: int) -> Stage[list[Top]]:
        known = self.sequence.prompt + self.sequence.answer
        line = ScoredLine(known[: len(self.sequence.prompt) + branch.base], branch.tokens)
        tops: list[Top] = yield self._member.dialect.tops(line, min(count, self._member.vocabulary_size))
        if any(not 0 <= token < self._member.vocabulary_size for top in tops for token, _ in top):
            raise ServerError("the server gave tokens that its model does not have")
        return tops

    def _keep(self, branch: Branch) -> Stage[None]:
        self.sequence.keep(branch)
        yield from ()

    def _sayable(self, ids: Sequence[int]) -> list[int]:
        """Ids before the first that has no text."""
        special = set(self._member.special_ids)
        end = next((n for n, token in enumerate(ids) if token in special), len(ids))
        return list(ids[:end])

    def _continued(
        self, ids: Sequence[int], count: int, banned: tuple[int, ...], allowed: tuple[int, ...] | None = None
    ) -> Awaitable[tuple[list[int], bool]]:
        prompt = (*self.sequence.prompt, *self.sequence.answer, *ids)
        seed = number_of_draw(self._seed, self._member.name, self._round, self._drawn)
        stop_ids = tuple(stop for stop in self._stop_ids if stop not in banned)
        size = self._member.vocabulary_size
        request = Continuation(prompt, count, self._params, seed, stop_ids, banned, allowed, size)
        return self._member.dialect.continued(request)


async def _understood(asked: Awaitable[T]) -> T:
    """What the server answers. Raises `ServerError` for an answer of another shape than its dialect has."""
    try:
        return await asked
    except SpecFuseError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"the server answers something else than it was asked ({type(error).__name__})") from error


async def run_stage(stage: Stage[T], watch: Callable[[Exception], None]) -> T:
    """Run a stage to its end; `watch` sees why a request failed."""
    sent: Any = None
    try:
        while True:
            awaitable: Awaitable[Any] = stage.send(sent)
            sent = await _understood(awaitable)
    except StopIteration as stop:
        value: T = stop.value
        return value
    except Exception as error:
        watch(error)
        raise
    finally:
        stage.close()
