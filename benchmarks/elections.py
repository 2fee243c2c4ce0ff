"""The first election of each answer, held again under other policies: no model runs for that.

    python benchmarks/elections.py collect FILE --data DIR [--task rag] [--rows N] [--half choose] [--member PATH]…
    python benchmarks/elections.py table FILE [--metric f1]
    python benchmarks/elections.py drafts FILE [--metric f1]
    python benchmarks/elections.py early FILE [--metric f1] [--power 1.5]
    python benchmarks/elections.py rules FILE [--metric f1] [--power 1.5]

`collect` has the demo's two members and the given ones (hub ids, folders, GGUF files) draft a first segment of twenty
tokens for each row, all drafts verified by all, and keeps every log p. `table` holds the election again for each pair,
trio and for all of them: how votes are added up, and what each member's counts. Told: the mean score of the chosen
candidate as an answer, its difference to the default with its 95 % interval, and each member alone.

With `--unsure N` a member drafts from its N next best first tokens, too; with `--sampled N` it samples N drafts; with
`--instruction TEXT` it stands once more, told so. `drafts` says what that changes, and what votes on keys would.
`early` says what it changes to decide after 5 or 10 of the 20 tokens, from which margin. `rules` says what it changes
to let one member lead and others override it, to skip the vote where the lead is sure, to take geometric means, or to
draw the winner by weight; `--power 0` for members whose votes are equal, as the demo's.
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

# ── first rounds of answers, as data ──────────────────────────────────────────────────────────────

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
        at = {name: self.voters.index(name) for name in some}
        weights = {name: self.sizes[j] ** power for name, j in at.items()}
        total = sum(weights.values())
        electorate = Electorate(Stretch(), aggregate, {name: weight / total for name, weight in weights.items()})
        election = electorate.elect(
            [_candidate({name: self.table[j][i] for name, j in at.items()}, authors[i]) for i in left]
        )
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


def _candidate(seen: dict[str, CandidateLogprobs], authors: Collection[str]) -> RoundCandidate:
    """A candidate as these voters see it; those in `authors` drafted it."""
    text, ends = next((one.text, one.ends) for one in seen.values())
    return RoundCandidate(text, ends, [name for name in seen if name in authors], logprobs=seen)


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
            top = found[number].tops[0][0]
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
        return Ballot(
            voters=[voter.name for voter in self.voters],
            sizes=[voter.member.info.report.parameters for voter in self.voters],
            claims=[[claim for claim, query in said if query == each] for each in queries],
            metrics=[score(question, query.text) for query in queries],
            table=[list(found[number].each) for number in judges],
        )


@contextmanager
def collector(config: EnsembleConfig, instructions: Sequence[str] = ()) -> Iterator[Collector]:
    """Over the members of an ensemble, each of which stands once more with each instruction."""
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
    least, votes = math.exp(-2), [0.0] * len(mean)
    for weight, row in zip(weights, shares, strict=True):
        near = [(math.exp(-2 * abs(p - m)) - least) / (1 - least) for p, m in zip(row, mean, strict=True)]
        entropy = -math.fsum(p * math.log(p) for p in row if p > 0)
        trust = min(10.0, math.fsum(near) / (entropy + 0.1))
        votes = [vote + weight * trust * n * p for vote, n, p in zip(votes, near, row, strict=True)]
    return votes


def shares(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """Every verifier shares one vote out among the candidates."""
    return weighted_mean([[score / (sum(row) or 1.0) for score in row] for row in scores], weights, drafters)


def own_drafts(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """A vote on keys: what a member drafted has its vote, as far as it is sure of it, and nothing else has."""
    return [math.fsum(weights[j] * scores[j][i] for j in authors) for i, authors in enumerate(drafters)]


POLICIES: Mapping[str, tuple[AggregatePolicy, float]] = {
    "seconded, size^1.5 (the default but for choices)": (SecondedMean(), 1.5),
    "seconded, equal": (SecondedMean(), 0.0),
    "seconded, √size": (SecondedMean(), 0.5),
    "seconded, size": (SecondedMean(), 1.0),
    "seconded, size²": (SecondedMean(), 2.0),
    "weighted mean, equal": (weighted_mean, 0.0),
    "weighted mean, size^1.5": (weighted_mean, 1.5),
    "geometric mean, equal": (geometric_mean, 0.0),
    "geometric mean, size^1.5": (geometric_mean, 1.5),
    "one vote to share out, size^1.5 (for choices the default)": (shares, 1.5),
    "own drafts alone, size^1.5": (own_drafts, 1.5),
    "own drafts alone, equal": (own_drafts, 0.0),
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
    unsure: Annotated[int, typer.Option(help="drafts from so many further first tokens")] = 0,
    sampled: Annotated[int, typer.Option(help="so many sampled drafts")] = 0,
    instruction: Annotated[list[str], typer.Option(help="members stand once more, told this")] = [],  # noqa: B006
) -> None:
    """Draft and verify first segments; one line of JSON for each row."""
    members = [*(demo_members() if demo else ()), *(MemberConfig(name) for name in member)]
    config = EnsembleConfig(members, first_segment_tokens=SEGMENT)
    with collector(config, instruction) as asked, file.open("w", encoding="utf-8") as out:
        for question in track(read_rows(data, [task], half, rows), task):
            out.write(json.dumps(asdict(asked.ballot(question, unsure, sampled))) + "\n")
            out.flush()


Metric = Annotated[str, typer.Option(help="a metric of the task: f1, contains, rougeL")]
Power = Annotated[float, typer.Option(help="a vote counts its member's size to this power; 0: equal votes")]


@app.command()
def table(file: Path, metric: Metric = "f1") -> None:
    """Hold the elections again."""
    ballots, console = _read(file), Console(width=150)
    names = ballots[0].voters
    alone = _alone(ballots, metric)
    told = ", ".join(f"{name} {statistics.mean(found):.1f}" for name, found in alone.items())
    console.print(f"{len(ballots)} rows; alone: {told}")
    for some in _ensembles(names):
        found = {name: [each.chosen(some, *policy, metric) for each in ballots] for name, policy in POLICIES.items()}
        console.print(_compared(some, found, alone, "votes", metric))


@app.command()
def drafts(file: Path, metric: Metric = "f1") -> None:
    """Let members stand with further drafts."""
    ballots, console = _read(file), Console(width=150)
    alone = _alone(ballots, metric)
    policy = next(iter(POLICIES.values()))
    sampled = any(claim.kind == "sampled" for each in ballots for claims in each.claims for claim in claims)
    for some in [*([name] for name in ballots[0].voters), *_ensembles(ballots[0].voters)]:
        shown = {
            f"{what} ({_drafts_a_row(ballots, some, allowed):.1f})": [
                each.chosen(some, *policy, metric, allowed) for each in ballots
            ]
            for what, allowed in DRAFTS.items()
        }
        if sampled:
            shown["votes on keys, own and sampled"] = [
                each.keyed(some, policy[1], metric, _sampled) for each in ballots
            ]
        console.print(_compared(some, shown, alone, "drafts (a row)", metric))


@app.command()
def early(file: Path, metric: Metric = "f1", power: Power = 1.5) -> None:
    """Decide before the drafts' end."""
    ballots, console = _read(file), Console(width=150)
    alone = _alone(ballots, metric)
    for some in _ensembles(ballots[0].voters):
        shown = {}
        for rule in EARLY:
            ends = [_decided(each, some, rule, power) for each in ballots]
            scores = [0.0 if at is None else b.metrics[at][metric] for b, (at, _) in zip(ballots, ends, strict=True)]
            shown[f"{rule}: {_when([tokens for _, tokens in ends])}"] = scores
        console.print(_compared(some, shown, alone, "margin at 5, at 10, waits for ends: decided at", metric))


