"""Repeat the first election of each answer with other policies, without running a model again.

    python benchmarks/elections.py collect FILE --data DIR [--task rag] [--rows N] [--half choose] [--member PATH]…
    python benchmarks/elections.py table FILE [--metric f1]
    python benchmarks/elections.py drafts FILE [--metric f1]
    python benchmarks/elections.py early FILE [--metric f1] [--power 1.5]
    python benchmarks/elections.py rules FILE [--metric f1] [--power 1.5]

`collect`: the demo's two members and the given ones (hub ids, folders, GGUF files) each draft a first segment of twenty
tokens for each row. Every member verifies every draft, and all log p are stored.

`table` repeats the election for each pair, each trio and all members, with different ways to add up the votes and to
weight the members. It prints the mean score of the chosen candidate as an answer, its difference to the default with
its 95 % interval, and the score of each member alone.

With `--unsure N` a member also drafts from its N next best first tokens. With `--sampled N` it samples N drafts. With
`--instruction TEXT` every member votes a second time, with this instruction in its prompt. `drafts` prints how these
drafts change the score, and how votes on keys would.

`early` prints how the score changes if the election is decided after 5 or 10 of the 20 tokens, for several margins.
`rules` prints how it changes if one member leads and others can override it, if the vote is skipped when the lead is
sure, with geometric means, and if the winner is drawn by weight. `--power 0` gives all members equal votes, which is
the demo's setting.
"""

from __future__ import annotations

import itertools
import json
import math
import queue
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from quality_rows import read_rows
from rich.console import Console
from rich.progress import track
from rich.table import Table
from variants import Override, mean_probability

from specfuse_shared import EnsembleConfig, MemberConfig, Message, SamplingParams, demo_members
from specfuse_shared.candidate import CandidateLogprobs, RoundCandidate
from specfuse_shared.comparing import Question
from specfuse_shared.comparing.intervals import difference
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
    Verify,
    ignore_steps,
)
from specfuse_shared.policies import (
    AggregatePolicy,
    Electorate,
    Matrix,
    SecondedMean,
    Stretch,
    geometric_mean,
    weighted_mean,
)

# ── first rounds of answers ───────────────────────────────────────────────────────────────────────

SEGMENT = 20
"""Maximum tokens of a draft."""
PREFIXES = 2**30
"""Bytes for the prefix cache of each member: its drafts on a row share the prompt."""
SAMPLING_TEMPERATURE = 0.8

Allowed = Callable[["Claim"], bool]


