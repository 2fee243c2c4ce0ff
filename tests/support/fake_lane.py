"""A lane of plain Python with scripted members whose tokens are words, without a model or torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specfuse_shared.candidate import CandidateLogprobs
from specfuse_shared.members.stages import (
    CacheUse,
    Close,
    Closed,
    Commit,
    Draft,
    DraftAlone,
    Drafted,
    Fault,
    Member,
    MemberInfo,
    Op,
    Open,
    Reply,
    StageRequest,
    StageResult,
    TokenCounts,
    Value,
    Verdicts,
    Verify,
    ignore_results,
)
from specfuse_shared.messages import Message, Tool
from specfuse_shared.text.codec import Encoding
from specfuse_shared.text.grammars.grammar import Grammar
from specfuse_shared.types import MemberReport

Say = Callable[[str, int], str]
"""(the answer so far, maximum words) → a member's continuation; "." is the end of the turn."""
Disturb = Callable[[StageRequest], Fault | None]
"""A fault to give instead of running a stage, or None."""


def scripted(text: str) -> Say:
    """A member that drafts this text, continuing from the end of the answer."""
    words = text.split(" ")

    def say(answer: str, limit: int) -> str:
        start = len(answer.split())
        return "".join(f" {word}" for word in words[start : start + limit])

    return say


class WordCodec:
    """Every word with the space before it is a token."""

    def encode(self, text: str) -> list[int]:
        return [hash(word) for word in text.split()]

    def extend(self, encoding: Encoding, addition: str) -> Encoding:
        text = encoding.text + addition
        return Encoding(text, tuple(self.encode(text)))

    def pieces(self, text: str) -> list[bytes]:
        return [f" {word}".encode() for word in text.split()]

    def pieces_after(self, before: Sequence[int], ids: Sequence[int], text: str) -> list[bytes]:
        return self.pieces(text)

    def alternatives(self, text: str, places: Sequence[Sequence[int]]) -> list[list[bytes]]:
        return self.spelled(places)

    def spelled(self, places: Sequence[Sequence[int]]) -> list[list[bytes]]:
        assert not any(places), "members of words report no other tokens"
        return [[] for _ in places]

    def head(self, encoding: Encoding, count: int) -> str:
        return "".join(f" {word}" for word in encoding.text.split()[:count])


class WordText:
    """The text side of a member of words."""

    codec = WordCodec()

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        return [hash(word) for message in messages for word in message.content.split()]

    def encode_thoughts(self, thoughts: str = "") -> list[int]:
        return []

    def prepare(self, grammar: Grammar | None = None) -> None:
        assert grammar is None, "no grammar is used with members of words"


@dataclass
class FakeLane:
    """Runs a stage immediately, in the caller's thread, and records the requests.

    `says` has the script and `sizes` the parameters of each member. `likes`: (member, text) → log p of each word of
    this text; others have −1. `disturb` injects faults. While `waiting` is a list, requests wait there.
    """

    says: Mapping[str, Say]
    likes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    disturb: Disturb = lambda request: None
    context_limit: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    may_guess: bool = False
    waiting: list[StageRequest] | None = None
    requests: list[StageRequest] = field(default_factory=list)
    submissions: list[Sequence[StageRequest]] = field(default_factory=list)
    answers: dict[tuple[int, str], str] = field(default_factory=dict)
    computed: Counter[tuple[int, str]] = field(default_factory=Counter)
    closed: bool = False
    fault: Fault | None = None
    reply: Reply = ignore_results

    @property
    def members(self) -> Sequence[MemberInfo]:
        return [self._info(name) for name in self.says]

    def parties(self) -> tuple[Member, ...]:
        """The coordinator's view of its members."""
        return tuple(Member(info, WordText()) for info in self.members)

    def memory(self) -> Mapping[str, int]:
        return {"fake": 1 << 30}

    def remember(self, limits: Mapping[str, int]) -> None:
        assert set(limits) == set(self.says)

    def cache_use(self) -> CacheUse:
        return CacheUse(cache_bytes=len(self.answers))

    def close(self) -> None:
        self.closed = True
        self.answers.clear()

    def reply_to(self, reply: Reply) -> None:
        self.reply = reply

    def submit(self, requests: Sequence[StageRequest]) -> None:
        self.submissions.append(requests)
        if self.waiting is not None:
            self.waiting.extend(requests)
            return
        self.reply([self._run(request) for request in requests])

    def ops(self, member: str, *kinds: type[Op]) -> list[Any]:
        """The stages of these kinds of a member."""
        return [request.op for request in self.requests if request.member == member and isinstance(request.op, kinds)]

    def release(self) -> None:
        """Run the waiting requests, and later ones immediately."""
        requests, self.waiting = self.waiting or [], None
        self.reply([self._run(request) for request in requests])

    def _run(self, request: StageRequest) -> StageResult:
        self.requests.append(request)
        key = request.answer, request.member
        fault = None if isinstance(request.op, Close) else self.disturb(request)
        value = None if fault is not None else self._value(key, request)
        counts = TokenCounts(len(self.answers.get(key, "").split()), 0, self.computed[key])
        return StageResult(*key, value, counts, fault)

    def _value(self, key: tuple[int, str], request: StageRequest) -> Value:
        match request.op:
            case Open():
                assert key not in self.answers, "opened twice"
                self.answers[key] = ""
            case Draft(limit=limit) | DraftAlone(limit=limit) as op:
                if isinstance(op, Draft):
                    self.answers[key] += op.commit
                words = self.says[request.member](self.answers[key], limit).split()
                if ends := "." in words[op.min_tokens_left :]:
                    words = words[: words.index(".", op.min_tokens_left)]
                text = "".join(f" {word}" for word in words)
                if isinstance(op, DraftAlone) and not ends:
                    self.answers[key] += text
                self.computed[key] += len(words)
                return Drafted(text, ends, len(words))
            case Verify(candidates=questions):
                return Verdicts(tuple(self._verdict(request.member, q.text, q.ends) for q in questions))
            case Commit(text=text):
                self.answers[key] += text
            case Close():
                self.answers.pop(key, None)
                return Closed()
        return None

    def _verdict(self, member: str, text: str, ends: bool) -> CandidateLogprobs:
        words = text.split() + ["."] * ends
        logprobs = (self.likes.get((member, text), -1.0),) * len(words)
        return CandidateLogprobs(text, ends, logprobs, tuple(map(len, words)))

    def _info(self, name: str) -> MemberInfo:
        report = MemberReport(
            name=name,
            model="words",
            architecture="words",
            parameters=self.sizes.get(name, 0),
            memory_bytes=0,
            device="fake",
            dtype="none",
            quantization=None,
            attention="none",
            verification="packed",
            probe_error=0.0,
            graphs="eager: no device",
            template="plain",
            context=self.context_limit,
            stop_token_ids=(),
            load_seconds=0.0,
        )
        return MemberInfo(
            name=name,
            weight=1.0,
            devices={"fake": 1.0},
            context_limit=self.context_limit,
            thinks=False,
            bytes_per_token=1,
            smallest_row=16,
            vocabulary_size=1,
            report=report,
            may_guess=self.may_guess,
        )