@app.command()
def rules(file: Path, metric: Metric = "f1", power: Power = 1.5) -> None:
    """Let one member lead, skip the vote, take another mean, or draw lots."""
    ballots, console = _read(file), Console(width=150)
    alone = _alone(ballots, metric)
    for some in _ensembles(ballots[0].voters):
        shown = {name: [rule(each, some, power, metric) for each in ballots] for name, rule in rules_for(some).items()}
        console.print(_compared(some, shown, alone, f"rule (votes by size^{power:g})", metric))


Rule = Callable[[Ballot, Sequence[str], float, str], float]
"""What a ballot among some voters gives, in points: sizes to which power, by which metric."""
TIMES = (1.5, 2.0, 3.0, 4.0)
"""How much more the lead's candidate counts."""
SURE = 0.5
"""Mean probability of a token of its own draft above which the lead is not voted on."""


def rules_for(some: Sequence[str]) -> dict[str, Rule]:
    """Name → rule; the default first. Each of the voters leads once."""
    found: dict[str, Rule] = {"seconded mean: the default": _by(SecondedMean()), "geometric mean": _by(geometric_mean)}
    for number, name in enumerate(some):
        found |= {f"{name} leads, × {times:g}": _by(Override(number, times)) for times in TIMES}
        found[f"{name} leads, no vote where it is sure"] = partial(_skipping, name)
    return {**found, "lottery by weight: its mean": _drawn, "the better draft by references: a ceiling": _ceiling}