@dataclass(frozen=True, slots=True)
class Voter:
    """A member with an instruction added to the question. One member can be several voters."""

    name: str
    member: Member
    instruction: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A voter that drafted a candidate, and the kind of draft: "own" (greedy), "sampled", or "unsure" (greedy after its
    second or third best first token; `gap` is p of the best − p of the second best)."""

    author: str
    kind: str = "own"
    gap: float = 0.0


def is_own(claim: Claim) -> bool:
    return claim.kind == "own"


@dataclass(frozen=True)
class Ballot:
    """A first round: the voters and the sizes of their models; for each candidate its claims and its metrics as an
    answer. `table[j][i]` has voter j's log-probabilities of candidate i."""

    voters: Sequence[str]
    sizes: Sequence[int]
    claims: Sequence[Sequence[Claim]]
    metrics: Sequence[Mapping[str, float]]
    table: Sequence[Sequence[CandidateLogprobs]]

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> Ballot:
        """Read a ballot from the JSON of its fields."""
        table = [[_logprobs(cell) for cell in row] for row in line["table"]]
        claims = [[Claim(**claim) for claim in claims] for claims in line["claims"]]
        return cls(**{**line, "claims": claims, "table": table})

    def alone(self, name: str, metric: str) -> float:
        """The metric of a member's own draft; 0 if it is empty."""
        drafted = (i for i, claims in enumerate(self.claims) if Claim(name) in claims)
        return next((self.metrics[i][metric] for i in drafted), 0.0)

    def chosen(
        self,
        voters: Sequence[str],
        aggregate: AggregatePolicy,
        power: float,
        metric: str,
        allowed: Allowed = is_own,
    ) -> float:
        """The metric of the candidate that these voters elect among their allowed drafts. A voter's weight is its
        number of parameters to this power."""
        authors = [{c.author for c in claims if c.author in voters and allowed(c)} for claims in self.claims]
        candidates = [i for i, names in enumerate(authors) if names]
        winner = self.elect(voters, candidates, authors, aggregate, power)
        return 0.0 if winner is None else self.metrics[winner][metric]

    def keyed(self, voters: Sequence[str], power: float, metric: str, allowed: Allowed) -> float:
        """The metric of the key with most votes, V(a) = Σ_j w_j Σ_s c_js 1[key of draft s = a], where c is the mean
        probability of the key's tokens. It applies to rows whose drafts are whole values."""
        votes = [0.0] * len(self.claims)
        for i, claims in enumerate(self.claims):
            for claim in claims:
                if claim.author in voters and allowed(claim):
                    j = self.voters.index(claim.author)
                    votes[i] += self.sizes[j] ** power * math.exp(statistics.fmean(self.table[j][i].logprobs))
        return self.metrics[votes.index(max(votes))][metric] if any(votes) else 0.0

    def elect(
        self,
        voters: Sequence[str],
        candidates: Sequence[int],
        authors: Sequence[set[str]],
        aggregate: AggregatePolicy,
        power: float,
        margin: float = 0.0,
    ) -> int | None:
        """The winner among these candidates; None without candidates, or if its lead is below `margin`."""
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        at = {name: self.voters.index(name) for name in voters}
        weights = {name: self.sizes[j] ** power for name, j in at.items()}
        total = sum(weights.values())
        electorate = Electorate(Stretch(), aggregate, {name: weight / total for name, weight in weights.items()})
        election = electorate.elect(
            [_candidate({name: self.table[j][i] for name, j in at.items()}, authors[i]) for i in candidates]
        )
        return candidates[election.winner] if election.is_clear(margin) or not margin else None

    def after(self, tokens: int) -> Ballot:
        """The ballot with each draft cut after this many tokens of its author."""
        rows = [list(row) for row in self.table]
        for i, claims in enumerate(self.claims):
            drafted = self.table[self.voters.index(claims[0].author)][i]
            if len(drafted.logprobs) > tokens:
                size = sum(drafted.token_bytes[:tokens])
                for row in rows:
                    row[i] = _cut(row[i], size)
        return replace(self, table=rows)


def _logprobs(cell: Mapping[str, Any]) -> CandidateLogprobs:
    return CandidateLogprobs(cell["text"], cell["ends"], tuple(cell["logprobs"]), tuple(cell["token_bytes"]))


def _candidate(logprobs: dict[str, CandidateLogprobs], authors: Collection[str]) -> RoundCandidate:
    """A candidate with the log-probabilities of each voter; `authors` drafted it."""
    text, ends = next((each.text, each.ends) for each in logprobs.values())
    return RoundCandidate(text, ends, [name for name in logprobs if name in authors], logprobs=logprobs)


def _cut(logprobs: CandidateLogprobs, size: int) -> CandidateLogprobs:
    """The tokens that begin within the first `size` bytes, as a candidate."""
    count = next((n for n, end in enumerate(itertools.accumulate(logprobs.token_bytes), 1) if end >= size), None)
    if count is None or count >= len(logprobs.logprobs):
        return logprobs
    text = logprobs.text.encode()[:size].decode("utf-8", "ignore")
    return CandidateLogprobs(text, False, logprobs.logprobs[:count], logprobs.token_bytes[:count])


