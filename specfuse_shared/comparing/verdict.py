"""Conclusions with their intervals, and the limits of the rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isinf
from typing import TYPE_CHECKING, Literal

from specfuse_shared.comparing.intervals import POWER
from specfuse_shared.comparing.metrics import LABELS
from specfuse_shared.comparing.run.asking import ENSEMBLE
from specfuse_shared.comparing.scores import ALL, Column, Cost, flop_text, mains_of

if TYPE_CHECKING:
    from specfuse_shared.comparing.comparison import Comparison
    from specfuse_shared.comparing.equal_compute import EqualCompute
    from specfuse_shared.comparing.pages.voting import Votes

FEWEST_ROWS = 20
"""With fewer rows a bootstrap interval is too narrow, and nothing is claimed."""
NEAR, FAR = 6.0, 10.0
"""Points between members. Published ensembles gained within the first distance, and not beyond the second (UniTE,
arXiv 2410.03777; ModelSwitch, arXiv 2504.00762)."""
MANY = 10
"""Above this number of intervals, some exclude zero by chance."""
EVEN = 50.0
LOOPS = 5.0
"""Per cent of repetitive answers from which the verdict mentions them."""
Outcome = Literal["better", "worse", "not seen", "too few rows", "no references"]


@dataclass(frozen=True, slots=True)
class Point:
    """One conclusion of the verdict, with a `title`."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict: `outcome` in a word, `headline` in a sentence, then `points`, and `limits` of the comparison."""

    outcome: Outcome
    headline: str
    points: tuple[Point, ...]
    limits: tuple[str, ...]

    def __str__(self) -> str:
        points = [f"{point.title}: {point.text}" for point in self.points]
        return "\n".join([self.headline, *points, *(f"Limit: {limit}" for limit in self.limits)])


def verdict_on(comparison: Comparison) -> Verdict:
    """The verdict on a comparison."""
    columns = comparison.columns
    whole = columns.get(ALL)
    once = " asked once," if comparison.equal is not None else ""
    outcome, headline = _headline(whole, once) if whole is not None else _headline_of_votes(comparison.votes)
    points = [*_equals(comparison, whole), *_votes(comparison.votes), *comparison.notes]
    points += [*_points(comparison, whole), *_costs(comparison)]
    return Verdict(outcome, headline, tuple(points), tuple(_limits(comparison, whole)))


def _headline(whole: Column, once: str) -> tuple[Outcome, str]:
    """`once`: a phrase for a best member that was also sampled, else empty."""
    gap, rows = whole.differences[ENSEMBLE], len(whole.rows)
    against = f"than the best member, {whole.best},{once} on {rows} question{'' if rows == 1 else 's'}"
    points = f"{gap} points"
    if rows < FEWEST_ROWS:
        return "too few rows", (
            f"Too few questions to say: the ensemble has {points} more {against}; at least {FEWEST_ROWS} are needed."
        )
    if gap.above:
        return "better", f"Yes: the ensemble is better {against}: {points}."
    if gap.below:
        return "worse", f"No: the ensemble is worse {against}: {points}. Use {whole.best} alone."
    return "not seen", f"No difference is seen: the ensemble has {points} more {against}."


def _headline_of_votes(votes: Votes | None) -> tuple[Outcome, str]:
    """The conclusion from people's votes, if no question has a reference."""
    if votes is None or votes.share.rows < FEWEST_ROWS:
        return "no references", (
            "Unknown: no question has a reference. Vote on the answers "
            f"({FEWEST_ROWS} votes or more), or add references."
        )
    share = f"{votes.share.mean:.0f} % [{votes.share.low:.0f}, {votes.share.high:.0f}] of {votes.share.rows} votes"
    if votes.share.low > EVEN:
        return "better", f"Yes: people prefer the ensemble to {votes.against}: it won {share}."
    if votes.share.high < EVEN:
        return "worse", f"No: people prefer {votes.against} to the ensemble, which won {share}."
    return "not seen", f"No difference is seen: the ensemble won {share} against {votes.against}."


