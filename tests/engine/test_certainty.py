"""A draft with more than half of the votes wins whatever others say: the rule against brute force."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from specfuse_shared import policies
from specfuse_shared.policies import HALF, CandidateLogprobs, Electorate, Stretch, may_be_certain, settles
from specfuse_shared.text.codec import cut_candidate

WORDS = ("ab", "abc", "abd", "a", "b", "ba", "abcd")
ANSWER = "start"
Text = tuple[str, bool]


class Reader:
    """A verifier with a vocabulary of its own, which cuts words into pieces, and an opinion on every next piece."""

    def __init__(self, chance: random.Random) -> None:
        letters = ["a", "b", "c", "d"]
        longer = ["".join(p) for n in (2, 3, 4) for p in itertools.product("abcd", repeat=n)]
        self.pieces = {*letters, *chance.sample(longer, 60)}
        self.seed, self.sharp = chance.random(), chance.choice((0.5, 2.0, 6.0))

    def encode(self, text: str) -> list[str]:
        """Words with the space before them, cut into the longest known pieces."""
        found = []
        for word in text.split(" ")[1:]:
            start = " "
            while word:
                size = next(n for n in range(len(word), 0, -1) if word[:n] in self.pieces or n == 1)
                found.append(start + word[:size])
                start, word = "", word[size:]
        return found

    def logprobs(self, text: str, ends: bool) -> tuple[list[float], list[int]]:
        tokens = self.encode(text)
        found = [self._logprob(tuple(tokens[:n]), token) for n, token in enumerate(tokens)]
        if ends:
            found.append(self._logprob(tuple(tokens), "end"))
        return found, [*map(len, tokens), *[1] * ends]

    def _logprob(self, before: tuple[str, ...], token: str) -> float:
        options = [start + piece for start in (" ", "") for piece in sorted(self.pieces)] + ["end"]
        chance = random.Random(f"{self.seed}/{before}")
        weight = {option: math.exp(self.sharp * chance.gauss(0, 1)) for option in options}
        return math.log(weight[token] / sum(weight.values()))


def seen(reader: Reader, text: str, ends: bool) -> CandidateLogprobs:
    return CandidateLogprobs(text, ends, *reader.logprobs(text, ends))


def winner(readers: Sequence[Reader], weights: Sequence[float], candidates: Sequence[Text]) -> Text:
    table = [[seen(reader, *candidate) for candidate in candidates] for reader in readers]
    voters = Electorate(Stretch(), policies.weighted_mean, weights)
    drafters = [[n % len(readers)] for n in range(len(candidates))]
    return candidates[voters.elect(table, drafters, [False] * len(candidates)).winner]


def sharpened(reader: Reader, texts: list[str], chance: random.Random) -> None:
    """Let the reader like one of the texts, so that halves are reached at all."""
    liked = chance.choice(texts)
    tokens, plain = reader.encode(liked), reader._logprob

    def logprob(before: tuple[str, ...], token: str) -> float:
        share = math.exp(plain(before, token))
        if before == tuple(tokens[: len(before)]) and len(before) < len(tokens):
            return math.log(0.1 * share + 0.9 * (token == tokens[len(before)]))
        return math.log(share)

    reader._logprob = logprob  # type: ignore[method-assign]


Case = tuple[list[Reader], list[float], str, list[str]]


def likely(chance: random.Random) -> Case:
    """Readers and their weights, a draft with more than half of their votes, and how its rivals' drafts begin."""
    while True:
        count = chance.choice((2, 3, 4))
        readers = [Reader(chance) for _ in range(count)]
        drawn = [chance.random() for _ in readers]
        weights = [w / sum(drawn) for w in drawn]
        texts = ["".join(f" {chance.choice(WORDS)}" for _ in range(chance.choice((2, 3, 4)))) for _ in range(6)]
        for reader in readers:
            sharpened(reader, texts[:2] if chance.random() < 0.8 else texts, chance)
        votes = math.fsum(w * Stretch()([seen(r, texts[0], False)])[0] for r, w in zip(readers, weights, strict=True))
        if votes > HALF:
            beginnings = [text[: chance.randint(2, len(text))] for text in chance.sample(texts[1:], count - 1)]
            return readers, weights, texts[0], beginnings


def rival_that_wins(case: Case) -> Text | None:
    """Of all that members may say who begin so: what beats the draft, if anything does."""
    readers, weights, draft, beginnings = case
    ways = [{cut_candidate(b + more) for more in ("", "a", "bc", " a", " ab b", "d abc")} - {""} for b in beginnings]
    for rivals in itertools.product(*map(sorted, ways)):
        candidates = list(dict.fromkeys([(draft, False), *((text, False) for text in rivals)]))
        for order in (candidates, candidates[::-1]):
            if (found := winner(readers, weights, order)) != (draft, False):
                return found
    return None


@pytest.mark.parametrize("seed", range(40))
def test_no_rival_that_may_come_beats_a_settled_draft(seed: int) -> None:
    chance = random.Random(seed)
    case = likely(chance)
    while not settles(ANSWER, *case[2:]):
        case = likely(chance)
    assert rival_that_wins(case) is None


def test_without_the_rule_half_of_the_votes_is_not_enough() -> None:
    """The comparison finds what the rule is there for: rivals that go on from the draft, or are cut inside it."""
    chance = random.Random(7)
    assert any(rival_that_wins(likely(chance)) for _ in range(60))


@pytest.mark.parametrize(
    ("draft", "beginnings", "expected"),
    [
        (" the blue sky", [" the red"], True),
        (" the blue sky", [" the blue"], False),  # it may go on like the draft
        (" the blue sky", [" the blue sky is"], False),  # it goes on from the draft
        (" the blue sky", [" the red", " the green"], True),
        (" the blue sky", [" a", " the blue skies"], False),  # the first may end before the second leaves
        (" the blue sky", [" another thing", " the bright"], True),
        (" the, blue sky", [" red"], True),
        (
            " the, blue sky",
            [" the red"],
            False,
        ),  # cut to " the", it is no first token of the draft
        ("the blue sky", [" the red"], False),  # encodings may reach back into the answer
        (" the blue\n\nsky", [" the blue\n\nsea"], False),  # a token may reach across the place where it may be cut
        (" the blue sky", [""], False),
    ],
)
def test_what_is_known_of_rivals_decides(draft: str, beginnings: list[str], expected: bool) -> None:
    assert settles(ANSWER, draft, beginnings) is expected


def test_only_policies_under_which_half_decides_may_be_certain() -> None:
    stretch, uniform, never = Stretch(), policies.uniform, policies.never
    assert may_be_certain(stretch, policies.weighted_mean, uniform, never, 5)
    assert may_be_certain(stretch, policies.SecondedMean(), uniform, never, 2)
    assert not may_be_certain(stretch, policies.SecondedMean(), uniform, never, 3)
    assert not may_be_certain(Stretch(per="byte"), policies.weighted_mean, uniform, never, 2)
    assert not may_be_certain(policies.MeanLogprob(per="text"), policies.weighted_mean, uniform, never, 2)
    assert not may_be_certain(stretch, policies.weighted_mean, policies.OnlineFeedback(), never, 2)
    assert not may_be_certain(stretch, policies.weighted_mean, uniform, policies.RetentionExit(), 2)

    class Declared:
        allows_certainty = True

        def __call__(self, scores: policies.Matrix, weights: Sequence[float], drafters: object) -> list[float]:
            return policies.weighted_mean(scores, weights, [])

    assert may_be_certain(stretch, Declared(), uniform, never, 5)
    assert not may_be_certain(stretch, lambda scores, weights, drafters: [1.0], uniform, never, 5)
