"""One answer of a member of this process: its stages request forward passes, which many answers share.

Speculation guesses a member's next tokens from the existing text, and measures how often guesses are right. Guessed
tokens go through the model together with required tokens. A member still chooses its own tokens. If these equal the
guess, the logits after them are already known. So guesses save forward passes and change no token. This module handles
token ids, no text.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from specfuse_shared.config import SamplingParams
from specfuse_shared.members.local.sequence import (
    PREFILL_CHUNK,
    ChosenTokens,
    DraftRequest,
    ForwardRequest,
    ForwardResult,
    LogprobRequest,
    SequenceState,
)
from specfuse_shared.members.session import Session
from specfuse_shared.members.stages import TokenCounts, Top
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.sampler import PendingLogprobs, PendingToken, Sampler, TokenChoice
from specfuse_shared.text.codec import Encoding

if TYPE_CHECKING:
    from specfuse_shared.members.local.member import InProcessMember

MOST_GUESSED = 24
"""Maximum tokens of one guess."""
TOKEN_COST = 0.06
"""The cost of one more token, as a share of a forward pass with one token."""
_GRAMS = (4, 3, 2)
"""Sizes of the n-grams to look up, the longest first."""
GuessKind = int | str
OWN_DRAFT, OTHER_DRAFT = "own", "other"
"""Sources of guesses other than prompt lookup: the member's own earlier draft, and another member's draft."""
_PRIOR: dict[GuessKind, float] = {4: 0.8, 3: 0.6, 2: 0.35, OWN_DRAFT: 0.9, OTHER_DRAFT: 0.5}
"""Prior acceptance rate of a guess: by the size of the n-gram that matched, or by the source."""
_PRIOR_WEIGHT, _MEMORY = 4.0, 0.95


class PromptLookup:
    """Earlier occurrences of a sequence's last few tokens, and the tokens that followed.

    After "prompt lookup decoding" (Apoorv Saxena, 2023).
    """

    def __init__(self) -> None:
        self._ids = ""
        """One character per token id: `str.rfind` finds an n-gram faster than a loop over a list."""

    @property
    def size(self) -> int:
        """Tokens of the sequence."""
        return len(self._ids)

    def read(self, ids: Sequence[int], start: int) -> None:
        """Replace the sequence from position `start` on by `ids`."""
        self._ids = self._ids[:start] + _characters(ids)

    def find(self, last: Sequence[int], limit: int) -> tuple[Sequence[int], int]:
        """Tokens after the latest earlier occurrence of the end of `last`, at most `limit`, and the size of the n-gram
        that matched; no tokens and 0 if none did."""
        for n in _GRAMS:
            gram = _characters(last[-n:])
            if len(gram) == n and (at := self._ids.rfind(gram, 0, -1)) >= 0:
                return list(map(ord, self._ids[at + n : at + n + limit])), n
        return (), 0


def _characters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


@dataclass(slots=True)
class Record:
    """The acceptance rate of guesses of a kind, as a mean in which older guesses weigh less."""

    rate: float
    weight: float = _PRIOR_WEIGHT

    def add(self, came_true: bool) -> None:
        self.weight = self.weight * _MEMORY + 1
        self.rate += (came_true - self.rate) / self.weight


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may come next, and the source of each guess."""

    tokens: tuple[int, ...]
    kinds: tuple[GuessKind, ...]

    def first(self, count: int) -> Guess:
        """Its first `count` tokens."""
        return self if count >= len(self.tokens) else Guess(self.tokens[:count], self.kinds[:count])


@dataclass(slots=True)
class _Fed:
    """A guess that went through the model: the tokens of `branch` from `first` on; those before `next` are judged."""

    branch: Branch
    kinds: Sequence[GuessKind]
    first: int
    next: int


