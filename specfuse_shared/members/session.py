"""One answer of a member, wherever its model runs: its stages, which turn ids into text and text into ids.

A stage is a coroutine that awaits the model's computation. Only a subclass knows the kind of computation.

Some tokens have no text: those that end a member's turn, and those that no member may write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from specfuse_shared.candidate import CandidateLogprobs
from specfuse_shared.config import MemberConfig, SamplingParams
from specfuse_shared.members.stages import (
    Commit,
    Draft,
    DraftAlone,
    Drafted,
    Op,
    Open,
    ScoringQuery,
    Think,
    Thought,
    TokenCounts,
    Top,
    Verdicts,
    Verify,
)
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.kv_cache import common_length
from specfuse_shared.text.chat_template import MemberText, PromptEncoder
from specfuse_shared.text.codec import Encoding, cut_candidate, whole_characters
from specfuse_shared.text.grammars.constraint import MemberConstraint
from specfuse_shared.text.stops import find_stop, partial_stop

_MOST_EXTRA_TOKENS = 8
"""A draft may run over by this much to finish a character."""

T = TypeVar("T")
Stage: TypeAlias = Coroutine[Any, Any, T]
"""A member's part of a round for one answer; the caller runs the requests that it awaits."""


class SequenceIds(Protocol):
    """The ids of one answer: `prompt`, and `answer`, the committed ids.

    `computed_tokens` went through the model after the prompt, in `forwards` forward passes.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    computed_tokens: int
    forwards: int

    def begin_answer(self) -> None:
        """Move the committed ids into the prompt: reasoning that precedes the answer."""

    def release(self, remember: bool = False) -> None:
        """Free what is held for it. Safe to call twice."""


C = TypeVar("C", bound=SequenceIds)


class Session(ABC, Generic[C]):
    """One answer of a member. `sequence` holds prompt + canonical ids, except in `think` and `draft_alone`."""

    def __init__(
        self, text: MemberText, stop_ids: Sequence[int], sequence: C, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        self.sequence = sequence
        self.encoding = Encoding()
        self._encodings = dict[str, Encoding]()
        self._prompts = text.prompts
        self._codec = text.codec
        self._turn_ends = text.turn_ends
        self._stop_ids = tuple(stop_ids)
        self._prompt = tuple(prompt)
        self._text = ""
        self._thinking, grammar = False, params.grammar
        self._grammar = MemberConstraint(grammar, text.vocabulary, stop_ids) if grammar else None
        # _ids_held (alone): answer ids at the end whose text is not all returned
        # _shown: characters already returned, of that text or of the reasoning
        self._ids_held = 0
        self._shown = 0

    # ── of the model ─────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    async def prefill(self) -> None:
        """Read the prompt; called once, first."""

    @abstractmethod
    def _start(self, round_index: int) -> None:
        """Begin a round; its number seeds sampling."""

    @abstractmethod
    async def _next(self, ids: Sequence[int], count: int, min_tokens_left: int, alone: bool) -> tuple[list[int], bool]:
        """One to `count` tokens after the committed answer and `ids`, and whether the turn ends after them.

        The turn does not end before `min_tokens_left` tokens after the answer. `alone`: also tokens without text.
        """

    @abstractmethod
    async def _judge(self, branches: Sequence[Branch], stops: Sequence[Sequence[int]]) -> list[list[float]]:
        """Natural log p of each branch's tokens; if it has stop ids, also log p that one of them follows."""

    @abstractmethod
    async def _find_tops(self, branch: Branch, count: int) -> list[Top]:
        """The most probable tokens at each position of a judged branch."""

    @abstractmethod
    async def _keep(self, branch: Branch) -> None:
        """The branch becomes the end of the committed answer."""

    def _expect(self, encoding: Encoding) -> None:
        """Guess that this comes next: another member drafted it."""

    def _expect_own(self, branch: Branch) -> None:
        """The answer may continue with this branch, which this member drafted itself."""

    # ── stages ───────────────────────────────────────────────────────────────────────────────────

    @property
    def counts(self) -> TokenCounts:
        thinking = len(self.sequence.prompt) - len(self._prompt)
        return TokenCounts(
            len(self.sequence.answer), max(0, thinking), self.sequence.computed_tokens, self.sequence.forwards
        )

    @property
    def _constraint(self) -> MemberConstraint | None:
        """The grammar applies to the answer alone."""
        return None if self._thinking else self._grammar

    def stage(self, op: Op) -> Stage[Drafted | Thought | Verdicts | None]:
        """The stage that an op asks for."""
        match op:
            case Open():
                return self.prefill()
            case Think(limit=limit, total_limit=most):
                return self.think(limit, most)
            case Draft(limit=limit, round_index=number, min_tokens_left=min_tokens_left, guess=guess, commit=commit):
                return self.draft(limit, number, min_tokens_left, guess, commit)
            case DraftAlone(limit=limit, round_index=number, min_tokens_left=min_tokens_left, top=top):
                return self.draft_alone(limit, number, min_tokens_left, top)
            case Verify(candidates=candidates, top=count):
                return self.verify(candidates, count)
            case Commit(text=text):
                return self.commit(text)
        raise ValueError(f"a member has no stage for {op!r}")

    async def think(self, limit: int, max_tokens: int) -> Thought:
        """Plain decoding of reasoning, which then becomes part of the prompt before the answer."""
        answer_size, self._thinking = len(self.sequence.answer), True
        self._start(-1 - answer_size)
        more, ended = await self._decode([], min(limit, max_tokens - answer_size), alone=True)
        ids = [*self.sequence.answer, *more]
        text, end = self._prompts.thoughts(ids)
        ended = ended or end is not None or len(ids) >= max_tokens
        ids = ids[:end] + (self._prompts.thoughts_closing() if ended else [])
        base = answer_size if end is None else min(end, answer_size)
        await self._keep(Branch(base, tuple(ids[base:])))
        if ended:
            self.sequence.begin_answer()
            self._thinking = False
        fresh, self._shown = text[self._shown :], 0 if ended else max(self._shown, len(text))
        return Thought(fresh, ended)

    async def draft(
        self, limit: int, round_index: int, min_tokens_left: int = 0, guess: str = "", commit: str = ""
    ) -> Drafted:
        """Commit `commit`, then continue the answer by at most `limit` tokens, and a few more to finish a character."""
        if commit:
            await self.commit(commit)
        self._start(round_index)
        if guess:
            self._expect(self._encoded(guess))
        lead = list[int]()
        if self._constraint is not None:
            self._constraint.start()
            lead = [] if self._text else self._codec.lead_ids  # no grammar has an answer's leading space
        limit += len(lead)
        ids, ended = await self._decode(lead, limit, min_tokens_left and min_tokens_left + len(lead))
        text = self._codec.text_after(self.sequence.answer, ids)
        while not ended and not whole_characters(text) and len(ids) < limit + _MOST_EXTRA_TOKENS:
            ids, ended = await self._decode(ids, len(ids) + 1, min_tokens_left)
            text = self._codec.text_after(self.sequence.answer, ids)
        self._expect_own(Branch(len(self.sequence.answer), tuple(ids)))
        turn_ends = () if min_tokens_left else self._turn_ends
        text, turn_over = self._cut_turn(text, turn_ends)
        if ended or turn_over:
            return Drafted(whole_characters(text), True, len(ids) - len(lead))
        open_turn = partial_stop(text, turn_ends)
        text = text[: len(text) - open_turn] if 0 < open_turn < len(text) else text
        cut = cut_candidate(text)
        return Drafted(cut, False, len(ids) - len(lead), whole_characters(text)[len(cut) :])

    async def verify(self, questions: Sequence[ScoringQuery], top: int = 0) -> Verdicts:
        """Judge candidates, all at once."""
        encodings = [self._encoded(q.text) for q in questions]
        branches = [self._branch(encoding) for encoding in encodings]
        for question, encoding in zip(questions, encodings, strict=True):
            if question.overrun:
                self._expect(self._codec.extend(encoding, question.overrun))
        stops = [self._stop_ids if q.ends else () for q in questions]
        sizes = [self._codec.token_bytes(b.tokens) + [1] * q.ends for q, b in zip(questions, branches, strict=True)]
        judged = await self._judge(branches, stops)
        each = tuple(
            CandidateLogprobs(q.text, q.ends, tuple(logprobs), tuple(token_bytes))
            for q, logprobs, token_bytes in zip(questions, judged, sizes, strict=True)
        )
        return Verdicts(each, tuple([await self._tops(branch, top) for branch in branches]))

    async def _tops(self, branch: Branch, count: int) -> tuple[Top, ...]:
        """The `count` most probable tokens at each position of a judged branch; none if `count` is 0."""
        return tuple(await self._find_tops(branch, count)) if count and branch.tokens else ()

    async def commit(self, text: str) -> None:
        """`text` is now part of the answer."""
        encoding = self._encoded(text)
        await self._keep(self._branch(encoding))
        self._text, self.encoding, self._encodings = self._text + text, encoding, {}
        if self._constraint is not None:
            self._constraint.commit(text)

    async def draft_alone(
        self, limit: int, round_index: int, min_tokens_left: int = 0, top: int | None = None
    ) -> Drafted:
        """At most `limit` further tokens, committed as drafted; an incomplete character waits for the next call."""
        self._start(round_index)
        ids, ended = await self._decode([], limit, min_tokens_left, alone=True)
        read = self.sequence.answer[: len(self.sequence.answer) - self._ids_held]
        pending = [*self.sequence.answer[len(read) :], *ids]
        text = self._codec.text_after(read, pending)
        turn_ends = () if min_tokens_left else self._turn_ends
        fresh, turn_over = self._cut_turn(whole_characters(text)[self._shown :], turn_ends)
        judged, tops = list[float](), tuple[Top, ...]()
        if not (ended or turn_over):
            drafted = Branch(len(self.sequence.answer), tuple(ids))
            if top is not None:
                [judged], tops = await self._judge([drafted], [()]), await self._tops(drafted, top)
            await self._keep(drafted)
            fresh = fresh[: len(fresh) - partial_stop(fresh, turn_ends)]
            self._shown += len(fresh)
            self._ids_held = len(pending)
            if self._shown == len(text):
                self._ids_held = self._shown = 0
        self._text += fresh
        own_ids = tuple(ids) if judged else ()
        return Drafted(fresh, ended or turn_over, len(ids), ids=own_ids, logprobs=tuple(judged), tops=tops)

    def release(self, remember: bool = False) -> None:
        """Free the cache; `remember` it for prompts that begin the same way. Safe to call twice."""
        self.sequence.release(remember)

    async def _decode(
        self, ids: Sequence[int], limit: int, min_tokens_left: int = 0, alone: bool = False
    ) -> tuple[list[int], bool]:
        """Sample after the committed answer and `ids` until there are `limit` ids; True if the turn ended.

        The turn does not end before `min_tokens_left` tokens.
        """
        ids, ended = list(ids), False
        while not ended and len(ids) < limit:
            if self._constraint is not None and self._constraint.finished:
                return ids, True
            more, ended = await self._next(ids, limit - len(ids), min_tokens_left, alone)
            ids += more
        return ids, ended

    def _encoded(self, text: str) -> Encoding:
        """The answer followed by `text`; the text to draft, judge and commit is often the same."""
        encoding = self._encodings.get(text)
        if encoding is None:
            encoding = self._encodings[text] = self._codec.extend(self.encoding, text)
        return encoding

    def _branch(self, encoding: Encoding) -> Branch:
        base = common_length(self.sequence.answer, encoding.ids)
        return Branch(base, encoding.ids[base:])

    def _cut_turn(self, text: str, turn_ends: Sequence[str]) -> tuple[str, bool]:
        """A base model ends its turn by writing the next turn's header; that header is not part of the answer."""
        match = find_stop(self._text, text, turn_ends)
        if match is None:
            return text, False
        return text[: max(0, match.start - len(self._text))].rstrip("\n"), True


def stop_ids_of(holders: Iterable[object], prompts: PromptEncoder, config: MemberConfig) -> tuple[int, ...]:
    """Ids that end a turn: of the generation and model configuration and the tokenizer (`holders`), of the template,
    and of the user."""
    stop_ids: set[int] = set(config.stop_token_ids)
    for holder in holders:
        value = getattr(holder, "eos_token_id", None)
        stop_ids.update([value] if isinstance(value, int) else value or ())
    if (marker := prompts.turn_end()) is not None:
        stop_ids.add(marker)
    return tuple(sorted(stop_ids))


def ids_without_text(tokenizer: object, vocabulary_size: int, stop_ids: Sequence[int]) -> tuple[int, ...]:
    """Special tokens and vocabulary padding: they have no text, so no member may write them into the answer."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    padding = range(len(tokenizer), vocabulary_size)  # type: ignore[arg-type]
    special = {i for i, token in added.items() if token.special and i < vocabulary_size} | set(padding)
    return tuple(sorted(special - set(stop_ids)))
