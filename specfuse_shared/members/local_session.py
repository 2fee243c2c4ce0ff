"""One answer of a local member: its stages ask for forwards, which those of many answers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specfuse_shared.members.branchwise import new_sequence
from specfuse_shared.members.jobs import Stage
from specfuse_shared.members.requests import PREFILL_CHUNK, ChosenTokens, DraftRequest, ForwardRequest, LogprobRequest
from specfuse_shared.members.sequence import SequenceState
from specfuse_shared.members.session import Session
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.sampler import Sampler, masked
from specfuse_shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specfuse_shared.members.local import LocalMember


class LocalSession(Session[SequenceState]):
    """One answer of a `LocalMember`: its context is in the cache."""

    def __init__(self, member: LocalMember, prompt: Sequence[int], params: SamplingParams, seed: int) -> None:
        super().__init__(member.text, member.stop_ids, new_sequence(member.runner), prompt, params)
        self._member = member
        self._sampler = Sampler(params, seed, member.name, member.runner.device)

    def prefill(self) -> Stage[None]:
        if not self.context.prompt:
            self.context.begin(self._prompt)
        while self.context.prompt_remaining:
            yield ForwardRequest(self.context, prompt=min(self.context.prompt_remaining, PREFILL_CHUNK))

    def _start(self, round_index: int) -> None:
        self._sampler.start(round_index)

    def _next(self, ids: Sequence[int], count: int, hold: int, alone: bool) -> Stage[tuple[list[int], bool]]:
        wanted = self._wanted(ids, count, hold, alone)
        return self._chosen(wanted, (yield self._asked(wanted)))

    def _judge(self, branches: Sequence[Branch], stops: Sequence[Sequence[int]]) -> Stage[list[list[float]]]:
        asked = LogprobRequest(list(zip(branches, stops, strict=True)))
        judgement = yield ForwardRequest(self.context, tuple(branches), logprobs=asked)
        judged: list[list[float]] = judgement.read()
        return judged

    def _keep(self, branch: Branch) -> Stage[None]:
        yield ForwardRequest(self.context, (branch,))
        self.context.commit(branch)

    def _wanted(self, ids: Sequence[int], count: int, hold: int, alone: bool) -> DraftRequest:
        """The next tokens behind `ids`, at most `count` and all under one rule."""
        held = max(0, hold - len(ids))
        blocked = self._member.blocked(alone=alone, held=held > 0)
        branch = Branch(len(self.context.answer), tuple(ids))
        return DraftRequest(branch, min(count, held or count), self._sampler, blocked)

    def _asked(self, wanted: DraftRequest) -> ForwardRequest:
        """What goes through the model for them: all at once where that can be, else what decides the next one."""
        if self._constraint is None and self.context.drafts_ahead:
            return ForwardRequest(self.context, draft=wanted)
        return ForwardRequest(self.context, (wanted.branch,))

    def _chosen(self, wanted: DraftRequest, found: Any) -> tuple[list[int], bool]:
        """Tokens by what came of that, and whether they end the turn."""
        if isinstance(found, ChosenTokens):
            return self.context.drafted(wanted, found, self._member.stop_ids)
        logits = found if self._constraint is None else masked(found, self._constraint.allowed())
        history = self._history(wanted.branch) if self._sampler.needs_history else ()
        token = self._sampler.pick(logits, history, wanted.blocked)
        if token in self._member.stop_ids:
            return [], True
        if self._constraint is not None:
            self._constraint.advance(token)
        return [token], False

    def _history(self, branch: Branch) -> tuple[int, ...]:
        return (*self.context.prompt, *self.context.answer, *branch.tokens)
