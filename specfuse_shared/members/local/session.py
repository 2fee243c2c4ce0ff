"""One answer of a member of this process: its stages ask for forwards, which those of many answers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specfuse_shared.members.local.batching import Stage
from specfuse_shared.members.local.forwards import (
    PREFILL_CHUNK,
    ChosenTokens,
    DraftRequest,
    ForwardRequest,
    LogprobRequest,
)
from specfuse_shared.members.local.sequence import SequenceState
from specfuse_shared.members.local.speculation import OWN, TOLD, Guess, Guesses
from specfuse_shared.members.session import Session
from specfuse_shared.members.stages import TokenCounts, Top
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.sampler import Sampler, masked
from specfuse_shared.settings.sampling_params import SamplingParams
from specfuse_shared.text.codec import Encoding

if TYPE_CHECKING:
    import torch

    from specfuse_shared.members.local.base import InProcessMember

_BEFORE = 8
"""So many tokens before a guess may tell what follows."""


class LocalSession(Session[SequenceState]):
    """One answer of a member of this process: its sequence is in the cache.

    Where it `speculates`, guesses of what comes next go through the model along with what has to; see
    `specfuse_shared.members.local.speculation`.
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
        self._guesses = Guesses(member.never_guessed) if self.sequence.keeps_spare else None

    @property
    def counts(self) -> TokenCounts:
        counts, guesses = super().counts, self._guesses
        return replace(counts, guessed=guesses.guessed, accepted=guesses.accepted) if guesses else counts

    def prefill(self) -> Stage[None]:
        if not self.sequence.prompt:
            self.sequence.begin(self._prompt)
        while self.sequence.prompt_remaining:
            yield ForwardRequest(self.sequence, prompt=min(self.sequence.prompt_remaining, PREFILL_CHUNK))

    def _start(self, round_index: int) -> None:
        if round_index == self._round and self._constraint is None:  # a longer draft begins like the one before
            self.sequence.draft_behind(self._draft)
        self._round = round_index
        self._sampler.start(round_index)
        if self._guesses is not None and not self._guesses.has_read:
            self._guesses.read((*self.sequence.prompt, *self.sequence.answer), 0)

    def _expect(self, encoding: Encoding) -> None:
        if self._guesses is not None:
            self._guesses.expect(self._branch(encoding), TOLD)

    def _expect_own(self, branch: Branch) -> None:
        self._draft = branch
        if self._guesses is not None:
            self._guesses.expect(branch, OWN)

    def _next(self, ids: Sequence[int], count: int, min_tokens_left: int, alone: bool) -> Stage[tuple[list[int], bool]]:
        draft = self._wanted(ids, count, min_tokens_left, alone)
        return self._chosen(draft, (yield self._asked(draft)))

    def _judge(self, branches: Sequence[Branch], stops: Sequence[Sequence[int]]) -> Stage[list[list[float]]]:
        asked = LogprobRequest(list(zip(branches, stops, strict=True)))
        going_on = [branch for branch, ends in zip(branches, stops, strict=True) if not ends]
        request = ForwardRequest(self.sequence, tuple(branches), logprobs=asked)
        judgement = yield self._with_guesses(request, going_on)
        judged: list[list[float]] = judgement.read()
        return judged

    def _find_tops(self, branch: Branch, count: int) -> Stage[list[Top]]:
        count = min(count, self._member.vocabulary_size)
        judgement = yield ForwardRequest(self.sequence, (branch,), logprobs=LogprobRequest([(branch, ())], count))
        judgement.read()
        tops: list[Top] = judgement.tops[0]
        return tops

    def _keep(self, branch: Branch) -> Stage[None]:
        yield self._with_guesses(ForwardRequest(self.sequence, (branch,)), [branch])
        self.sequence.commit(branch)
        if self._guesses is not None:
            self._guesses.commit(branch, self.sequence.answer)
            self._guesses.read(branch.tokens, len(self.sequence.prompt) + branch.base)

    def _with_guesses(self, request: ForwardRequest, branches: Sequence[Branch]) -> ForwardRequest:
        """The request and what may follow these branches, one of which is likely to be what comes; if it is needed."""
        if self._guesses is None or not branches or not self.sequence.needs(request):
            return request
        room, fed = self.sequence.room - sum(len(branch.tokens) for branch in request.branches), []
        for branch in branches:
            guess = self._guess(branch, room, 1 / len(branches))
            if guess.tokens:
                fed.append(self._guesses.feed(branch, guess, self._fed_of(branch, guess)))
                room -= len(guess.tokens)
        return replace(request, guesses=tuple(fed))

    def _guess(self, branch: Branch, room: int, share: float = 1.0) -> Guess:
        assert self._guesses is not None
        before = (*self.sequence.prompt[-_BEFORE:], *self.sequence.answer[: branch.base][-_BEFORE:])
        if (limit := self._member.context_limit) is not None:
            room = min(room, limit - len(self.sequence.prompt) - branch.base - len(branch.tokens) - 1)
        return self._guesses.behind(before, branch, room, self._member.guess_cost, share)

    def _fed_of(self, branch: Branch, guess: Guess) -> int:
        """How many tokens of a guess went through the model before."""
        whole = Branch(branch.base, branch.tokens + guess.tokens)
        return max(0, self.sequence.knows(whole) - len(branch.tokens))

    def _wanted(self, ids: Sequence[int], count: int, min_tokens_left: int, alone: bool) -> DraftRequest:
        """The next tokens behind `ids`, at most `count` and all under one rule."""
        held = max(0, min_tokens_left - len(ids))
        blocked = self._member.blocked(alone=alone, held=held > 0)
        branch = Branch(len(self.sequence.answer), tuple(ids))
        return DraftRequest(branch, min(count, held or count), self._sampler, blocked)

    def _asked(self, draft: DraftRequest) -> ForwardRequest:
        """What goes through the model for them: a guess where there is one, else all at once where that can be, else
        what decides the next one."""
        branch = draft.branch
        plain = ForwardRequest(self.sequence, (branch,))
        if self._guesses is not None:
            if self.sequence.knows(branch) == len(branch.tokens):
                return plain
            guess = self._guess(branch, self.sequence.room - 1)
            if self._constraint is not None:
                guess = guess.first(self._constraint.follows(guess.tokens))
            if guess.tokens:
                return replace(plain, guesses=(self._guesses.feed(branch, guess, self._fed_of(branch, guess)),))
        if self._constraint is None and self.sequence.may_draft_ahead(branch):
            return ForwardRequest(self.sequence, draft=draft)
        return plain

    def _chosen(self, draft: DraftRequest, result: Any) -> tuple[list[int], bool]:
        """Tokens by what came of that, and whether they end the turn."""
        if isinstance(result, ChosenTokens):
            return self.sequence.drafted(draft, result, self._member.stop_ids)
        token = self._picked(draft, result)
        if self._guesses is not None:
            self._guesses.observe(self.sequence.answer, draft.branch.tokens, token)
        if token in self._member.stop_ids:
            return [], True
        if self._constraint is not None:
            self._constraint.advance(token)
        return [token], False

    def _picked(self, draft: DraftRequest, logits: torch.Tensor) -> int:
        """The token behind the branch, by its logits (V), or as the forward told that fed it."""
        if self._constraint is not None:
            logits = masked(logits, self._constraint.allowed())
        elif self._sampler.is_plain:
            likeliest = self.sequence.likeliest(draft.branch)
            if likeliest is not None and not self._member.is_blocked(likeliest, draft.blocked):
                return likeliest
        history = self._history(draft.branch) if self._sampler.needs_history else ()
        return self._sampler.pick(logits, history, draft.blocked)

    def _history(self, branch: Branch) -> tuple[int, ...]:
        return (*self.sequence.prompt, *self.sequence.answer, *branch.tokens)
