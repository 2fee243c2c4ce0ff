"""First rounds of answers, as data: what members might say first, and what each of them thinks of all that."""

from __future__ import annotations

import itertools
import math
import queue
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from specfuse_shared import EnsembleConfig, Message, SamplingParams
from specfuse_shared.comparing import Question
from specfuse_shared.comparing.metrics import score
from specfuse_shared.members.assembly import Assembly, assemble_ensemble
from specfuse_shared.members.local.lane import LaneThread
from specfuse_shared.members.stages import (
    Close,
    Draft,
    Drafted,
    Lane,
    Member,
    Op,
    Open,
    ScoringQuery,
    StageRequest,
    StageResult,
    Verdicts,
    Verify,
    ignore_steps,
)
from specfuse_shared.policies import AggregatePolicy, CandidateLogprobs, Electorate, Stretch

SEGMENT = 20
"""Most tokens of a draft."""
PREFIXES = 2**30
"""Bytes of a member's past answers that are kept: its drafts on a row begin with the same prompt."""
WARMTH = 0.8
"""Temperature of sampled drafts."""
Allowed = Callable[["Claim"], bool]


@dataclass(frozen=True, slots=True)
class Voter:
    """A member, and what it is told besides the question: one member may stand several times."""

    name: str
    member: Member
    instruction: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who might have drafted a candidate, and how: "own" (its greedy draft), "unsure" (greedy behind its second or
    third first token, where p of the first − p of the second is `gap`), or "sampled"."""

    author: str
    kind: str = "own"
    gap: float = 0.0


def is_own(claim: Claim) -> bool:
    return claim.kind == "own"


@dataclass(frozen=True)
class Ballot:
    """A first round: who votes, and the sizes of these members; of each candidate who claims it, its metrics as an
    answer, and `table[j][i]`, candidate i in the eyes of voter j."""

    voters: Sequence[str]
    sizes: Sequence[int]
    claims: Sequence[Sequence[Claim]]
    metrics: Sequence[Mapping[str, float]]
    table: Sequence[Sequence[CandidateLogprobs]]

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> Ballot:
        """From JSON of its fields."""
        as_seen: Callable[[Mapping[str, Any]], CandidateLogprobs] = lambda seen: CandidateLogprobs(  # noqa: E731
            seen["text"], seen["ends"], tuple(seen["logprobs"]), tuple(seen["token_bytes"])
        )
        table = [[as_seen(seen) for seen in row] for row in line["table"]]
        return cls(**{**line, "claims": [[Claim(**each) for each in some] for some in line["claims"]], "table": table})

    def alone(self, name: str, metric: str) -> float:
        """The metric of a member's own draft; 0 if it said nothing."""
        own = (i for i, claims in enumerate(self.claims) if Claim(name) in claims)
        return next((self.metrics[i][metric] for i in own), 0.0)

    def chosen(
        self,
        some: Sequence[str],
        aggregate: AggregatePolicy,
        power: float,
        metric: str,
        allowed: Allowed = is_own,
    ) -> float:
        """The metric of what these voters choose among what they may draft; a vote counts its member's parameters to
        this power."""
        authors = [{c.author for c in claims if c.author in some and allowed(c)} for claims in self.claims]
        left = [i for i, names in enumerate(authors) if names]
        winner = self.elect(some, left, authors, aggregate, power)
        return 0.0 if winner is None else self.metrics[winner][metric]

    def keyed(self, some: Sequence[str], power: float, metric: str, allowed: Allowed) -> float:
        """The metric of the key with most votes, V(a) = Σ_j w_j Σ_s c_js 1[key of draft s = a], where c is the mean
        probability of the key's tokens; for rows whose drafts are whole values."""
        votes = [0.0] * len(self.claims)
        for i, claims in enumerate(self.claims):
            for claim in claims:
                if claim.author in some and allowed(claim):
                    j = self.voters.index(claim.author)
                    votes[i] += self.sizes[j] ** power * math.exp(statistics.fmean(self.table[j][i].logprobs))
        return self.metrics[votes.index(max(votes))][metric] if any(votes) else 0.0

    def elect(
        self,
        some: Sequence[str],
        left: Sequence[int],
        authors: Sequence[set[str]],
        aggregate: AggregatePolicy,
        power: float,
        margin: float = 0.0,
    ) -> int | None:
        """The winner among the candidates that are `left`; None if there are none, or it is not clear from `margin`."""
        if len(left) < 2:
            return left[0] if left else None
        at = [self.voters.index(name) for name in some]
        weights = [self.sizes[j] ** power for j in at]
        electorate = Electorate(Stretch(), aggregate, [weight / sum(weights) for weight in weights])
        rows = [[self.table[j][i] for i in left] for j in at]
        drafters = [[some.index(name) for name in some if name in authors[i]] for i in left]
        election = electorate.elect(rows, drafters, [False] * len(left))
        return left[election.winner] if election.is_clear(margin) or not margin else None

    def looked_at(self, tokens: int) -> Ballot:
        """As if drafts had ended after so many tokens of who wrote them."""
        rows = [list(row) for row in self.table]
        for i, claims in enumerate(self.claims):
            own = self.table[self.voters.index(claims[0].author)][i]
            if len(own.logprobs) > tokens:
                size = sum(own.token_bytes[:tokens])
                for row in rows:
                    row[i] = _begun(row[i], size)
        return replace(self, table=rows)


