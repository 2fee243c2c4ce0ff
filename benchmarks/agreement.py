"""Expected time of a round of five 7 to 9 B models on one card, against how often they agree: a simulation on paper.

    python benchmarks/agreement.py [--bandwidth 3.35] [--segment 5] [--draw FILE]

What a step costs is counted, not measured (`benchmarks/census.py`): the bytes that it moves over the bandwidth, and
1.5 µs for each kernel. Members on one card take turns. What they say is simulated: a place in the text is one where all
are sure of one token (0.98 of the probability of each), or one where each takes either of two (0.5 to its own, 0.2 to
the other); the share of sure places is what makes two whole drafts equal as often as the first column says. A leader's
draft with half of the mean probability is certain. The demo's two models are equal in 22 % of the rounds, and certain
in 3 to 6 %; the simulation has 2 % there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from shapes import SHAPES

SECONDS_A_KERNEL = 1.5e-6
SURE, OWN, OTHER = 0.98, 0.5, 0.2
ROUNDS = 4000
AGREEMENTS = tuple(n / 20 for n in range(1, 19))
CANDIDATES = 5
"""Of them the census verifies so many at once."""


@dataclass(frozen=True)
class Steps:
    """Milliseconds of a member: of a token of a draft, and of a verification of `CANDIDATES` candidates."""

    draft: float
    verify: float

    def judge(self, candidates: int) -> float:
        """A forward that judges so many."""
        return self.draft + (self.verify - self.draft) * candidates / CANDIDATES if candidates else 0.0


@dataclass(frozen=True)
class Expected:
    """Means over simulated rounds, in milliseconds; `certain`: the share of those in which only the leader drafts."""

    agreement: float
    off: float
    auto: float
    certain: float
    own_off: float
    own_auto: float

    @property
    def shared(self) -> float:
        """With a leader ÷ without, all members on one card."""
        return self.auto / self.off

    @property
    def apart(self) -> float:
        """The same for a lone answer whose members have a card each."""
        return self.own_auto / self.own_off


def counted_steps(bandwidth: float) -> list[Steps]:
    """By the census of each shape, at so many TB/s."""
    script = Path(__file__).with_name("census.py")
    names = [shape.name for shape in SHAPES]
    done = subprocess.run([sys.executable, str(script), *names], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    cost = {
        (line["model"], line["step"]): 1e3 * (line["bytes"] / (bandwidth * 1e12) + line["kernels"] * SECONDS_A_KERNEL)
        for line in lines
        if line["step"] in ("draft", "verify")
    }
    return [Steps(cost[name, "draft"], cost[name, "verify"]) for name in names]


def simulate(steps: Sequence[Steps], segment: int, agreement: float) -> Expected:
    """`agreement`: how often the drafts of two members are equal as a whole."""
    chance, sums = random.Random(0), [0.0] * 5
    sure = max(0.0, 2 * agreement ** (1 / segment) - 1)
    for _ in range(ROUNDS):
        for n, value in enumerate(_round(steps, segment, sure, chance)):
            sums[n] += value / ROUNDS
    return Expected(agreement, *sums)


def _round(steps: Sequence[Steps], segment: int, sure: float, chance: random.Random) -> Iterable[float]:
    """What one round takes without and with a leader on one card, whether it is certain, and on cards of their own."""
    unsure = [chance.random() >= sure for _ in range(segment)]
    drafts = [tuple(u and chance.random() < 0.5 for u in unsure) for _ in steps]
    leader = min(range(len(steps)), key=lambda n: steps[n].draft)
    first, others = drafts[leader], [n for n in range(len(steps)) if n != leader]
    distinct = len(set(drafts))

    def probability(draft: tuple[bool, ...]) -> float:
        found = 1.0
        for place, (own, said) in enumerate(zip(draft, first, strict=True)):
            found *= (OWN if own == said else OTHER) if unsure[place] else SURE
        return found

    judged = distinct if distinct > 1 else 0
    off = [segment * s.draft + s.judge(judged) for s in steps]
    certain = sum(map(probability, drafts)) / len(drafts) > 0.5
    led, rest = segment * steps[leader].draft, [steps[n].judge(1) for n in others]
    new = 0 if certain else distinct - 1
    more = [0.0 if certain else steps[n].draft * _left(drafts[n], first) for n in others]
    last = [s.judge(new) for s in steps]
    own = led + max(rest) + max(more) + max(last)
    return sum(off), led + sum(rest) + sum(more) + sum(last), float(certain), max(off), own


def _left(draft: tuple[bool, ...], first: tuple[bool, ...]) -> int:
    """Tokens that a member has to draft still: its verification of the leader's told it the one where it leaves."""
    for place, (own, said) in enumerate(zip(draft, first, strict=True)):
        if own != said:
            return len(draft) - place - 1
    return 0


def break_even(agreements: Sequence[float], ratios: Sequence[float]) -> float | None:
    """The least agreement from which a leader pays, by a line between two places; None if it pays everywhere."""
    for (x, a), (y, b) in itertools.pairwise(zip(agreements, ratios, strict=True)):
        if a > 1 >= b:
            return x + (y - x) * (a - 1) / (a - b)
    return None


def draw(found: Sequence[Expected], segment: int, file: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    at = [e.agreement for e in found]
    lines = (("one card", [e.shared for e in found]), ("a card for each member, one answer", [e.apart for e in found]))
    axes.axhline(1, color="0.6", linewidth=1)
    for number, (label, ratios) in enumerate(lines):
        axes.plot(at, ratios, color=f"C{number}", label=label)
        if (even := break_even(at, ratios)) is not None:
            axes.plot([even], [1], "o", color=f"C{number}")
            axes.annotate(f"break-even {even:.2f}", (even, 1), textcoords="offset points", xytext=(6, 6))
    axes.set(xlabel="share of rounds in which two members draft the same", ylabel="round with a leader ÷ without")
    axes.set(ylim=(0, None), xlim=(0, 0.95), title=f"Five 7 to 9 B models, segments of {segment} tokens (simulated)")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=3.35, help="TB/s of the card")
    parser.add_argument("--segment", type=int, default=5, help="tokens of a draft")
    parser.add_argument("--draw", type=Path, help="picture to write")
    args = parser.parse_args()
    steps = counted_steps(args.bandwidth)
    found = [simulate(steps, args.segment, agreement) for agreement in AGREEMENTS]
    table = Table(title=f"A round of five models, {args.segment} tokens, {args.bandwidth} TB/s (simulated, ms)")
    for column in ("agreement", "without a leader", "with one", "ratio", "certain", "own cards: ratio"):
        table.add_column(column, justify="right")
    for e in found[3:16:2]:
        row = (e.agreement, e.off, e.auto, e.shared, e.certain, e.apart)
        table.add_row(*(f"{v:.{d}f}" for v, d in zip(row, (1, 0, 0, 2, 2, 2), strict=True)))
    Console().print(table)
    for where, ratios in (("one card", [e.shared for e in found]), ("cards of their own", [e.apart for e in found])):
        even = break_even(AGREEMENTS, ratios)
        print(f"On {where} a leader pays", "everywhere" if even is None else f"from an agreement of {even:.2f} on")
    if args.draw:
        draw(found, args.segment, args.draw)


if __name__ == "__main__":
    main()