def _votes(votes: Votes | None) -> Iterator[Point]:
    if votes is not None:
        share = votes.share
        counts = f"the ensemble won {votes.ours}, {votes.against} {votes.theirs}, {votes.equal} equal"
        yield Point(
            "Votes", f"{counts}: {share.mean:.0f} % [{share.low:.0f}, {share.high:.0f}] of those for one of them."
        )


def _equals(comparison: Comparison, whole: Column | None) -> Iterator[Point]:
    """The ensemble against the number of samples of the best member that equals its compute or its seconds."""
    equal = comparison.equal
    if equal is None:
        return
    for what, of in (("compute", _compute_details), ("seconds", _seconds_details)):
        title = f"Equal {what}"
        if whole is None or what in equal.missing:
            yield Point(title, f"unknown: {equal.missing[what]}.")
            continue
        name = equal.columns[what]
        parts = [_outcome_against(whole, name), *of(comparison, equal, name), *_differences_by_group(comparison, name)]
        yield Point(title, "; ".join(parts) + ".")
    if whole is not None and (ceiling := equal.columns.get("ceiling")) is not None:
        gap = whole.between(ceiling, ENSEMBLE)
        sentence = f"the best sample, chosen by references, has {gap} points more than the ensemble"
        yield Point("Ceiling", f"{sentence}: without references, no choice of a sample reaches this.")


def _outcome_against(column: Column, name: str) -> str:
    gap = column.between(ENSEMBLE, name)
    if len(column.rows) < FEWEST_ROWS:
        outcome = "too few questions to say"
    else:
        outcome = "better" if gap.above else "worse" if gap.below else "no difference is seen"
    return f"{outcome}: the ensemble has {gap} points more than {name.rpartition(' (')[0]}"


def _differences_by_group(comparison: Comparison, name: str) -> Iterator[str]:
    """The groups with enough rows, if there are several."""
    mains = mains_of(comparison.columns)
    for column in mains.values() if len(mains) > 1 else ():
        if len(column.rows) >= FEWEST_ROWS:
            yield f"{column.group} ({len(column.rows)}, {LABELS[column.metric]}) {column.between(ENSEMBLE, name)}"


def _compute_details(comparison: Comparison, equal: EqualCompute, name: str) -> Iterator[str]:
    """The compute of both, and the equivalent number of samples."""
    samples = {group: "any number" if isinf(paid) else f"{paid:.1f}" for group, paid in equal.paid.items()}
    each = set(samples.values())
    paid = next(iter(each)) if len(each) == 1 else ", ".join(f"{group} {count}" for group, count in samples.items())
    capped = f" (at most {equal.most} are asked)" if any(paid > equal.most for paid in equal.paid.values()) else ""
    yield f"samples that its compute allows: {paid}{capped}"
    yield f"an answer takes {flop_text(comparison.costs[name].flop)} to {flop_text(comparison.costs[ENSEMBLE].flop)}"


def _seconds_details(comparison: Comparison, equal: EqualCompute, name: str) -> Iterator[str]:
    """The seconds of both, if timed."""
    ours, theirs = comparison.costs[ENSEMBLE], comparison.costs[name]
    if ours.seconds and theirs.seconds:
        yield (
            f"asked together they take {theirs.seconds:.2f} s to {ours.seconds:.2f} s (medians of "
            f"{min(ours.timed, theirs.timed)})"
        )


