"""The first segment is decided before its drafts end if, and only if, the election is clear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specfuse_shared import ConfigError, EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams
from specfuse_shared.events import EnsembleResult
from specfuse_shared.members.stages import Commit, Draft, DraftAlone, Verify
from specfuse_shared.policies import Election
from tests.support.against_naive import assert_equals_naive, local_members, with_settings
from tests.support.fake_engine import FakeEngine
from tests.support.fake_lane import FakeLane, scripted
from tests.support.marks import weekly
from tests.support.tiny import MESSAGES, ROW_BY_ROW, byte_level_tokenizer, metaspace_tokenizer, save_model

RIVER = "the river runs down to the sea and there it ends its way at last among the waves and the sand of the shore ."
HILL = "the river runs down from a hill where it began as a spring so small that no one saw it there one day ."
ROAD = "a road leads up to the town and there it ends its way at last before the gates of the old wall so grey ."


class Early(FakeEngine):
    """Members of words, three a segment; the first segment of twelve can be decided after three and six."""

    def __init__(self, *lanes: FakeLane, **settings: Any) -> None:
        super().__init__(*lanes)
        chosen: dict[str, Any] = {"first_segment_tokens": 12, "early_margin": 8, "speculation": "off", **settings}
        self.config = with_settings(self.config, **chosen)


def lane(one: str, second: str, likes: float = -1.0) -> FakeLane:
    """Both members in one lane, with the log p of each word of the first member's text."""
    words = one.split()
    liked = {(name, "".join(f" {w}" for w in words[:n])): likes for name in "ab" for n in range(1, len(words))}
    return FakeLane({"a": scripted(one), "b": scripted(second)}, liked)


def requests_of(fake: FakeLane, **settings: Any) -> tuple[list[tuple[type, int]], EnsembleResult]:
    """The requests to member "a", with the limits of drafts, up to the first commit; and the answer."""
    with Early(fake, **settings) as engine:
        result = engine.generate("help me", SamplingParams(max_tokens=18))
    ops = fake.ops("a", Draft, DraftAlone, Verify, Commit)
    first = next(n for n, op in enumerate(ops) if isinstance(op, Commit) or (isinstance(op, Draft) and op.commit))
    return [(type(op), getattr(op, "limit", 0)) for op in ops[:first]], result


def test_a_clear_lead_decides_after_the_first_words() -> None:
    ops, result = requests_of(lane(RIVER, ROAD, likes=-0.1))  # e^(0.9 · 3 words) = 14.9 times
    assert ops == [(Draft, 3), (Verify, 0)]
    assert result.rounds[0].text == " the river runs"
    assert result.rounds[0].verified
    assert [r.active for r in result.rounds] == [("a", "b")] * len(result.rounds)


def test_unclear_elections_draft_further() -> None:
    assert requests_of(lane(RIVER, ROAD, likes=-0.5))[0] == [
        (Draft, 3),
        (Verify, 0),
        (Draft, 6),
        (Verify, 0),
    ]  # e^1.5, e^3
    drafts = [(Draft, 3), (Verify, 0), (Draft, 6), (Verify, 0), (Draft, 12), (Verify, 0)]
    ops, result = requests_of(lane(RIVER, ROAD, likes=-0.9))
    assert ops == drafts
    assert result.rounds[0].text == " the river runs down to the sea and there it ends its"
    assert result.usage.members["a"].drafted == sum(max(c.tokens for c in r.candidates) for r in result.rounds)


@pytest.mark.parametrize("margin", [0, 2.0, 20.0])
def test_the_margin_defines_a_clear_lead(margin: float) -> None:
    ops, _ = requests_of(lane(RIVER, ROAD, likes=-0.1), early_margin=margin)
    limits = {0: [12], 2.0: [3], 20.0: [3, 6]}[margin]
    assert ops == [op for limit in limits for op in ((Draft, limit), (Verify, 0))]


def test_more_tokens_need_the_same_lead() -> None:
    longer = [(Draft, 3), (Verify, 0), (Draft, 6), (Verify, 0)]
    assert requests_of(lane(RIVER, ROAD, likes=-0.7), early_margin=6)[0] == longer  # e^1.8 = 6.05 after six words
    assert requests_of(lane(RIVER, ROAD, likes=-0.7), early_margin=6.1)[0] == [*longer, (Draft, 12), (Verify, 0)]


@pytest.mark.parametrize(("margin", "looks"), [(1.6, [3]), (1.7, [3, 6, 12])])
def test_the_required_lead_is_four_times_as_large_if_a_candidate_has_ended(margin: float, looks: list[int]) -> None:
    fake = lane(RIVER, "no .", likes=-0.1)  # votes of e^-0.1 for " the" and e^-2 for " no" and its end: 6.7 times
    ops, _ = requests_of(fake, early_margin=margin)
    assert [limit for kind, limit in ops if kind is Draft] == looks


def test_common_text_is_sent_at_once_and_the_first_segment_continues_after_it() -> None:
    fake = lane(RIVER, HILL)
    ops, result = requests_of(fake)
    assert ops == [(Draft, 3)]
    first, second = result.rounds[:2]
    assert (first.text, first.verified, first.candidates[0].drafters) == (" the river runs", False, ("a", "b"))
    assert max(c.tokens for c in second.candidates) == 9, "three of twelve tokens are drafted"
    limits = [r.op.limit for r in fake.requests if r.member == "a" and isinstance(r.op, Draft)]
    assert limits[:4] == [3, 3, 6, 9]
    assert set(limits[4:]) == {3}, "a contested segment ends the first one"
    whole = requests_of(lane(RIVER, HILL), early_margin=0)[1]
    assert whole.text == result.text


