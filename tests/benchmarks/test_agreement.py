"""The simulation of rounds with a leader: what it must give where the answer is known."""

from __future__ import annotations

import pytest
from agreement import Steps, break_even, simulate

ALIKE = [Steps(6.0, 7.0)] * 5


def test_members_that_always_agree_leave_the_leader_alone() -> None:
    found = simulate(ALIKE, 5, 1.0)
    assert found.certain == pytest.approx(1)
    assert found.off == pytest.approx(5 * 5 * 6.0), "all draft, and nothing is to be judged"
    assert found.auto == pytest.approx(5 * 6.0 + 4 * ALIKE[0].judge(1))


def test_a_leader_pays_the_more_the_more_members_agree() -> None:
    found = [simulate(ALIKE, 5, agreement) for agreement in (0.1, 0.4, 0.7, 0.95)]
    shared = [each.shared for each in found]
    assert shared == sorted(shared, reverse=True)
    assert max(shared) < 1, "its verification tells each how its own draft begins"
    assert min(each.apart for each in found) > 1, "equal members with a card each only wait for one"
    quick = simulate([Steps(2.0, 3.0), *ALIKE[1:]], 5, 0.95)
    assert quick.apart < 1, "but not for one that is much faster"


def test_the_break_even_lies_between_the_places_beside_it() -> None:
    assert break_even([0.2, 0.4, 0.6], [1.2, 1.1, 0.9]) == pytest.approx(0.5)
    assert break_even([0.2, 0.4], [0.9, 0.8]) is None
