"""One request from start to finish, on two tiny members of different families."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, MemberConfig, Message, SamplingParams
from specfuse_shared.errors import (
    ConfigError,
    EngineClosedError,
    GenerationError,
    PromptTooLongError,
    RequestError,
    UnfinishedValueError,
)
from specfuse_shared.events import EnsembleResult, Event, ExitEvent, FinishEvent, SegmentEvent, StartEvent
from specfuse_shared.fusion.repetition import repeats
from specfuse_shared.policies import CandidateLogprobs, ExitDecision, Matrix
from specfuse_shared.types import FinishReason
from tests.support.against_naive import OpenAnswer, answer_of, local_members, open_session, run_rounds, with_settings
from tests.support.faults import FAULTS, fault_in
from tests.support.marks import weekly
from tests.support.tiny import byte_level_tokenizer, pair_config, save_model, save_pair

QUESTION = [Message("user", "How do the tides follow the moon?")]


def events_of(engine: EnsembleEngine, params: SamplingParams, **settings: object) -> list[Event]:
    return list(
        open_session(with_settings(engine.config, **settings), local_members(engine), QUESTION, params).events()
    )


def result_of(engine: EnsembleEngine, params: SamplingParams, **settings: object) -> EnsembleResult:
    last = events_of(engine, params, **settings)[-1]
    assert isinstance(last, FinishEvent)
    return last.result


def test_events_come_in_order_and_rebuild_the_answer(tiny_engine: EnsembleEngine) -> None:
    events = list(tiny_engine.stream(QUESTION, SamplingParams(max_tokens=40)))
    assert isinstance(events[0], StartEvent)
    assert isinstance(events[-1], FinishEvent)
    assert [type(e) for e in events].count(FinishEvent) == 1
    segments = [e for e in events if isinstance(e, SegmentEvent)]
    result = events[-1].result
    assert "".join(s.text for s in segments) == result.text
    for segment in segments:
        assert result.text[segment.start : segment.end] == segment.text
    assert [s.record for s in segments] == list(result.rounds)
    assert "".join(r.text for r in result.rounds) == result.text


def test_generate_equals_the_joined_stream(tiny_engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=30)
    streamed = list(tiny_engine.stream(QUESTION, params))[-1]
    assert isinstance(streamed, FinishEvent)
    assert answer_of(tiny_engine.generate(QUESTION, params)) == answer_of(streamed.result)
    assert answer_of(tiny_engine.generate(QUESTION[0].content, params)) == answer_of(streamed.result)


def test_the_result_is_json_with_all_fields(tiny_engine: EnsembleEngine) -> None:
    result = tiny_engine.generate(QUESTION, SamplingParams(max_tokens=20))
    data = json.loads(json.dumps(result.to_dict()))
    assert data["text"] == result.text
    assert data["rounds"][0]["candidates"][0]["scores"].keys() == {"chat", "base"}
    assert data["usage"]["total_tokens"] == result.usage.prompt_tokens + result.usage.completion_tokens
    assert {s.member for s in result.summary()} == {"chat", "base"}
    assert sum(s.segments_won for s in result.summary()) == len(result.rounds)


def test_each_member_divides_one_vote_among_whole_values_only(tiny_engine: EnsembleEngine) -> None:
    words = Grammar.choice(["lighthouse", "harbour", "tide", "ship", "a", "b", "c", "d"])
    verified = []
    for question in ("Which?", "Say one.", "北京?", "def f(x):"):
        for grammar in (words, None):
            result = tiny_engine.generate(question, SamplingParams(max_tokens=16, grammar=grammar))
            rounds = [record for record in result.rounds if record.verified]
            sums = [sum(c.scores[name] for c in r.candidates) for r in rounds for name in ("chat", "base")]
            if grammar is None:
                assert not any(total == pytest.approx(1) for total in sums)
            elif all(c.ends for r in rounds for c in r.candidates):
                verified += sums
    assert verified
    assert verified == pytest.approx([1.0] * len(verified))


@pytest.mark.parametrize("limit", [1, 2, 7, 23])
@pytest.mark.parametrize("reference", ["chat", "base"])
def test_max_tokens_counts_on_the_reference_tokenizer(tiny_engine: EnsembleEngine, limit: int, reference: str) -> None:
    result = result_of(tiny_engine, SamplingParams(max_tokens=limit), reference=reference)
    codec = next(m.codec for m in local_members(tiny_engine) if m.name == reference)
    assert result.finish_reason is FinishReason.LENGTH
    assert result.usage.reference == reference
    assert result.usage.completion_tokens == len(codec.encode(result.text)) <= limit
    longer = result_of(tiny_engine, SamplingParams(max_tokens=limit + 30), reference=reference)
    assert longer.text.startswith(result.text)


def streamed_by(engine: EnsembleEngine, params: SamplingParams, **settings: object) -> tuple[str, EnsembleResult]:
    """The content of the events, and the result."""
    events = events_of(engine, params, **settings)
    last = events[-1]
    assert isinstance(last, FinishEvent)
    return "".join(e.text for e in events if isinstance(e, SegmentEvent)), last.result


@pytest.mark.parametrize("score", ["mean_logprob", *weekly("stretch")])
@pytest.mark.parametrize("chance", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_a_stop_string_cuts_the_answer_without_changing_it(
    tiny_engine: EnsembleEngine, chance: dict[str, float], score: str
) -> None:
    """Stop strings inside a segment, across two segments, and the first of several."""
    params = SamplingParams(max_tokens=40, **chance)
    whole = result_of(tiny_engine, params, score=score)
    text, across = whole.text, 0
    for record in whole.rounds[1:-1:2]:
        for start, size in ((record.start - 2, 4), (record.start + 1, 2)):
            stop = text[start : start + size]
            both = [stop, text[start + size - 1 : start + size + 3]]
            for stops in ([stop], both):
                output, result = streamed_by(tiny_engine, replace(params, stop=stops), score=score)
                assert output == result.text == text[: text.find(stop)]
                assert (result.finish_reason, result.stop_sequence) == (FinishReason.STOP, stop)
                assert [r.winner for r in result.rounds] == [r.winner for r in whole.rounds[: len(result.rounds)]]
                across += start < result.rounds[-1].start
    assert across >= 2
    assert streamed_by(tiny_engine, replace(params, stop=["nowhere"]), score=score)[0] == text


def test_a_stop_string_cut_by_max_tokens_has_no_effect(tiny_engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=23)
    text = result_of(tiny_engine, params).text
    longer = result_of(tiny_engine, replace(params, max_tokens=60)).text
    result = result_of(tiny_engine, replace(params, stop=[longer[len(text) - 1 : len(text) + 1]]))
    assert (result.text, result.finish_reason, result.stop_sequence) == (text, FinishReason.LENGTH, None)


def test_a_stop_string_cuts_a_lone_members_answer_exactly(tiny_engine: EnsembleEngine) -> None:
    alone = EnsembleConfig(members=[tiny_engine.config.members[0]], segment_tokens=4, first_segment_tokens=None)
    members = local_members(tiny_engine)[:1]

    def answer(params: SamplingParams) -> OpenAnswer:
        session = open_session(alone, members, QUESTION, params)
        run_rounds(session, 100)
        return session

    text = answer(SamplingParams(max_tokens=60)).text
    for start in range(5, len(text) - 6, 7):
        stop = text[start : start + 5]
        assert answer(SamplingParams(max_tokens=60, stop=[stop])).text == text[: text.find(stop)]


def test_the_same_seed_gives_the_same_answer(tiny_engine: EnsembleEngine) -> None:
    seeded = SamplingParams(max_tokens=40, temperature=1.0, seed=7)
    first = tiny_engine.generate(QUESTION, seeded)
    assert answer_of(first) == answer_of(tiny_engine.generate(QUESTION, seeded))
    assert first.text != tiny_engine.generate(QUESTION, replace(seeded, seed=8)).text
    free = tiny_engine.generate(QUESTION, replace(seeded, seed=None))
    assert free.seed is not None
    assert answer_of(tiny_engine.generate(QUESTION, replace(seeded, seed=free.seed))) == answer_of(free)


def test_too_long_a_prompt_is_refused_before_any_work(tiny_engine: EnsembleEngine) -> None:
    forwards: list[int] = []
    hooks = [
        m.runner.model.register_forward_pre_hook(lambda *_: forwards.append(1)) for m in local_members(tiny_engine)
    ]
    with pytest.raises(PromptTooLongError, match=r"member 'chat'.*maximum context length is 512") as refused:
        tiny_engine.stream([Message("user", "moon " * 600)])
    for hook in hooks:
        hook.remove()
    assert not forwards
    assert refused.value.count > refused.value.limit == 512


def test_equal_members_agree_and_nothing_is_verified(tiny_engine: EnsembleEngine) -> None:
    chat = tiny_engine.config.member_configs[0]
    twins = EnsembleConfig(members=[chat, replace(chat, name="twin")], segment_tokens=6, first_segment_tokens=None)
    with EnsembleEngine(twins) as engine:
        result = engine.generate(QUESTION, SamplingParams(max_tokens=40))
    assert not any(r.verified for r in result.rounds)
    assert all(len(r.candidates) == 1 and r.candidates[0].drafters == ("chat", "twin") for r in result.rounds)
    usage = result.usage.members["twin"]
    assert usage.fed <= usage.drafted + 4 * len(result.rounds)


def test_a_member_whose_context_is_full_leaves_and_the_answer_continues(tiny_engine: EnsembleEngine) -> None:
    chat, base = tiny_engine.config.member_configs
    prompts = [len(m.encode_prompt(QUESTION)) for m in local_members(tiny_engine)]
    small = replace(base, max_context=prompts[1] + 70)
    config = EnsembleConfig(members=[chat, small], segment_tokens=6, first_segment_tokens=None, exit="never")
    with EnsembleEngine(config) as engine:
        events = list(engine.stream(QUESTION, SamplingParams(max_tokens=120)))
    exits = [e.exit for e in events if isinstance(e, ExitEvent)]
    assert [(e.member, e.reason) for e in exits] == [("base", "context")]
    last = events[-1]
    assert isinstance(last, FinishEvent)
    assert last.result.rounds[-1].active == ("chat",)
    assert last.result.rounds[exits[0].round - 1].exits == tuple(exits)


def test_an_answer_ends_by_length_when_no_context_is_left(tiny_engine: EnsembleEngine) -> None:
    chat = tiny_engine.config.member_configs[0]
    room = len(local_members(tiny_engine)[0].encode_prompt(QUESTION)) + 30
    with EnsembleEngine(
        EnsembleConfig(members=[replace(chat, max_context=room)], segment_tokens=6, first_segment_tokens=None)
    ) as engine:
        result = engine.generate(QUESTION, SamplingParams(max_tokens=500))
        with pytest.raises(UnfinishedValueError, match="no member has context left"):
            engine.generate(QUESTION, SamplingParams(max_tokens=500, grammar=Grammar.regex("[a-z ]{400}")))
    assert result.finish_reason is FinishReason.LENGTH
    assert 20 <= result.usage.completion_tokens <= 30
    assert result.text


class OnlyTheFirst:
    """Policies of a user: the first member is always right, and the other leaves after two rounds."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def score(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        return [1 / (1 + len(c.logprobs)) for c in candidates]

    def aggregate(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
        return [1.0] + [0.0] * (len(scores[0]) - 1)

    def feedback(self, weights: Sequence[float], scores: Matrix, round_index: int) -> list[float]:
        self.rounds.append(round_index)
        return [0.9, 0.1]

    def exit(self, totals: Sequence[float], round_index: int) -> ExitDecision:
        return ExitDecision((0.9, 0.1), (1,) if round_index == 2 else ())


def test_every_policy_can_be_replaced(tiny_engine: EnsembleEngine) -> None:
    mine = OnlyTheFirst()
    result = result_of(
        tiny_engine,
        SamplingParams(max_tokens=60),
        score=mine.score,
        aggregate=mine.aggregate,
        feedback=mine.feedback,
        exit=mine.exit,
    )
    assert {r.winner for r in result.rounds} == {"chat"}
    verified = [r for r in result.rounds if r.verified]
    assert mine.rounds == [1, 2]
    assert verified[1].weights == {"chat": 0.9, "base": 0.1}
    assert [e.member for e in verified[1].exits] == ["base"]
    assert {r.active for r in result.rounds[verified[1].index :]} == {("chat",)}
    assert result.rounds[0].candidates[0].scores["chat"] < 1


def _for_chat(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    return [1.0 if 0 in authors else 0.5 for authors in drafters]


def test_a_candidate_that_closes_a_repetition_loop_loses(tiny_engine: EnsembleEngine, tmp_path: Path) -> None:
    """Without layers, the next token depends only on the last one, so greedy text soon repeats itself."""
    folder = save_model("qwen3", byte_level_tokenizer(), tmp_path / "circling", seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.save_pretrained(folder)
    members = [MemberConfig(str(folder), name="chat"), tiny_engine.config.member_configs[1]]
    params = SamplingParams(max_tokens=100)
    with EnsembleEngine(EnsembleConfig(members, segment_tokens=6, first_segment_tokens=None, exit="never")) as engine:
        free = result_of(engine, params, aggregate=_for_chat, repetition_guard=False)
        guarded = result_of(engine, params, aggregate=_for_chat, repetition_guard=True)
    assert any(repeats(free.text[: r.start], r.text) for r in free.rounds)
    for record in (r for r in guarded.rounds if r.verified):
        circles = {c.drafters[0]: repeats(guarded.text[: record.start], c.text) for c in record.candidates}
        assert not circles[record.winner] or all(circles.values())
        assert all(c.score == 0 for c in record.candidates if circles[c.drafters[0]])
        assert {c.drafters[0]: c.repeats for c in record.candidates} == circles
    assert not any(c.repeats for r in free.rounds for c in r.candidates)
    assert "base" in {r.winner for r in guarded.rounds}


def test_the_first_segment_has_its_own_length(tiny_engine: EnsembleEngine) -> None:
    result = result_of(tiny_engine, SamplingParams(max_tokens=40), segment_tokens=8, first_segment_tokens=2)
    first, *later = result.rounds
    assert max(c.tokens for c in first.candidates) <= 2 + 8  # further tokens only complete a character
    assert max(c.tokens for r in later for c in r.candidates) >= 8


def test_the_last_member_that_fails_is_named_and_the_text_so_far_is_kept(tiny_engine: EnsembleEngine) -> None:
    alone = EnsembleConfig(members=[tiny_engine.config.members[1]], segment_tokens=6, first_segment_tokens=None)
    with EnsembleEngine(alone) as engine:
        member, steps = local_members(engine)[0], iter(range(100))

        def fail(*_: object) -> None:
            if next(steps) == 25:
                raise RuntimeError("device lost")

        hook = member.runner.model.register_forward_pre_hook(fail)
        outputs: list[str] = []
        texts = (e.text for e in engine.stream(QUESTION, SamplingParams(max_tokens=200)) if isinstance(e, SegmentEvent))
        with pytest.raises(GenerationError, match="failed in draft: device lost") as failure:
            outputs.extend(texts)
        hook.remove()
        assert failure.value.member == member.name
        assert failure.value.text == "".join(outputs) != ""
        assert engine.generate(QUESTION, SamplingParams(max_tokens=10)).text, "the engine still answers"


def test_a_closed_engine_raises_a_named_error(tiny_engine: EnsembleEngine) -> None:
    with EnsembleEngine(EnsembleConfig(members=[MemberConfig(tiny_engine.config.member_configs[1].model)])) as engine:
        stream = engine.stream(QUESTION, SamplingParams(max_tokens=400))
        next(stream)
    outputs: list[Event] = []
    with pytest.raises(EngineClosedError) as closed:
        outputs.extend(stream)
    assert closed.value.text == "".join(e.text for e in outputs if isinstance(e, SegmentEvent))
    with pytest.raises(EngineClosedError):
        engine.generate(QUESTION)
    engine.close()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (5, "a conversation is a text or a list of turns, not int"),
        (Message("user", "Hi."), "a conversation is a text or a list of turns"),
        ([("user", "Hi.")], "a turn is a Message or a dictionary"),
        (["Hi."], "a turn is a Message or a dictionary"),
        ([{"role": ["user"], "content": "Hi."}], "message role"),
        ([{"role": "user", "content": "Hi.", "name": 5}], "name must be text"),
        ([{"role": "user", "content": "Hi.", "name": "\ud83d"}], "half a character"),
    ],
)
def test_a_conversation_of_another_form_is_refused_and_harms_no_batch(
    tiny_engine: EnsembleEngine, messages: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        tiny_engine.generate(messages)
    params = SamplingParams(max_tokens=4)
    first, second = tiny_engine.generate_batch(["Hi.", messages], params, return_exceptions=True)
    assert isinstance(first, EnsembleResult)
    assert isinstance(second, RequestError)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"params": {"max_tokens": 3}}, ConfigError, "params must be SamplingParams, not dict"),
        ({"timeout": "5"}, RequestError, "timeout must be a positive number"),
        ({"tools": {"name": "f"}}, RequestError, "tools must be a list"),
        ({"tools": [{"name": "f", "description": "\ud83d"}]}, RequestError, "texts of whole characters"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_and_occupies_no_slot(
    tiny_engine: EnsembleEngine, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    for _ in range(tiny_engine.config.max_concurrent + 4):
        with pytest.raises(error, match=message):
            tiny_engine.generate("Hi.", **options)
    assert tiny_engine.metrics().running == tiny_engine.metrics().waiting == 0
    assert tiny_engine.generate("Hi.", SamplingParams(max_tokens=4), tools=None, timeout=60).text


def test_a_lone_surrogate_is_refused_in_every_text(tiny_engine: EnsembleEngine) -> None:
    for call in (
        lambda: tiny_engine.tokenize("\ud83d"),
        lambda: tiny_engine.log_probabilities("Hi.", ["\ud83d"]),
    ):
        with pytest.raises(RequestError, match="half a character"):
            call()


def test_a_stream_keeps_its_engine_alive(tmp_path_factory: pytest.TempPathFactory) -> None:
    stream = EnsembleEngine(pair_config(save_pair(tmp_path_factory))).stream("Hi.", SamplingParams(max_tokens=8))
    gc.collect()
    assert isinstance(list(stream)[-1], FinishEvent)


def test_a_member_that_leaves_after_the_last_round_is_in_the_result(tmp_path_factory: pytest.TempPathFactory) -> None:
    member = MemberConfig(str(save_pair(tmp_path_factory)["chat"]), name="a", dtype="float32", max_context=120)
    with EnsembleEngine([member]) as engine:
        result = engine.generate("Hi.", SamplingParams(max_tokens=500))
    assert result.finish_reason is FinishReason.LENGTH
    assert [row.exit_reason for row in result.summary()] == ["context"]
    exits = [gone for record in result.rounds for gone in record.exits]
    assert len(exits) == 1


def test_no_text_beyond_a_context_is_scored(tmp_path_factory: pytest.TempPathFactory) -> None:
    chat, base = save_pair(tmp_path_factory).values()
    small = MemberConfig(str(chat), name="small", dtype="float32", max_context=240)
    with EnsembleEngine([small, MemberConfig(str(base), name="large", dtype="float32")]) as engine:
        with_logprobs = SamplingParams(max_tokens=400, logprobs=True, ignore_eos=True)
        result = engine.generate("Hi.", with_logprobs)
        assert result.logprobs is None
        assert (
            "could not score the answer: a text exceeds the context of member 'small': it holds 240"
            in result.warnings[-1].message
        )
        with pytest.raises(RequestError, match="exceeds the context of member 'small': it holds 240 tokens"):
            engine.log_probabilities("Hi.", ["word " * 400])


def test_the_others_continue_when_the_only_drafting_member_leaves(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Under a grammar one member drafts, and it fails during the draft."""
    chat, base = save_pair(tmp_path_factory).values()
    members = [
        MemberConfig(str(chat), name="verifies", dtype="float32", drafts_under_grammar=False),
        MemberConfig(str(base), name="drafts", dtype="float32"),
    ]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 9}}}
    schema["required"] = ["n", "s"]
    with EnsembleEngine(EnsembleConfig(members, speculation="off", segment_tokens=3)) as engine:
        engine.load()
        with fault_in(engine, "draft", FAULTS["exception"], None):
            result = engine.generate("Hi.", SamplingParams(max_tokens=90, grammar=Grammar.json_schema(schema)))
    assert set(json.loads(result.text)) == {"n", "s"}
    assert [warning.member for warning in result.warnings] == ["drafts"]