def _begun(seen: CandidateLogprobs, size: int) -> CandidateLogprobs:
    """The tokens that begin within the first `size` bytes, as a candidate."""
    count = next((n for n, end in enumerate(itertools.accumulate(seen.token_bytes), 1) if end >= size), None)
    if count is None or count >= len(seen.logprobs):
        return seen
    text = seen.text.encode()[:size].decode("utf-8", "ignore")
    return CandidateLogprobs(text, False, seen.logprobs[:count], seen.token_bytes[:count])


class Collector:
    """Members that are asked for stages directly, one row after another."""

    def __init__(self, assembly: Assembly, instructions: Sequence[str]) -> None:
        own = () if assembly.own is None else (LaneThread(assembly.own),)
        self._lanes = {info.name: lane for lane in (*own, *assembly.others) for info in lane.members}
        self._results: queue.Queue[Sequence[StageResult]] = queue.Queue()
        for lane in set(self._lanes.values()):
            lane.reply_to(self._results.put)
            lane.remember({info.name: PREFIXES for info in lane.members})
        self._numbers = itertools.count()
        told = [("", ""), *((f"/{n}", text) for n, text in enumerate(instructions, 2))]
        self.voters = [Voter(m.name + mark, m, text) for m in assembly.members for mark, text in told]

    def close(self) -> None:
        for lane in set(self._lanes.values()):
            lane.close()

    def _ask(self, asked: Mapping[int, tuple[Member, Op]]) -> dict[int, Any]:
        """What comes of stages, by the number of their answer."""
        requests: dict[Lane, list[StageRequest]] = {}
        for number, (member, op) in asked.items():
            requests.setdefault(self._lanes[member.name], []).append(StageRequest(number, member.name, op))
        for lane, some in requests.items():
            lane.submit(some)
        found: dict[int, Any] = {}
        while len(found) < len(asked):
            for result in self._results.get():
                if result.error is not None:
                    raise RuntimeError(result.error.details)
                found[result.answer] = result.value
        return found

    def ballot(self, question: Question, unsure: int, sampled: int) -> Ballot:
        """`unsure`: from so many further first tokens each voter drafts; `sampled`: so many drafts more are sampled."""
        opened: dict[int, Voter] = {}

        def open_all(voters: Sequence[Voter], params: SamplingParams) -> list[int]:
            numbers = [next(self._numbers) for _ in voters]
            asked: dict[int, tuple[Member, Op]] = {}
            for seed, (number, voter) in enumerate(zip(numbers, voters, strict=True)):
                text = "\n\n".join(filter(None, (question.prompt, voter.instruction)))
                prompt = tuple(voter.member.encode_prompt([Message("user", text)]))
                asked[number] = (voter.member, Open(prompt, params, seed))
                opened[number] = voter
            self._ask(asked)
            return numbers

        def draft(numbers: Sequence[int], commits: Sequence[str]) -> list[ScoringQuery]:
            ops = {n: Draft(SEGMENT - bool(text), 1, commit=text) for n, text in zip(numbers, commits, strict=True)}
            found = self._ask({n: (opened[n].member, op) for n, op in ops.items()})
            drafts = [found[n] for n in numbers]
            assert all(isinstance(each, Drafted) for each in drafts)
            free = greedy.grammar is None  # behind a choice nothing can come, so that its end is no event
            return [ScoringQuery(c + d.text, d.ends and free) for c, d in zip(commits, drafts, strict=True)]

        greedy = replace(question.params(), max_tokens=SEGMENT)
        if unsure or sampled:  # so that every further draft finds the prompt read
            self._ask(
                {number: (opened[number].member, Close(remember=True)) for number in open_all(self.voters, greedy)}
            )
            opened.clear()
        judges = open_all(self.voters, greedy)
        said = list(zip((Claim(voter.name) for voter in self.voters), draft(judges, [""] * len(judges)), strict=True))
        if unsure:
            begun = list(self._others(dict(zip(judges, (query for _, query in said), strict=True)), opened, unsure))
            numbers = open_all([voter for voter, _, _ in begun], greedy)
            drafts = draft(numbers, [text for _, _, text in begun])
            said += [(Claim(v.name, "unsure", gap), query) for (v, gap, _), query in zip(begun, drafts, strict=True)]
        if sampled:
            again = [voter for voter in self.voters for _ in range(sampled)]
            numbers = open_all(again, replace(greedy, temperature=WARMTH))
            drafts = draft(numbers, [""] * len(again))
            said += [(Claim(voter.name, "sampled"), query) for voter, query in zip(again, drafts, strict=True)]
        ballot = self._judged(question, judges, [pair for pair in said if pair[1].text or pair[1].ends])
        self._ask({number: (voter.member, Close()) for number, voter in opened.items()})
        return ballot

    def _others(
        self, said: Mapping[int, ScoringQuery], opened: Mapping[int, Voter], count: int
    ) -> Iterator[tuple[Voter, float, str]]:
        """For each voter its next best first tokens as texts, and how sure it was of the best."""
        known = {n: query for n, query in said.items() if query.text}
        found = self._ask({n: (opened[n].member, Verify((query,), top=count + 1)) for n, query in known.items()})
        for number, query in known.items():
            top = found[number].each[0].tops[0]
            chances = [math.exp(logprob) for _, logprob in top]
            codec = opened[number].member.codec
            pieces = codec.alternatives(query.text, [[token for token, _ in top]])[0]
            for piece in pieces[1:]:
                text = piece.decode("utf-8", "replace")
                if text.strip() and "�" not in text and not text.startswith("<"):
                    yield opened[number], chances[0] - chances[1], text

    def _judged(self, question: Question, judges: Sequence[int], said: Sequence[tuple[Claim, ScoringQuery]]) -> Ballot:
        queries = tuple(dict.fromkeys(query for _, query in said))
        found = self._ask({n: (v.member, Verify(queries)) for n, v in zip(judges, self.voters, strict=True)})
        table = []
        for number in judges:
            assert isinstance(found[number], Verdicts)
            table.append(
                [
                    CandidateLogprobs(query.text, query.ends, verdict.logprobs, verdict.token_bytes)
                    for query, verdict in zip(queries, found[number].each, strict=True)
                ]
            )
        return Ballot(
            voters=[voter.name for voter in self.voters],
            sizes=[voter.member.info.report.parameters for voter in self.voters],
            claims=[[claim for claim, query in said if query == each] for each in queries],
            metrics=[score(question, query.text) for query in queries],
            table=table,
        )


@contextmanager
def collector(config: EnsembleConfig, instructions: Sequence[str] = ()) -> Iterator[Collector]:
    """Over the members of an ensemble, each of which stands once more with each instruction."""
    opened = Collector(assemble_ensemble(config, ignore_steps, None), instructions)
    try:
        yield opened
    finally:
        opened.close()