def _points(comparison: Comparison, whole: Column | None) -> Iterator[Point]:
    if whole is not None:
        yield from _by_group(comparison)
        if len(whole.rows) >= FEWEST_ROWS:
            yield _best_alone(comparison, whole)
            yield from _members_to_drop(comparison, whole)
        yield from _member_gaps(comparison, whole)
    if comparison.agreement:
        mean = sum(comparison.agreement.values()) / len(comparison.agreement)
        same = sum(value == 100.0 for value in comparison.agreement.values())
        sentence = f"members' answers share {mean:.0f} % of their words"
        yield Point("Agreement", f"{sentence}; to {same} of {len(comparison.agreement)} questions they are the same.")
    sampled = {asker.name for asker in comparison.askers if asker.is_sampled}
    looping = {name: habits.looping for name, habits in comparison.habits.items() if name not in sampled}
    if max(looping.values()) >= LOOPS:
        sentence = ", ".join(f"{name} {share:.0f} %" for name, share in looping.items())
        yield Point("Repetition", f"answers that repeat themselves: {sentence}.")


def _by_group(comparison: Comparison) -> Iterator[Point]:
    """Each group by its main metric, if there are several."""
    mains = mains_of(comparison.columns)
    if len(mains) < 2:
        return
    many = [c for c in mains.values() if len(c.rows) >= FEWEST_ROWS]
    few = [c for c in mains.values() if len(c.rows) < FEWEST_ROWS]
    sentences = [f"{c.group} ({len(c.rows)}, {LABELS[c.metric]}) {c.differences[ENSEMBLE]} to {c.best}" for c in many]
    if few:
        means = ", ".join(f"{c.group} {c.differences[ENSEMBLE].mean:+.1f}" for c in few)
        sentences.append(f"fewer than {FEWEST_ROWS} questions, too few to say: {means}")
    yield Point("By kind", "; ".join(sentences) + ".")


def _best_alone(comparison: Comparison, whole: Column) -> Point:
    means = whole.means
    rest = sorted((name for name in comparison.members if name != whole.best), key=lambda name: -means[name])
    if not rest:
        return Point("Best alone", f"{whole.best}, {means[whole.best]:.1f} points.")
    gap = whole.between(whole.best, rest[0])
    sure = "" if gap.above else f", not distinguishable from {rest[0]} ({means[rest[0]]:.1f})"
    return Point("Best alone", f"{whole.best}, {means[whole.best]:.1f} points{sure}; to {rest[0]} {gap}.")


def _members_to_drop(comparison: Comparison, whole: Column) -> Iterator[Point]:
    """Members that the ensemble is better without, members that it needs, and members without a clear effect."""
    gaps = {m: whole.between(smaller, ENSEMBLE) for m in comparison.members if (smaller := comparison.without(m))}
    if not gaps:
        if len(comparison.members) > 2:
            yield Point("Which to drop", "not asked: --leave-one-out asks the ensemble without each member.")
        return
    drop = {name: gap for name, gap in gaps.items() if gap.above}
    keep = {name: gap for name, gap in gaps.items() if gap.below}
    parts = [f"without {name} it is better: {gap}, drop it" for name, gap in drop.items()]
    parts += [f"without {name} it is worse: {gap}, keep it" for name, gap in keep.items()]
    parts += [f"without {name} no difference is seen: {gap}" for name, gap in gaps.items() if name not in drop | keep]
    yield Point("Which to drop", "; ".join(parts) + ".")


def _member_gaps(comparison: Comparison, whole: Column) -> Iterator[Point]:
    """Whether members are close enough in quality for a gain."""
    gaps = {name: whole.between(whole.best, name) for name in comparison.members if name != whole.best}
    distant = {name: gap for name, gap in gaps.items() if gap.mean > NEAR}
    if not gaps:
        return
    if not distant:
        widest = max(gaps.values(), key=lambda gap: gap.mean)
        sure = "" if widest.high <= NEAR else ", though these questions cannot exclude more"
        yield Point("Near enough", f"members are within {NEAR:.0f} points of the best{sure} (at most {widest}).")
        return
    gaps_text = "; ".join(
        f"{name} is {gap.mean:.1f} [{gap.low:.1f}, {gap.high:.1f}] below" for name, gap in distant.items()
    )
    yield Point(
        "Too far apart",
        f"{gaps_text} {whole.best}. Others found gains among members within about {NEAR:.0f} points, and none beyond "
        f"{FAR:.0f}.",
    )