class Collector:
    """Runs drafts and verifications on the members' lanes, one row at a time."""

    def __init__(self, assembly: Assembly, instructions: Sequence[str]) -> None:
        local = () if assembly.own is None else (LaneThread(assembly.own),)
        self._lanes = {info.name: lane for lane in (*local, *assembly.others) for info in lane.members}
        self._results: queue.Queue[Sequence[StageResult]] = queue.Queue()
        for lane in set(self._lanes.values()):
            lane.reply_to(self._results.put)
            lane.remember({info.name: PREFIXES for info in lane.members})
        self._numbers = itertools.count()
        suffixes = [("", ""), *((f"/{n}", text) for n, text in enumerate(instructions, 2))]
        self.voters = [Voter(m.name + suffix, m, text) for m in assembly.members for suffix, text in suffixes]

    def close(self) -> None:
        for lane in set(self._lanes.values()):
            lane.close()

    def _run(self, stages: Mapping[int, tuple[Member, Op]]) -> dict[int, Any]:
        """Run one stage for each answer number, and return its result by this number."""
        requests: dict[Lane, list[StageRequest]] = {}
        for number, (member, op) in stages.items():
            requests.setdefault(self._lanes[member.name], []).append(StageRequest(number, member.name, op))
        for lane, batch in requests.items():
            lane.submit(batch)
        values: dict[int, Any] = {}
        while len(values) < len(stages):
            for result in self._results.get():
                if result.error is not None:
                    raise RuntimeError(result.error.details)
                values[result.answer] = result.value
        return values

    def ballot(self, question: Question, unsure: int, sampled: int) -> Ballot:
        """Draft and verify. Each voter also drafts from `unsure` further first tokens, and samples `sampled` drafts."""
        opened: dict[int, Voter] = {}

        def open_all(voters: Sequence[Voter], params: SamplingParams) -> list[int]:
            numbers = [next(self._numbers) for _ in voters]
            stages: dict[int, tuple[Member, Op]] = {}
            for seed, (number, voter) in enumerate(zip(numbers, voters, strict=True)):
                text = "\n\n".join(filter(None, (question.prompt, voter.instruction)))
                prompt = tuple(voter.member.encode_prompt([Message("user", text)]))
                stages[number] = (voter.member, Open(prompt, params, seed))
                opened[number] = voter
            self._run(stages)
            return numbers

        def draft(numbers: Sequence[int], commits: Sequence[str]) -> list[ScoringQuery]:
            ops = {n: Draft(SEGMENT - bool(text), 1, commit=text) for n, text in zip(numbers, commits, strict=True)}
            results = self._run({n: (opened[n].member, op) for n, op in ops.items()})
            drafts = [results[n] for n in numbers]
            assert all(isinstance(each, Drafted) for each in drafts)
            free = greedy.grammar is None  # the end after a choice is certain, so it is not scored
            return [ScoringQuery(c + d.text, d.ends and free) for c, d in zip(commits, drafts, strict=True)]

        greedy = replace(question.params(), max_tokens=SEGMENT)
        if unsure or sampled:  # puts the prompt into the prefix cache, for the further drafts
            self._run(
                {number: (opened[number].member, Close(remember=True)) for number in open_all(self.voters, greedy)}
            )
            opened.clear()
        judges = open_all(self.voters, greedy)
        own_claims = [Claim(voter.name) for voter in self.voters]
        drafted = list(zip(own_claims, draft(judges, [""] * len(judges)), strict=True))
        if unsure:
            queries = dict(zip(judges, (query for _, query in drafted), strict=True))
            starts = list(self._alternatives(queries, opened, unsure))
            numbers = open_all([voter for voter, _, _ in starts], greedy)
            drafts = draft(numbers, [text for _, _, text in starts])
            drafted += [
                (Claim(voter.name, "unsure", gap), query) for (voter, gap, _), query in zip(starts, drafts, strict=True)
            ]
        if sampled:
            again = [voter for voter in self.voters for _ in range(sampled)]
            numbers = open_all(again, replace(greedy, temperature=SAMPLING_TEMPERATURE))
            drafts = draft(numbers, [""] * len(again))
            drafted += [(Claim(voter.name, "sampled"), query) for voter, query in zip(again, drafts, strict=True)]
        ballot = self._verified(question, judges, [pair for pair in drafted if pair[1].text or pair[1].ends])
        self._run({number: (voter.member, Close()) for number, voter in opened.items()})
        return ballot

    def _alternatives(
        self, drafts: Mapping[int, ScoringQuery], opened: Mapping[int, Voter], count: int
    ) -> Iterator[tuple[Voter, float, str]]:
        """Each voter's next best first tokens as text, with p of its best one − p of its second best."""
        queries = {n: query for n, query in drafts.items() if query.text}
        results = self._run({n: (opened[n].member, Verify((query,), top=count + 1)) for n, query in queries.items()})
        for number, query in queries.items():
            top = results[number].tops[0][0]
            chances = [math.exp(logprob) for _, logprob in top]
            codec = opened[number].member.codec
            pieces = codec.alternatives(query.text, [[token for token, _ in top]])[0]
            for piece in pieces[1:]:
                text = piece.decode("utf-8", "replace")
                if text.strip() and "�" not in text and not text.startswith("<"):
                    yield opened[number], chances[0] - chances[1], text

    def _verified(
        self, question: Question, judges: Sequence[int], drafted: Sequence[tuple[Claim, ScoringQuery]]
    ) -> Ballot:
        queries = tuple(dict.fromkeys(query for _, query in drafted))
        results = self._run({n: (v.member, Verify(queries)) for n, v in zip(judges, self.voters, strict=True)})
        return Ballot(
            voters=[voter.name for voter in self.voters],
            sizes=[voter.member.info.report.parameters for voter in self.voters],
            claims=[[claim for claim, query in drafted if query == each] for each in queries],
            metrics=[score(question, query.text) for query in queries],
            table=[list(results[number].each) for number in judges],
        )