@dataclass(slots=True)
class Guesses:
    """The guesses of one answer of one member.

    `barred`: ids that are never guessed. `guessed` tokens went through the model; `accepted` of them were chosen.
    """

    barred: Container[int]
    records: dict[GuessKind, Record] = field(default_factory=lambda: {k: Record(r) for k, r in _PRIOR.items()})
    guessed: int = 0
    accepted: int = 0
    _lookup: PromptLookup = field(default_factory=PromptLookup)
    _expected: dict[Branch, GuessKind] = field(default_factory=dict)
    _fed: list[_Fed] = field(default_factory=list)

    def read(self, ids: Sequence[int], start: int) -> None:
        """Replace the prompt and the committed answer from position `start` on by `ids`."""
        self._lookup.read(ids, start)

    @property
    def has_read(self) -> bool:
        return self._lookup.size > 0

    def expect(self, branch: Branch, kind: GuessKind) -> None:
        """Add a branch that the answer may continue with."""
        if branch.tokens and self._expected.get(branch) != OWN_DRAFT:
            self._expected[branch] = kind

    def after(self, before: Sequence[int], branch: Branch, slots: int, cost: float, share: float = 1.0) -> Guess:
        """A guess of at most `slots` tokens after the branch. The ids `before` precede the branch.

        A guess ends where the probability of all its tokens together falls below `cost`. `share`: the probability that
        the branch is needed at all.
        """
        limit, size = max(0, min(slots, MOST_GUESSED)), len(branch.tokens)
        tokens: list[int] = []
        kinds: list[GuessKind] = []
        chance = share
        expected = [(e.tokens[size:], kind) for e, kind in self._expected.items() if _begins(e, branch)]
        if expected:
            ids, kind = max(expected, key=lambda followers: (followers[1] == OWN_DRAFT, len(followers[0])))
            chance = self._extend(tokens, kinds, ids[:limit], kind, chance, cost)
        if not expected or len(tokens) == len(ids):
            last = [*before[-_GRAMS[0] :], *branch.tokens[-_GRAMS[0] :], *tokens[-_GRAMS[0] :]]
            followers, equal = self._lookup.find(last, limit - len(tokens))
            self._extend(tokens, kinds, followers, equal, chance, cost)
        return Guess(tuple(tokens), tuple(kinds))

    def _extend(
        self,
        tokens: list[int],
        kinds: list[GuessKind],
        ids: Sequence[int],
        kind: GuessKind,
        chance: float,
        cost: float,
    ) -> float:
        """Append tokens of `ids` while they are worth their cost; returns the probability of all tokens so far."""
        for token in ids:
            chance *= self.records[kind].rate
            if chance < cost or token in self.barred:
                break
            tokens.append(token)
            kinds.append(kind)
        return chance

    def feed(self, branch: Branch, guess: Guess, scored: int) -> Branch:
        """The branch extended by a guess. The first `scored` tokens of the guess went through the model before."""
        whole = Branch(branch.base, branch.tokens + guess.tokens)
        first = len(branch.tokens) + scored
        self.guessed += len(guess.tokens) - scored
        self._fed.append(_Fed(whole, guess.kinds[scored:], first, first))
        return whole

    def observe(self, answer: Sequence[int], ids: Sequence[int], token: int) -> None:
        """Compare the guesses with `token`, which was chosen after the committed `answer` and `ids`."""
        for fed in self._fed:
            base, tokens = fed.branch.base, fed.branch.tokens
            if len(answer) + len(ids) - base != fed.next or fed.next >= len(tokens):
                continue
            if (*answer[base:], *ids) == tokens[: fed.next]:
                came_true = token == tokens[fed.next]
                self.records[fed.kinds[fed.next - fed.first]].add(came_true)
                self.accepted += came_true
                fed.next = fed.next + 1 if came_true else len(tokens)

    def commit(self, branch: Branch, answer: Sequence[int]) -> None:
        """Keep the guesses that continue the committed branch, after which the answer is `answer`."""
        size = len(branch.tokens)
        going_on = {e: kind for e, kind in self._expected.items() if _begins(e, branch)}
        self._expected = {Branch(len(answer), e.tokens[size:]): kind for e, kind in going_on.items()}
        self._fed = [fed for fed in self._fed if fed.next < len(fed.branch.tokens) and _follows(fed.branch, answer)]


def _begins(longer: Branch, branch: Branch) -> bool:
    """Whether one branch extends another."""
    size = len(branch.tokens)
    return longer.base == branch.base and len(longer.tokens) > size and longer.tokens[:size] == branch.tokens