@pytest.mark.parametrize("says", [{"a": "yes .", "b": "no ."}, {"a": "yes .", "b": "yes ."}, {"a": "yes ."}])
def test_ended_drafts_are_not_continued(says: dict[str, str]) -> None:
    fake = FakeLane({name: scripted(text) for name, text in says.items()})
    with Early(fake) as engine:
        result = engine.generate("help me", SamplingParams(max_tokens=18))
    assert result.text in (" yes", " no")
    assert [r.op.limit for r in fake.requests if isinstance(r.op, (Draft, DraftAlone))] == [3] * len(says)


def test_a_lone_member_sends_short_segments() -> None:
    fake = FakeLane({"a": scripted(RIVER)})
    with Early(fake) as engine:
        result = engine.generate("help me", SamplingParams(max_tokens=12))
    assert [r.text.count(" ") for r in result.rounds] == [3, 3, 3, 3]


def test_draft_limits_double_up_to_the_limit() -> None:
    config = EnsembleConfig(["a", "b"])
    assert config.draft_limits(20) == (5, 10, 20)
    assert config.draft_limits(15) == (5, 10, 15)
    assert config.draft_limits(5) == (5,)
    assert with_settings(config, early_margin=0).draft_limits(20) == (20,)
    assert config.max_candidate_tokens == 35
    for preset in ("fast", "specfuse", "specem"):
        chosen = EnsembleConfig.preset(preset, ["a", "b"])
        assert chosen.draft_limits(chosen.longest_segment) == (chosen.longest_segment,), preset


def test_the_required_lead_is_four_times_as_large_for_whole_candidates() -> None:
    config = EnsembleConfig(["a", "b"], early_margin=6)
    assert config.margin(whole=False) == 6
    assert config.margin(whole=True) == 24
    assert EnsembleConfig(["a", "b"]).margin(whole=False) == 3


def test_a_clear_lead_is_a_factor_to_every_other_vote() -> None:
    assert Election([], [0.1, 0.8, 0.05], 1).is_clear(8)
    assert not Election([], [0.1, 0.79, 0.05], 1).is_clear(8)
    assert not Election([], [0.0, 0.0], 0).is_clear(8), "no member finds a candidate plausible"
    assert not Election([], [0.5, 0.1], 1).is_clear(1), (
        "the winner has fewer votes, since the other was barred too late"
    )


@pytest.mark.parametrize("margin", [0.5, -1.0, float("nan")])
def test_a_margin_below_one_is_refused(margin: float) -> None:
    with pytest.raises(ConfigError, match="early_margin must be"):
        EnsembleConfig(["a"], early_margin=margin)


@pytest.mark.parametrize(
    ("kind", "speculation"),
    [
        ("qwen3", "auto"),
        ("lfm2", "off"),
        ("paged", "auto"),
        *weekly(("qwen3", "off"), ("lfm2", "auto"), ("paged", "off")),
    ],
)
def test_early_segments_equal_the_naive_round(kind: str, speculation: str, tmp_path: Path) -> None:
    """Greedy and seeded, dynamic, row by row and paged: continued drafts equal drafts made at once."""
    execution, model = (kind, "qwen3") if kind == "paged" else ("dynamic", kind)
    save_model("llama", metaspace_tokenizer(), tmp_path / "one", seed=1)
    save_model(model, byte_level_tokenizer(), tmp_path / "two")
    members = [MemberConfig(str(tmp_path / name), name=name, dtype="float32") for name in ("one", "two")]
    config = EnsembleConfig(members, segment_tokens=3, execution=execution, speculation=speculation)
    with EnsembleEngine(config) as engine:
        assert engine.describe()[1].verification == ("rows" if model in ROW_BY_ROW else "packed")
        lengths = set()
        for margin in (2.0, 1e12):
            config_of_margin = with_settings(engine.config, early_margin=margin)
            for seed in (None, 3, 4, 5):
                chance = {} if seed is None else {"temperature": 1.2, "seed": seed}
                params = SamplingParams(max_tokens=200, **chance)
                records = assert_equals_naive(config_of_margin, local_members(engine), MESSAGES, params, rounds=3)
                lengths.add(max(c.tokens for c in records[0].candidates))
    assert len(lengths) > 1, "some were clear at an early look, some were not"


def test_paged_drafts_continue_ahead_after_the_compared_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each continuation is one batch of steps for the new tokens; no draft runs alone."""
    from specfuse_shared.runtime.packed_steps import PackedRunner

    runs: list[int] = []
    draft = PackedRunner.draft

    def counted(self: PackedRunner, inputs: Any) -> Any:
        runs.extend(each.count for each in inputs)
        return draft(self, inputs)

    monkeypatch.setattr(PackedRunner, "draft", counted)
    for name, seed in (("one", 1), ("two", 0)):
        save_model("qwen3", byte_level_tokenizer(), tmp_path / name, seed=seed)
    members = [MemberConfig(str(tmp_path / name), name=name, dtype="float32") for name in ("one", "two")]
    config = EnsembleConfig(
        members, segment_tokens=3, execution="paged", speculation="off", early_margin=1e12, repetition_guard=False
    )
    with EnsembleEngine(config) as engine:
        engine.load()
        runs.clear()
        [record, *_] = engine.generate(MESSAGES, SamplingParams(max_tokens=40, ignore_eos=True)).rounds
    assert max(candidate.tokens for candidate in record.candidates) == 20
    assert runs[:8] == [3, 3, 4, 4, 7, 7, 9, 9], "a run chooses the last token again, which no step has read"