def _costs(comparison: Comparison) -> Iterator[Point]:
    """The cost of the ensemble relative to the best member (or, unscored, to the fastest)."""
    ours, theirs = comparison.costs.get(ENSEMBLE), {n: comparison.costs[n] for n in comparison.members}
    rival = comparison.columns[ALL].best if comparison.columns else min(theirs, key=lambda n: theirs[n].seconds or 0.0)
    if ours is None:
        return
    parts = [*_timed(ours, theirs[rival], rival), *_work(ours, theirs[rival], rival)]
    if parts:
        yield Point("Cost", "; ".join(parts) + ".")


def _timed(ours: Cost, theirs: Cost, rival: str) -> Iterator[str]:
    if ours.seconds and theirs.seconds:
        ratio = ours.seconds / theirs.seconds
        yield (
            f"an answer takes {ours.seconds:.2f} s, {ratio:.1f} × {rival}'s {theirs.seconds:.2f} s, first words "
            f"{ours.first_seconds:.2f} s to {theirs.first_seconds:.2f} s (medians of {min(ours.timed, theirs.timed)})"
        )


def _work(ours: Cost, theirs: Cost, rival: str) -> Iterator[str]:
    if ours.weight_bytes and theirs.weight_bytes:
        yield f"weights {ours.weight_bytes / 2**20:,.0f} MiB to {theirs.weight_bytes / 2**20:,.0f}"
    if ours.forwards_per_token and theirs.forwards_per_token:
        yield f"{ours.forwards_per_token:.2f} forward passes per token to {theirs.forwards_per_token:.2f}"


def _limits(comparison: Comparison, whole: Column | None) -> Iterator[str]:
    """The reasons for which the claims above could be wrong."""
    if comparison.own:
        yield "These questions came with the package: few, short and in English. Use your own (--questions FILE)."
    if whole is not None:
        yield from _limits_of_points(comparison, whole)
    if _shared_passages(comparison):
        yield "Several questions share a passage: the intervals treat them as independent."
    if comparison.votes is not None:
        yield "The interval of the votes treats each vote as a different person's."
    if comparison.in_half:
        yield "In half precision, another run may give other answers, because batches differ."
    if comparison.equal is not None and comparison.equal.columns:
        yield (
            f"Samples had one temperature ({comparison.equal.temperature:g}) and were chosen in one way: the most "
            "frequent answer, or the most probable text."
        )
    yield "Each answer is a single greedy one: its variation was not measured."
    if any(cost.timed for cost in comparison.costs.values()):
        yield "Seconds are of this machine, and of few answers."


def _limits_of_points(comparison: Comparison, whole: Column) -> Iterator[str]:
    smallest, rows = whole.differences[ENSEMBLE].least_seen, len(whole.rows)
    if 0 < smallest < float("inf"):
        yield f"{rows} questions show differences below {smallest:.1f} points in less than {POWER:.0%} of samples."
    if len(comparison.members) > 1:
        yield f"{whole.best} was chosen as the best member on these questions, which favours it."
    if unscored := len(comparison.questions) - rows:
        yield f"{unscored} questions without references are not scored."
    if len({column.group for column in comparison.columns.values() if column.metric}) > 1:
        yield "All questions have the same weight. Your questions may have other shares of each kind."
    if {column.metric for column in comparison.columns.values()} & {"f1", "rougeL", "chrf"}:
        yield "F1, ROUGE-L and chrF count words shared with references: not truth or style, and no other good answers."
    if (intervals := sum(len(column.differences) for column in comparison.columns.values())) > MANY:
        yield f"One in twenty of the {intervals} intervals excludes zero by chance."


def _shared_passages(comparison: Comparison) -> bool:
    passages = [question.passage for question in comparison.questions if question.passage]
    return len(set(passages)) < len(passages)
