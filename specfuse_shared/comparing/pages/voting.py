"""A blind vote: a page with two anonymous answers at a time, and people's votes on it.

The page is one file. A saved copy contains its votes, and a new page written over it keeps them. The side of an answer
depends only on the texts, so it is unknown to voters and reproducible.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from specfuse_shared.comparing.intervals import Interval, share
from specfuse_shared.comparing.run.asking import ENSEMBLE
from specfuse_shared.comparing.scores import ALL
from specfuse_shared.errors import ConfigError
from specfuse_shared.report.html import environment
from specfuse_shared.validation import check_choice

if TYPE_CHECKING:
    from specfuse_shared.comparing.comparison import Comparison

CHOICES = ("left", "right", "equal")
_VOTES = re.compile(r'<script type="application/json" id="votes">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Votes:
    """Votes between the ensemble (`ours`) and the member `against` (`theirs`); `equal`: neither was better."""

    against: str
    ours: int
    theirs: int
    equal: int = 0

    @property
    def share(self) -> Interval:
        """The ensemble's share of the votes that prefer one, in per cent."""
        return share(self.ours, self.ours + self.theirs)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two different answers to a question. `key`: a hash of the texts. If its first digit is even, the ensemble's
    answer is `left`."""

    key: str
    question: str
    passage: str
    left: str
    right: str

    @property
    def ours(self) -> str:
        return side_of(self.key)


def side_of(key: str) -> str:
    """The side of the ensemble's answer."""
    return CHOICES[int(key[0], 16) % 2]


def pairs_of(comparison: Comparison, against: str | None = None) -> list[Pair]:
    """Pairs of the ensemble's and a member's answers where they differ, in an order that reveals nothing."""
    rival, pairs = rival_of(comparison, against), []
    for question in comparison.questions:
        ours, theirs = (comparison.answers[name][question.id].text for name in (ENSEMBLE, rival))
        if ours.strip() == theirs.strip():
            continue
        key = sha256(json.dumps([question.prompt, ours, theirs]).encode()).hexdigest()[:24]
        shown_left, right = (ours, theirs) if side_of(key) == "left" else (theirs, ours)
        pairs.append(Pair(key, question.asked, question.passage, shown_left, right))
    return sorted(pairs, key=lambda pair: pair.key[::-1])


def rival_of(comparison: Comparison, against: str | None) -> str:
    """The member that was named, or the best one; without references the first. Raises `ConfigError`."""
    if against is not None:
        check_choice("the member to vote against", against, comparison.members)
        return against
    return comparison.columns[ALL].best if comparison.columns else comparison.members[0]


def voting_page(comparison: Comparison, against: str | None = None, votes: Mapping[str, str] | None = None) -> str:
    """The voting page, with earlier votes. Raises `ConfigError` if all answers are the same."""
    pairs = pairs_of(comparison, against)
    if not pairs:
        raise ConfigError("there is nothing to vote on: all answers are the same")
    cast = {pair.key: votes[pair.key] for pair in pairs if votes and pair.key in votes}
    script = environment(__package__).get_template("voting.js").render().strip()
    return (
        environment(__package__)
        .get_template("voting.html")
        .render(
            pairs=_json([asdict(pair) for pair in pairs]),
            votes=_json(cast),
            names=_json({"ours": ENSEMBLE, "theirs": rival_of(comparison, against)}),
            script=Markup(script),
            digest=base64.b64encode(sha256(script.encode()).digest()).decode(),
        )
    )


def votes_on(path: str | Path) -> dict[str, str]:
    """The votes in a voting page that was saved after the vote.

    Args:
        path: The page.

    Returns:
        Key of a pair of answers → "left", "right" or "equal".

    Raises:
        ConfigError: The file is not a voting page, or cannot be read.

    Example:
        ```python
        from specfuse_shared import ConfigError
        from specfuse_shared.comparing import votes_on

        try:
            print(votes_on("vote.html"))
        except ConfigError as error:
            print(error)
        ```
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): name a saved voting page") from error
    match = _VOTES.search(text)
    try:
        votes: Any = json.loads(match[1]) if match else None
    except ValueError:
        votes = None
    if not isinstance(votes, dict) or not all(vote in CHOICES for vote in votes.values()):
        raise ConfigError(f"{path} is not a voting page: name one from `compare --vote`, saved after the vote")
    return votes


def counted(comparison: Comparison, votes: Mapping[str, str]) -> tuple[Votes, int]:
    """The votes on this comparison, against the member with most votes, and the number of other votes."""
    tallies = [_tally(pairs_of(comparison, name), name, votes) for name in comparison.members]
    largest = max(tallies, key=lambda tally: tally.ours + tally.theirs + tally.equal)
    return largest, len(votes) - largest.ours - largest.theirs - largest.equal


def _tally(pairs: Sequence[Pair], against: str, votes: Mapping[str, str]) -> Votes:
    cast = [(votes[pair.key], pair.ours) for pair in pairs if pair.key in votes]
    equal = sum(vote == "equal" for vote, _ in cast)
    ours = sum(vote == side for vote, side in cast)
    return Votes(against, ours, len(cast) - ours - equal, equal)


def _json(value: Any) -> Markup:
    """JSON that cannot end a script element or open a comment."""
    return Markup(json.dumps(value, ensure_ascii=False).replace("<", "\\u003c"))