@contextmanager
def collector(config: EnsembleConfig, instructions: Sequence[str] = ()) -> Iterator[Collector]:
    """A collector over the members of an ensemble; each member is one more voter for each instruction."""
    opened = Collector(assemble_ensemble(config, ignore_steps, None), instructions)
    try:
        yield opened
    finally:
        opened.close()


# ── elections ─────────────────────────────────────────────────────────────────────────────────────

app = typer.Typer(help=__doc__, add_completion=False)


def confidence(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """Weights by consistency and confidence within a round (after CoRE, arXiv 2510.13855)."""
    shares = [[score / (sum(row) or 1.0) for score in row] for row in scores]
    mean = [statistics.mean(column) for column in zip(*shares, strict=True)]
    lowest, votes = math.exp(-2), [0.0] * len(mean)
    for weight, row in zip(weights, shares, strict=True):
        nearness = [(math.exp(-2 * abs(p - m)) - lowest) / (1 - lowest) for p, m in zip(row, mean, strict=True)]
        entropy = -math.fsum(p * math.log(p) for p in row if p > 0)
        trust = min(10.0, math.fsum(nearness) / (entropy + 0.1))
        votes = [vote + weight * trust * n * p for vote, n, p in zip(votes, nearness, row, strict=True)]
    return votes


def shares(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """Every verifier divides one vote among the candidates."""
    return weighted_mean([[score / (sum(row) or 1.0) for score in row] for row in scores], weights, drafters)


def own_drafts(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """A vote on keys: a member votes only for its own draft, with its score of this draft."""
    return [math.fsum(weights[j] * scores[j][i] for j in authors) for i, authors in enumerate(drafters)]


POLICIES: Mapping[str, tuple[AggregatePolicy, float]] = {
    "seconded, size^1.5 (the default, except for choices)": (SecondedMean(), 1.5),
    "seconded, equal": (SecondedMean(), 0.0),
    "seconded, √size": (SecondedMean(), 0.5),
    "seconded, size": (SecondedMean(), 1.0),
    "seconded, size²": (SecondedMean(), 2.0),
    "weighted mean, equal": (weighted_mean, 0.0),
    "weighted mean, size^1.5": (weighted_mean, 1.5),
    "geometric mean, equal": (geometric_mean, 0.0),
    "geometric mean, size^1.5": (geometric_mean, 1.5),
    "one vote divided, size^1.5 (the default for choices)": (shares, 1.5),
    "own drafts only, size^1.5": (own_drafts, 1.5),
    "own drafts only, equal": (own_drafts, 0.0),
    "confidence and consistency, equal": (confidence, 0.0),
    "confidence and consistency, size^1.5": (confidence, 1.5),
}


@app.command()
def collect(
    file: Path,
    data: Annotated[Path, typer.Option(help="folder of JSONL files")],
    task: Annotated[str, typer.Option(help="a task, by name")] = "rag",
    rows: Annotated[int, typer.Option(help="at most this many")] = 75,
    half: Annotated[str, typer.Option(help="choose, confirm or all")] = "choose",
    member: Annotated[list[str], typer.Option(help="a further member")] = [],  # noqa: B006
    demo: Annotated[bool, typer.Option(help="with the demo's members")] = True,
    unsure: Annotated[int, typer.Option(help="number of further first tokens to draft from")] = 0,
    sampled: Annotated[int, typer.Option(help="number of sampled drafts")] = 0,
    instruction: Annotated[list[str], typer.Option(help="members vote a second time with this instruction")] = [],  # noqa: B006
) -> None:
    """Draft and verify first segments, and write one line of JSON for each row."""
    members = [*(demo_members() if demo else ()), *(MemberConfig(name) for name in member)]
    config = EnsembleConfig(members, first_segment_tokens=SEGMENT)
    with collector(config, instruction) as collecting, file.open("w", encoding="utf-8") as out:
        for question in track(read_rows(data, [task], half, rows), task):
            out.write(json.dumps(asdict(collecting.ballot(question, unsure, sampled))) + "\n")
            out.flush()


Metric = Annotated[str, typer.Option(help="a metric of the task: f1, contains, rougeL")]
Power = Annotated[float, typer.Option(help="exponent of a member's size in its weight; 0: equal votes")]


@app.command()
def table(file: Path, metric: Metric = "f1") -> None:
    """Repeat the elections with other policies."""
    ballots, console = _read(file), Console(width=150)
    alone = _alone(ballots, metric)
    means = ", ".join(f"{name} {statistics.mean(scores):.1f}" for name, scores in alone.items())
    console.print(f"{len(ballots)} rows; alone: {means}")
    for voters in _ensembles(ballots[0].voters):
        scores = {name: [each.chosen(voters, *policy, metric) for each in ballots] for name, policy in POLICIES.items()}
        console.print(_compared(voters, scores, alone, "votes", metric))


@app.command()
def drafts(file: Path, metric: Metric = "f1") -> None:
    """Add further drafts of each member as candidates."""
    ballots, console = _read(file), Console(width=150)
    alone = _alone(ballots, metric)
    policy = next(iter(POLICIES.values()))
    sampled = any(claim.kind == "sampled" for each in ballots for claims in each.claims for claim in claims)
    for voters in [*([name] for name in ballots[0].voters), *_ensembles(ballots[0].voters)]:
        scores = {
            f"{kind} ({_drafts_a_row(ballots, voters, allowed):.1f})": [
                each.chosen(voters, *policy, metric, allowed) for each in ballots
            ]
            for kind, allowed in DRAFTS.items()
        }
        if sampled:
            scores["votes on keys, own and sampled"] = [
                each.keyed(voters, policy[1], metric, _sampled) for each in ballots
            ]
        console.print(_compared(voters, scores, alone, "drafts (a row)", metric))


@app.command()
def early(file: Path, metric: Metric = "f1", power: Power = 1.5) -> None:
    """Decide the election before the drafts end."""
    ballots, console = _read(file), Console(width=150)
    alone = _alone(ballots, metric)
    for voters in _ensembles(ballots[0].voters):
        scores = {}
        for rule in EARLY:
            ends = [_decided(each, voters, rule, power) for each in ballots]
            points = [0.0 if at is None else b.metrics[at][metric] for b, (at, _) in zip(ballots, ends, strict=True)]
            scores[f"{rule}: {_when([tokens for _, tokens in ends])}"] = points
        console.print(
            _compared(voters, scores, alone, "margin at 5, at 10, waits for an ended draft: decided at", metric)
        )


@app.command()
def rules(file: Path, metric: Metric = "f1", power: Power = 1.5) -> None:
    """Let one member lead, skip the vote, take another mean, or draw the winner by weight."""
    ballots, console = _read(file), Console(width=150)
    alone = _alone(ballots, metric)
    for voters in _ensembles(ballots[0].voters):
        scores = {
            name: [rule(each, voters, power, metric) for each in ballots] for name, rule in rules_for(voters).items()
        }
        console.print(_compared(voters, scores, alone, f"rule (votes by size^{power:g})", metric))


Rule = Callable[[Ballot, Sequence[str], float, str], float]
"""A ballot, its voters, the power of their sizes and a metric → the winner's points."""
TIMES = (1.5, 2.0, 3.0, 4.0)
"""Factors on the votes for the lead's candidate."""
SURE = 0.5
"""Mean probability of the lead's own tokens above which its draft wins without a vote."""


def rules_for(voters: Sequence[str]) -> dict[str, Rule]:
    """Name → rule, the default first. Each voter is the lead once."""
    by_name: dict[str, Rule] = {
        "seconded mean: the default": _by(SecondedMean()),
        "geometric mean": _by(geometric_mean),
    }
    for number, name in enumerate(voters):
        by_name |= {f"{name} leads, × {times:g}": _by(Override(number, times)) for times in TIMES}
        by_name[f"{name} leads, no vote if it is sure"] = partial(_skipping, name)
    return {**by_name, "lottery by weight: its mean": _drawn, "the better draft by references: a ceiling": _ceiling}


def _by(aggregate: AggregatePolicy) -> Rule:
    return lambda ballot, voters, power, metric: ballot.chosen(voters, aggregate, power, metric)


def _skipping(lead: str, ballot: Ballot, voters: Sequence[str], power: float, metric: str) -> float:
    drafted = next((i for i, claims in enumerate(ballot.claims) if Claim(lead) in claims), None)
    if drafted is not None and mean_probability(ballot.table[ballot.voters.index(lead)][drafted]) > SURE:
        return ballot.metrics[drafted][metric]
    return ballot.chosen(voters, SecondedMean(), power, metric)


def _drawn(ballot: Ballot, voters: Sequence[str], power: float, metric: str) -> float:
    weights = [ballot.sizes[ballot.voters.index(name)] ** power for name in voters]
    points = (ballot.alone(name, metric) for name in voters)
    total: float = sum(weight * each for weight, each in zip(weights, points, strict=True))
    share: float = total / sum(weights)
    return share


def _ceiling(ballot: Ballot, voters: Sequence[str], power: float, metric: str) -> float:
    return max(ballot.alone(name, metric) for name in voters)


EARLY: Sequence[tuple[float, float, bool]] = [
    (math.inf, math.inf, False),
    *((margin, margin, waits) for margin in (8, 3, 2, 1.5, 1) for waits in (False, True)),
    *((margin, 1, True) for margin in (8, 3, 2, 1.5)),
]
"""Margins after 5 and after 10 tokens, and whether a draft that has ended delays the decision to the end of all drafts.
The first rule decides at the end."""


def _decided(
    ballot: Ballot, voters: Sequence[str], rule: tuple[float, float, bool], power: float = 1.5
) -> tuple[int | None, int]:
    """The winner, and after how many tokens it is decided. With the rule's third value, a draft that has ended prevents
    an early decision: such a short answer is compared as a whole."""
    policy = (SecondedMean(), power)
    authors = [{c.author for c in claims if c.author in voters and is_own(c)} for claims in ballot.claims]
    candidates = [i for i, names in enumerate(authors) if names]
    for tokens, margin in zip((5, 10), rule[:2], strict=True):
        shortened = ballot.after(tokens)
        short = any(shortened.table[0][i].ends for i in candidates)
        winner = shortened.elect(voters, candidates, authors, *policy, margin)
        if winner is not None and not (short and rule[2]):
            return winner, tokens
    return ballot.elect(voters, candidates, authors, *policy), SEGMENT


def _when(tokens: Sequence[int]) -> str:
    return ", ".join(f"{t}: {100 * sum(each == t for each in tokens) / len(tokens):.0f} %" for t in (5, 10, SEGMENT))


def _below(gap: float) -> Allowed:
    return lambda claim: is_own(claim) or (claim.kind == "unsure" and claim.gap < gap)


def _sampled(claim: Claim) -> bool:
    return claim.kind in ("own", "sampled")


DRAFTS: Mapping[str, Allowed] = {
    "own drafts: the default": is_own,
    "p1 − p2 < 0.1": _below(0.1),
    "p1 − p2 < 0.2": _below(0.2),
    "p1 − p2 < 0.4": _below(0.4),
    "three each": _below(1.1),
    "sampled": _sampled,
}


def _drafts_a_row(ballots: Sequence[Ballot], voters: Sequence[str], allowed: Allowed) -> float:
    return statistics.mean(
        sum(claim.author in voters and allowed(claim) for claims in each.claims for claim in claims) for each in ballots
    )


def _compared(
    voters: Sequence[str],
    scores: Mapping[str, Sequence[float]],
    alone: Mapping[str, Sequence[float]],
    heading: str,
    metric: str,
) -> Table:
    """A line for each variant: its mean, and its differences to the first variant and to the best member."""
    lines = Table(title=" + ".join(voters), title_justify="left")
    for head in (heading, metric, "to the first", "to the best member"):
        lines.add_column(head)
    best = max((alone[name] for name in voters), key=statistics.mean)
    default = next(iter(scores.values()))
    for name, values in scores.items():
        gap = "" if values is default else str(difference(values, default))
        lines.add_row(name, f"{statistics.mean(values):.1f}", gap, str(difference(values, best)))
    return lines


def _ensembles(names: Sequence[str]) -> Iterator[list[str]]:
    for size in range(2, len(names) + 1):
        yield from map(list, itertools.combinations(names, size))


def _alone(ballots: Sequence[Ballot], metric: str) -> dict[str, list[float]]:
    return {name: [each.alone(name, metric) for each in ballots] for name in ballots[0].voters}


def _read(file: Path) -> list[Ballot]:
    return [Ballot.read(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    app()