def _by(aggregate: AggregatePolicy) -> Rule:
    return lambda ballot, some, power, metric: ballot.chosen(some, aggregate, power, metric)


def _skipping(lead: str, ballot: Ballot, some: Sequence[str], power: float, metric: str) -> float:
    own = next((i for i, claims in enumerate(ballot.claims) if Claim(lead) in claims), None)
    if own is not None and mean_probability(ballot.table[ballot.voters.index(lead)][own]) > SURE:
        return ballot.metrics[own][metric]
    return ballot.chosen(some, SecondedMean(), power, metric)


def _drawn(ballot: Ballot, some: Sequence[str], power: float, metric: str) -> float:
    weights = [ballot.sizes[ballot.voters.index(name)] ** power for name in some]
    points = (ballot.alone(name, metric) for name in some)
    total: float = sum(weight * each for weight, each in zip(weights, points, strict=True))
    share: float = total / sum(weights)
    return share


def _ceiling(ballot: Ballot, some: Sequence[str], power: float, metric: str) -> float:
    return max(ballot.alone(name, metric) for name in some)


EARLY: Sequence[tuple[float, float, bool]] = [
    (math.inf, math.inf, False),
    *((margin, margin, waits) for margin in (8, 3, 2, 1.5, 1) for waits in (False, True)),
    *((margin, 1, True) for margin in (8, 3, 2, 1.5)),
]
"""Margins after 5 and after 10 tokens, and whether a candidate that ended by then is waited for. First: at the end."""


def _decided(
    ballot: Ballot, some: Sequence[str], rule: tuple[float, float, bool], power: float = 1.5
) -> tuple[int | None, int]:
    """What is chosen, and after how many tokens. With the third of the rule, never early while a candidate that ended
    stands: an answer that short is compared as a whole."""
    policy = (SecondedMean(), power)
    authors = [{c.author for c in claims if c.author in some and is_own(c)} for claims in ballot.claims]
    left = [i for i, names in enumerate(authors) if names]
    for tokens, margin in zip((5, 10), rule[:2], strict=True):
        seen = ballot.looked_at(tokens)
        short = any(seen.table[0][i].ends for i in left)
        winner = seen.elect(some, left, authors, *policy, margin)
        if winner is not None and not (short and rule[2]):
            return winner, tokens
    return ballot.elect(some, left, authors, *policy), SEGMENT


def _when(tokens: Sequence[int]) -> str:
    return ", ".join(f"{t}: {100 * sum(each == t for each in tokens) / len(tokens):.0f} %" for t in (5, 10, SEGMENT))


def _below(gap: float) -> Allowed:
    return lambda claim: is_own(claim) or (claim.kind == "unsure" and claim.gap < gap)


def _sampled(claim: Claim) -> bool:
    return claim.kind in ("own", "sampled")


DRAFTS: Mapping[str, Allowed] = {
    "own: the default": is_own,
    "p1 − p2 < 0.1": _below(0.1),
    "p1 − p2 < 0.2": _below(0.2),
    "p1 − p2 < 0.4": _below(0.4),
    "three each": _below(1.1),
    "sampled": _sampled,
}


def _drafts_a_row(ballots: Sequence[Ballot], some: Sequence[str], allowed: Allowed) -> float:
    return statistics.mean(
        sum(claim.author in some and allowed(claim) for claims in each.claims for claim in claims) for each in ballots
    )


def _compared(
    some: Sequence[str],
    found: Mapping[str, Sequence[float]],
    alone: Mapping[str, Sequence[float]],
    what: str,
    metric: str,
) -> Table:
    """A line for each way: its mean, and its differences to the first way and to the best member."""
    lines = Table(title=" + ".join(some), title_justify="left")
    for head in (what, metric, "to the first", "to the best member"):
        lines.add_column(head)
    best = max((alone[name] for name in some), key=statistics.mean)
    default = next(iter(found.values()))
    for name, values in found.items():
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
