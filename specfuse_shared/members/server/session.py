"""One answer of a member on a server: its stages await requests, each of which is complete in itself.

Logprobs from the server are cached by answer prefix, so that each is requested once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from specfuse_shared.config import SamplingParams
from specfuse_shared.errors import ServerError, SpecFuseError
from specfuse_shared.members.server.vllm import (
    Continuation,
    Continued,
    Place,
    ScoredLine,
    first_of,
    scores_of,
    text_first,
    with_place,
)
from specfuse_shared.members.session import Session
from specfuse_shared.members.stages import TokenCounts, Top
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.sampler import allowed_ids, number_of_draw
from specfuse_shared.text.codec import Encoding

if TYPE_CHECKING:
    from specfuse_shared.members.server.member import ServerMember

_NOTHING = Place()


class KnownPlaces:
    """Places by the ids between the prompt and them. `vocabulary_size`: ids are below it."""

    def __init__(self, vocabulary_size: int) -> None:
        self._size = vocabulary_size
        self._places = dict[tuple[int, ...], Place]()

    def add(self, ids: tuple[int, ...], place: Place) -> None:
        """Raises `ServerError` for a token that is none."""
        token = place.most_likely
        if token is not None and not (type(token) is int and 0 <= token < self._size):
            raise ServerError("the server gave tokens that its model does not have")
        with_place(self._places, ids, place)

    def at(self, ids: tuple[int, ...]) -> Place:
        """The cached entry after `ids`."""
        return self._places.get(ids, _NOTHING)

    def knows(self, ids: tuple[int, ...], tokens: Sequence[int]) -> bool:
        """Whether log p of all these tokens after `ids` is cached."""
        return set(tokens) <= self.at(ids).logprobs.keys()

    def unknown_from(self, ids: tuple[int, ...], start: int) -> int:
        """The place of the first of the ids, from `start` on, whose log p is not known; their number, if all are."""
        places = range(start, len(ids))
        return next((n for n in places if not self.knows(ids[:n], ids[n : n + 1])), len(ids))

    def keep(self, answer: tuple[int, ...]) -> None:
        """The answer is this now; of other ones nothing is needed any more."""
        self._places = {ids: place for ids, place in self._places.items() if ids[: len(answer)] == answer}

    def clear(self) -> None:
        """The prompt is another one now."""
        self._places.clear()


T = TypeVar("T")

_MOST_AHEAD = 32
"""Tokens that are first asked for at once under a grammar; then about as many as it admitted of the last ones."""


@dataclass(slots=True)
class SentIds:
    """The ids of one answer, which go with every request, and its logprob cache; the server has its own
    cache."""

    known_places: KnownPlaces
    prompt: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    computed_tokens: int = 0
    forwards: int = 0

    def keep(self, branch: Branch) -> None:
        self.answer = self.answer[: branch.base] + branch.tokens
        self.known_places.keep(self.answer)

    def begin_answer(self) -> None:
        self.prompt, self.answer = self.prompt + self.answer, ()
        self.known_places.clear()

    def release(self, remember: bool = False) -> None:
        """There is nothing to free."""


class ServerSession(Session[SentIds]):
    """One answer of a `ServerMember`. Its stages await coroutines, and are sent their results.

    Logprobs are requested once: verdicts provide tokens of the next draft, and a draft its own verdict.
    Judging a guess in one request shows how much of it the member would have written.
    """

    def __init__(self, member: ServerMember, prompt: Sequence[int], params: SamplingParams, seed: int) -> None:
        self._known_places = KnownPlaces(member.vocabulary_size)
        super().__init__(member.text, member.stop_ids, SentIds(self._known_places), prompt, params)
        self._member = member
        self._params = params
        self._seed = seed
        self._round = self._drawn = self._guessed = self._accepted = 0
        self._guess = tuple[int, ...]()
        self._strayed = False
        self._window = _MOST_AHEAD
        # only then is the most probable token the sampled one
        self._says_likeliest = params.greedy and params.repetition_penalty == 1.0

    @property
    def counts(self) -> TokenCounts:
        return replace(super().counts, guessed=self._guessed, accepted=self._accepted)

    async def prefill(self) -> None:
        """Have the server read the prompt, so that its cache knows it when drafts and verdicts are asked for."""
        self.sequence.prompt = self._prompt
        await _checked(self._member.ready())
        continuation = Continuation(self._prompt, 1, SamplingParams(), 0, self._stop_ids)
        self._remember((), await _checked(self._member.dialect.continued(continuation)))

    def _start(self, round_index: int) -> None:
        self._round, self._drawn, self._guess, self._strayed = round_index, 0, (), False

    def _expect(self, encoding: Encoding) -> None:
        branch = self._branch(encoding)
        self._guess = branch.tokens if branch.base == len(self.sequence.answer) else ()

    # ── drafts ───────────────────────────────────────────────────────────────────────────────────

    async def _next(self, ids: Sequence[int], count: int, min_tokens_left: int, alone: bool) -> tuple[list[int], bool]:
        if self._constraint is not None:
            return await self._next_allowed(ids, count)
        min_left = max(0, min_tokens_left - len(ids))
        count, banned = min(count, min_left or count), self._stop_ids if min_left else ()
        drafted, ended = await self._from_cache(ids, count, banned, alone)
        if not (drafted or ended):
            drafted, ended = await self._drafted(ids, count, banned, alone)
        self._drawn += len(drafted)
        return drafted, ended

    async def _drafted(
        self, ids: Sequence[int], count: int, banned: tuple[int, ...], alone: bool
    ) -> tuple[list[int], bool]:
        drafted, ended = await self._continued(ids, count, banned=banned)
        sayable = drafted if alone else self._sayable(drafted)
        if drafted and not sayable:  # such tokens are many and hardly ever come, so they are banned when one has
            drafted, ended = await self._continued(ids, count, banned=banned + self._member.special_ids)
            sayable = drafted
        return sayable, ended and len(sayable) == len(drafted)

    async def _from_cache(
        self, ids: Sequence[int], count: int, banned: Sequence[int] = (), alone: bool = False
    ) -> tuple[list[int], bool]:
        """The next tokens from the logprob cache; if it has none, the server judges the guess."""
        if not self._says_likeliest:
            return [], False
        cached = self._known(ids, count, banned, alone)
        guess = self._guess[len(ids) : len(ids) + count] if self._guess[: len(ids)] == tuple(ids) else ()
        if cached != ([], False) or not guess:
            return cached
        self._guess = ()
        self._guessed += await self._ask([Branch(len(self.sequence.answer), (*ids, *guess))], [self._stop_ids])
        drafted, ended = self._known(ids, count, banned, alone)
        same = next((n for n, pair in enumerate(zip(drafted, guess, strict=False)) if pair[0] != pair[1]), len(drafted))
        self._accepted = min(self._guessed, self._accepted + same)
        return drafted, ended

    def _known(self, ids: Sequence[int], count: int, banned: Sequence[int], alone: bool) -> tuple[list[int], bool]:
        """The most probable tokens of cached positions that the member may write."""
        drafted: list[int] = []
        while len(drafted) < count:
            token = self._known_places.at((*self.sequence.answer, *ids, *drafted)).most_likely
            if token is None or token in banned or not (alone or self._sayable([token]) or token in self._stop_ids):
                break
            if token in self._stop_ids:
                return drafted, True
            drafted.append(token)
        return drafted, False

    async def _next_allowed(self, ids: Sequence[int], count: int) -> tuple[list[int], bool]:
        """Tokens that the grammar allows, at least one; a forced token needs no request."""
        assert self._constraint is not None
        special = set(self._member.special_ids)
        allowed = tuple(token for token in allowed_ids(self._constraint.allowed()) if token not in special)
        if len(allowed) == 1:
            return ([], True) if allowed[0] in self._stop_ids else (self._advanced(list(allowed)), False)
        taken, ended = self._admitted(*(await self._from_cache(ids, count)))
        bounds = self._bounds(ids, count, allowed)
        while not (taken or ended) and (bound := next(bounds, None)) is not None:
            limit, grammar = bound
            drafted, over = await self._continued(ids, limit := min(limit, self._window), grammar)
            taken, ended = self._admitted(drafted, over)
            # tokens after one that the grammar forbids are decoded in vain
            self._window = 2 * limit if len(taken) == limit else len(taken) + 1
        if not (taken or ended):
            drafted, ended = await self._continued(ids, 1, allowed=allowed)
            taken = self._advanced(drafted)
        return taken, ended

    def _bounds(self, ids: Sequence[int], count: int, allowed: tuple[int, ...]) -> Iterator[tuple[int, str | None]]:
        """How many tokens to ask for, and the grammar that binds them at the server, the cheapest first."""
        grammar = self._params.grammar
        assert self._constraint is not None
        if not (self._member.dialect.takes_grammars and count > 1 and grammar is not None):
            return
        if not ids and (rest := grammar.rest_after(self._text)) is not None:
            yield count, rest
        if dictated := self._constraint.dictated():
            yield count, text_first(dictated)
        elif 2 * len(allowed) > self._member.vocabulary_size and not self._strayed:
            yield count, None  # what the model says by itself will mostly do
            self._strayed = True
        yield count, first_of(allowed, self._stop_ids, self._member.vocabulary_size)

    def _admitted(self, drafted: Sequence[int], ended: bool) -> tuple[list[int], bool]:
        """The tokens up to the first that the grammar forbids, and whether the turn may end after them."""
        assert self._constraint is not None
        sayable = self._sayable(drafted)
        taken = self._advanced(sayable[: self._constraint.follows(sayable)])
        if not ended or len(taken) < len(drafted) or self._constraint.finished:
            return taken, False
        bits = self._constraint.allowed()
        return taken, any(bits[stop >> 3] >> (stop & 7) & 1 for stop in self._stop_ids)

    def _advanced(self, tokens: list[int]) -> list[int]:
        assert self._constraint is not None
        for token in tokens:
            self._constraint.advance(token)
        self._drawn += len(tokens)
        return tokens

    # ── verdicts ─────────────────────────────────────────────────────────────────────────────────

    async def _judge(self, branches: Sequence[Branch], stops: Sequence[Sequence[int]]) -> list[list[float]]:
        await self._ask(branches, stops)
        judged = []
        for branch, stops_of in zip(branches, stops, strict=True):
            context = self.sequence.answer[: branch.base]
            places = [self._known_places.at(context + branch.tokens[:n]) for n in range(len(branch.tokens) + 1)]
            judged.append(scores_of(ScoredLine((), branch.tokens, tuple(stops_of)), places))
        return judged

    async def _ask(self, branches: Sequence[Branch], stops: Sequence[Sequence[int]]) -> int:
        """Request missing logprobs of these branches; returns the number of tokens."""
        starts, lines = [], []
        for branch, stops_of in zip(branches, stops, strict=True):
            ids = self.sequence.answer[: branch.base] + branch.tokens
            start = self._known_places.unknown_from(ids, branch.base)
            if start < len(ids) or not self._known_places.knows(ids, stops_of):
                starts.append(ids[:start])
                lines.append(ScoredLine(self.sequence.prompt + ids[:start], ids[start:], tuple(stops_of)))
        if not lines:
            return 0
        judged_places = await _checked(self._member.dialect.judged(lines))
        for before, line, places in zip(starts, lines, judged_places, strict=True):
            for n, place in enumerate(places):
                self._known_places.add(before + line.tokens[:n], place)
        sent = sum(len(line.tokens) for line in lines)
        self.sequence.computed_tokens += sent
        return sent

    async def _find_tops(self, branch: Branch, count: int) -> list[Top]:
        context = self.sequence.prompt + self.sequence.answer
        line = ScoredLine(context[: len(self.sequence.prompt) + branch.base], branch.tokens)
        tops = await _checked(self._member.dialect.tops(line, min(count, self._member.vocabulary_size)))
        if any(not 0 <= token < self._member.vocabulary_size for top in tops for token, _ in top):
            raise ServerError("the server gave tokens that its model does not have")
        return tops

    async def _keep(self, branch: Branch) -> None:
        self.sequence.keep(branch)

    def _sayable(self, ids: Sequence[int]) -> list[int]:
        """Ids before the first that has no text."""
        special = set(self._member.special_ids)
        end = next((n for n, token in enumerate(ids) if token in special), len(ids))
        return list(ids[:end])

    async def _continued(
        self,
        ids: Sequence[int],
        count: int,
        grammar: str | None = None,
        banned: tuple[int, ...] = (),
        allowed: tuple[int, ...] | None = None,
    ) -> tuple[list[int], bool]:
        prompt = (*self.sequence.prompt, *self.sequence.answer, *ids)
        seed = number_of_draw(self._seed, self._member.name, self._round, self._drawn)
        stop_ids = tuple(stop for stop in self._stop_ids if stop not in banned)
        size = self._member.vocabulary_size
        request = Continuation(prompt, count, self._params, seed, stop_ids, banned, allowed, grammar, size)
        continued = await _checked(self._member.dialect.continued(request))
        self._remember(ids, continued)
        self.sequence.computed_tokens += len(continued.ids)
        return continued.ids, continued.ended

    def _remember(self, ids: Sequence[int], continued: Continued) -> None:
        """Cache the logprobs of tokens that were drafted after the answer and `ids`."""
        for n, place in enumerate(continued.places):
            self._known_places.add((*self.sequence.answer, *ids, *continued.ids[:n]), place)


async def _checked(reply: Awaitable[T]) -> T:
    """The server's response. Raises `ServerError` for a response with an unexpected structure."""
    try:
        return await reply
    except SpecFuseError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"the server answers something else than it was asked ({type(error).__name__})") from error