def _follows(branch: Branch, answer: Sequence[int]) -> bool:
    """Whether a branch extends an answer."""
    size = len(answer) - branch.base
    return 0 <= size < len(branch.tokens) and tuple(answer[branch.base :]) == branch.tokens[:size]


_BEFORE = 8
"""Number of tokens before a branch that prompt lookup gets."""


class LocalSession(Session[SequenceState]):
    """One answer of a member of this process, whose tokens are in the KV cache.

    If it `speculates`, guesses of the next tokens are fed together with required tokens; see
    `specfuse_shared.members.local.session`.
    """

    def __init__(
        self,
        member: InProcessMember,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        speculates: bool = False,
    ) -> None:
        super().__init__(
            member.text, member.stop_ids, member.new_sequence(speculates and member.may_guess), prompt, params
        )
        self._member = member
        self._sampler = Sampler(params, seed, member.name, member.runner.device)
        self._round, self._draft = 0, Branch(0, ())
        self._guesses = Guesses(member.never_guessed) if self.sequence.keeps_speculative else None

    @property
    def counts(self) -> TokenCounts:
        counts, guesses = super().counts, self._guesses
        return replace(counts, guessed=guesses.guessed, accepted=guesses.accepted) if guesses else counts

    async def prefill(self) -> None:
        if not self.sequence.prompt:
            self.sequence.begin(self._prompt)
        while self.sequence.prompt_remaining:
            await ForwardRequest(self.sequence, prompt=min(self.sequence.prompt_remaining, PREFILL_CHUNK))

    def _start(self, round_index: int) -> None:
        if round_index == self._round and self._constraint is None:  # a longer draft extends the previous one
            self.sequence.draft_after(self._draft)
        self._round = round_index
        self._sampler.start(round_index)
        if self._guesses is not None and not self._guesses.has_read:
            self._guesses.read((*self.sequence.prompt, *self.sequence.answer), 0)

    def _expect(self, encoding: Encoding) -> None:
        if self._guesses is not None:
            self._guesses.expect(self._branch(encoding), OTHER_DRAFT)

    def _expect_own(self, branch: Branch) -> None:
        self._draft = branch
        if self._guesses is not None:
            self._guesses.expect(branch, OWN_DRAFT)

    async def _next(self, ids: Sequence[int], count: int, min_tokens_left: int, alone: bool) -> tuple[list[int], bool]:
        draft = self._wanted(ids, count, min_tokens_left, alone)
        return self._chosen(draft, await self._asked(draft))

    async def _judge(self, branches: Sequence[Branch], stops: Sequence[Sequence[int]]) -> list[list[float]]:
        logprob_request = LogprobRequest(list(zip(branches, stops, strict=True)))
        going_on = [branch for branch, ends in zip(branches, stops, strict=True) if not ends]
        request = ForwardRequest(self.sequence, tuple(branches), logprobs=logprob_request)
        return _logprobs(await self._with_guesses(request, going_on)).read()

    async def _find_tops(self, branch: Branch, count: int) -> list[Top]:
        count = min(count, self._member.vocabulary_size)
        request = ForwardRequest(self.sequence, (branch,), logprobs=LogprobRequest([(branch, ())], count))
        judgement = _logprobs(await request)
        judgement.read()
        return judgement.tops[0]

    async def _keep(self, branch: Branch) -> None:
        await self._with_guesses(ForwardRequest(self.sequence, (branch,)), [branch])
        self.sequence.commit(branch)
        if self._guesses is not None:
            self._guesses.commit(branch, self.sequence.answer)
            self._guesses.read(branch.tokens, len(self.sequence.prompt) + branch.base)

    def _with_guesses(self, request: ForwardRequest, branches: Sequence[Branch]) -> ForwardRequest:
        """The request, with guesses after these branches if it needs a forward pass at all.

        One of the branches will probably be the next segment.
        """
        if self._guesses is None or not branches or not self.sequence.needs(request):
            return request
        slots, fed = self.sequence.spare_slots - sum(len(branch.tokens) for branch in request.branches), []
        for branch in branches:
            guess = self._guess(branch, slots, 1 / len(branches))
            if guess.tokens:
                fed.append(self._guesses.feed(branch, guess, self._fed_of(branch, guess)))
                slots -= len(guess.tokens)
        return replace(request, guesses=tuple(fed))

    def _guess(self, branch: Branch, slots: int, share: float = 1.0) -> Guess:
        assert self._guesses is not None
        before = (*self.sequence.prompt[-_BEFORE:], *self.sequence.answer[: branch.base][-_BEFORE:])
        if (limit := self._member.context_limit) is not None:
            slots = min(slots, limit - len(self.sequence.prompt) - branch.base - len(branch.tokens) - 1)
        return self._guesses.after(before, branch, slots, self._member.guess_cost, share)

    def _fed_of(self, branch: Branch, guess: Guess) -> int:
        """Number of a guess's tokens that went through the model before."""
        whole = Branch(branch.base, branch.tokens + guess.tokens)
        return max(0, self.sequence.knows(whole) - len(branch.tokens))

    def _wanted(self, ids: Sequence[int], count: int, min_tokens_left: int, alone: bool) -> DraftRequest:
        """A request for the next tokens after `ids`, at most `count`, all with the same blocked ids."""
        min_left = max(0, min_tokens_left - len(ids))
        blocked = self._member.blocked(alone=alone, ends_held=min_left > 0)
        branch = Branch(len(self.sequence.answer), tuple(ids))
        return DraftRequest(branch, min(count, min_left or count), self._sampler, blocked)

    def _asked(self, draft: DraftRequest) -> ForwardRequest:
        """The forward request for a draft: with a guess if there is one, else for all tokens in one run if possible,
        else for the next token."""
        branch = draft.branch
        plain = ForwardRequest(self.sequence, (branch,), choice=self._choice(draft) if self._chooses_together else None)
        if self._guesses is not None:
            if self.sequence.knows(branch) == len(branch.tokens):
                return plain
            guess = self._guess(branch, self.sequence.spare_slots - 1)
            if self._constraint is not None:
                guess = guess.first(self._constraint.follows(guess.tokens))
            if guess.tokens:
                return replace(plain, guesses=(self._guesses.feed(branch, guess, self._fed_of(branch, guess)),))
        if self._constraint is None and self.sequence.may_draft_ahead(branch):
            return ForwardRequest(self.sequence, draft=draft)
        return plain

    @property
    def _chooses_together(self) -> bool:
        """Whether the device chooses the next tokens of several answers in one operation.

        On a processor that saves nothing.
        """
        is_plain = self._constraint is None and self._sampler.is_plain
        return self._member.runner.reports_argmax and not is_plain

    def _choice(self, draft: DraftRequest) -> TokenChoice:
        history = self._history(draft.branch) if self._sampler.needs_history else ()
        allowed = None if self._constraint is None else self._constraint.allowed()
        return TokenChoice(self._sampler, history, draft.blocked, allowed)

    def _chosen(self, draft: DraftRequest, result: ForwardResult) -> tuple[list[int], bool]:
        """Tokens from the result, and whether they end the turn."""
        if isinstance(result, ChosenTokens):
            return self.sequence.drafted(draft, result, self._member.stop_ids)
        if isinstance(result, PendingToken):
            token = result.read()
        else:
            assert isinstance(result, torch.Tensor)
            token = self._picked(draft, result)
        if self._guesses is not None:
            self._guesses.observe(self.sequence.answer, draft.branch.tokens, token)
        if token in self._member.stop_ids:
            return [], True
        if self._constraint is not None:
            self._constraint.advance(token)
        return [token], False

    def _picked(self, draft: DraftRequest, logits: torch.Tensor) -> int:
        """The token after the branch: the argmax of its forward pass if that is enough, else from its logits (V)."""
        if self._constraint is None and self._sampler.is_plain:
            most_likely = self.sequence.most_likely(draft.branch)
            if most_likely is not None and not self._member.is_blocked(most_likely, draft.blocked):
                return most_likely
        return self._choice(draft).pick(logits)

    def _history(self, branch: Branch) -> tuple[int, ...]:
        return (*self.sequence.prompt, *self.sequence.answer, *branch.tokens)


def _logprobs(result: ForwardResult) -> PendingLogprobs:
    assert isinstance(result, PendingLogprobs)
    return result
