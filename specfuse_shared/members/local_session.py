"""One answer of a local member: its stages, each a coroutine that asks for forwards and is sent what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specfuse_shared.members.branchwise import new_sequence
from specfuse_shared.members.jobs import Stage
from specfuse_shared.members.requests import PREFILL_CHUNK, ChosenTokens, DraftRequest, ForwardRequest, LogprobRequest
from specfuse_shared.members.stages import (
    Commit,
    Draft,
    DraftAlone,
    Drafted,
    Op,
    Open,
    Question,
    Think,
    Thought,
    TokenCounts,
    Verdict,
    Verdicts,
    Verify,
)
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.sampler import Sampler, masked
from specfuse_shared.sampling_params import SamplingParams
from specfuse_shared.text.codec import Encoding, common_prefix, cut_candidate, whole_characters
from specfuse_shared.text.constraint import MemberConstraint
from specfuse_shared.text.stops import find_stop, partial_stop

if TYPE_CHECKING:
    from specfuse_shared.members.local import LocalMember

_MOST_EXTRA_TOKENS = 8
"""A draft may run over by this much to finish a character."""


class LocalSession:
    """One answer of a `LocalMember`. Invariant while fusing: cached ids = prompt + canonical ids of the answer."""

    def __init__(self, member: LocalMember, prompt: Sequence[int], params: SamplingParams, seed: int) -> None:
        self._member, self._codec = member, member.codec
        self._prompt = tuple(prompt)
        self.context = new_sequence(member.runner)
        self.encoding = Encoding()
        self._text = ""
        self._sampler = Sampler(params, seed, member.name, member.runner.device)
        self._turn_ends = member.text.turn_ends
        self._thinking, grammar = False, params.grammar
        self._grammar = MemberConstraint(grammar, member.vocabulary, member.stop_ids) if grammar else None
        # thinking: how much of the thoughts is given out
        # alone: the trailing answer ids whose text is not all given out yet, and how much of it is
        self._ids_held, self._shown = 0, 0

    @property
    def counts(self) -> TokenCounts:
        thinking = len(self.context.prompt) - len(self._prompt)
        return TokenCounts(len(self.context.answer), max(0, thinking), self.context.computed_tokens)

    @property
    def _constraint(self) -> MemberConstraint | None:
        """The grammar is that of the answer alone."""
        return None if self._thinking else self._grammar

    def stage(self, op: Op) -> Stage[Drafted | Thought | Verdicts | None]:
        """The stage that an op asks for."""
        match op:
            case Open():
                return self.prefill()
            case Think(limit=limit, most=most):
                return self.think(limit, most)
            case Draft(limit=limit, round_index=number, hold=hold):
                return self.draft(limit, number, hold)
            case DraftAlone(limit=limit, round_index=number, hold=hold):
                return self.draft_alone(limit, number, hold)
            case Verify(questions=questions):
                return self.verify(questions)
            case Commit(text=text):
                return self.commit(text)
        raise ValueError(f"a member has no stage for {op!r}")

    def prefill(self) -> Stage[None]:
        """Read the prompt; called once, first."""
        if not self.context.prompt:
            self.context.begin(self._prompt)
        while self.context.prompt_remaining:
            yield ForwardRequest(self.context, prompt=min(self.context.prompt_remaining, PREFILL_CHUNK))

    def think(self, limit: int, most: int) -> Stage[Thought]:
        """Plain decoding of thoughts, which then stand in front of the answer as if they were prompt."""
        prompts, known, self._thinking = self._member.prompts, len(self.context.answer), True
        self._sampler.start(-1 - known)
        more, ended = yield from self._decode([], min(limit, most - known), alone=True)
        ids = [*self.context.answer, *more]
        text, end = prompts.thoughts(ids)
        ended = ended or end is not None or len(ids) >= most
        ids = ids[:end] + (prompts.thoughts_closing() if ended else [])
        base = known if end is None else min(end, known)
        branch = Branch(base, tuple(ids[base:]))
        yield ForwardRequest(self.context, (branch,))
        self.context.commit(branch)
        if ended:
            self.context.begin_answer()
            self._thinking = False
        fresh, self._shown = text[self._shown :], 0 if ended else max(self._shown, len(text))
        return Thought(fresh, ended)

    def draft(self, limit: int, round_index: int, hold: int = 0) -> Stage[Drafted]:
        """Continue the answer by at most `limit` tokens, and a few more to finish a character."""
        self._sampler.start(round_index)
        if self._constraint is not None:
            self._constraint.start()
        ids, ended = yield from self._decode([], limit, hold)
        text = self._codec.text_after(self.context.answer, ids)
        while not ended and not whole_characters(text) and len(ids) < limit + _MOST_EXTRA_TOKENS:
            ids, ended = yield from self._decode(ids, len(ids) + 1, hold)
            text = self._codec.text_after(self.context.answer, ids)
        turn_ends = () if hold else self._turn_ends
        text, turn_over = self._cut_turn(text, turn_ends)
        if ended or turn_over:
            return Drafted(whole_characters(text), True, len(ids))
        open_turn = partial_stop(text, turn_ends)
        text = text[: len(text) - open_turn] if 0 < open_turn < len(text) else text
        return Drafted(cut_candidate(text), False, len(ids))

    def verify(self, questions: Sequence[Question]) -> Stage[Verdicts]:
        """Judge candidates, all in one forward."""
        branches = [self._branch(self._codec.extend(self.encoding, q.text)) for q in questions]
        stops = [self._member.stop_ids if q.ends else () for q in questions]
        asked = LogprobRequest(list(zip(branches, stops, strict=True)))
        judgement = yield ForwardRequest(self.context, tuple(branches), logprobs=asked)
        sizes = [self._codec.token_bytes(b.tokens) + [1] * q.ends for q, b in zip(questions, branches, strict=True)]
        pairs = zip(judgement.read(), sizes, strict=True)
        return Verdicts(tuple(Verdict(tuple(logprobs), tuple(own)) for logprobs, own in pairs))

    def commit(self, text: str) -> Stage[None]:
        """`text` is now part of the answer."""
        encoding = self._codec.extend(self.encoding, text)
        branch = self._branch(encoding)
        yield ForwardRequest(self.context, (branch,))
        self.context.commit(branch)
        self._text, self.encoding = self._text + text, encoding
        if self._constraint is not None:
            self._constraint.commit(text)

    def draft_alone(self, limit: int, round_index: int, hold: int = 0) -> Stage[Drafted]:
        """`limit` further tokens, committed as drafted; text that is no whole character yet comes with the next."""
        self._sampler.start(round_index)
        ids, ended = yield from self._decode([], limit, hold, alone=True)
        read = self.context.answer[: len(self.context.answer) - self._ids_held]
        pending = [*self.context.answer[len(read) :], *ids]
        text = self._codec.text_after(read, pending)
        turn_ends = () if hold else self._turn_ends
        fresh, turn_over = self._cut_turn(whole_characters(text)[self._shown :], turn_ends)
        if not (ended or turn_over):
            branch = Branch(len(self.context.answer), tuple(ids))
            yield ForwardRequest(self.context, (branch,))
            self.context.commit(branch)
            fresh = fresh[: len(fresh) - partial_stop(fresh, turn_ends)]
            self._shown += len(fresh)
            self._ids_held = len(pending)
            if self._shown == len(text):
                self._ids_held = self._shown = 0
        self._text += fresh
        return Drafted(fresh, ended or turn_over, len(ids))

    def release(self, remember: bool = False) -> None:
        """Free the cache; `remember` it for prompts that begin the same way. Safe to call twice."""
        self.context.release(remember)

    def _decode(
        self, ids: Sequence[int], limit: int, hold: int = 0, alone: bool = False
    ) -> Stage[tuple[list[int], bool]]:
        """Sample behind the committed answer and `ids` until there are `limit` of them; True if the turn ended.

        The turn does not end before `hold` tokens.
        """
        ids, ended = list(ids), False
        while not ended and len(ids) < limit:
            if self._constraint is not None and self._constraint.finished:
                return ids, True
            wanted = self._wanted(ids, limit - len(ids), hold, alone)
            more, ended = self._chosen(wanted, (yield self._asked(wanted)))
            ids += more
        return ids, ended

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

    def _branch(self, encoding: Encoding) -> Branch:
        base = common_prefix(self.context.answer, encoding.ids)
        return Branch(base, encoding.ids[base:])

    def _cut_turn(self, text: str, turn_ends: Sequence[str]) -> tuple[str, bool]:
        """A base model ends its turn by writing the next turn's header; that header is not part of the answer."""
        match = find_stop(self._text, text, turn_ends)
        if match is None:
            return text, False
        return text[: max(0, match.start - len(self._text))].rstrip("\n"), True
