"""Prompts of many users: shared prefixes, prefixes of cancelled answers, and pieces between steps of other answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specfuse_shared import EnsembleEngine, GenerationError, Message, SamplingParams, SegmentEvent
from specfuse_shared.errors import RequestTimeoutError
from specfuse_shared.members.local.batching import StageWork, share_prompt_tokens
from specfuse_shared.members.local.lane import PIECE_SECONDS, Pace, ReadingTime
from specfuse_shared.members.local.sequence import ForwardRequest
from tests.support.against_naive import eager, local_members
from tests.support.naive import naive_rounds

SYSTEM = "You know the sea and its tides. " * 6
PARAMS = SamplingParams(max_tokens=10)


def _messages(text: str) -> list[Message]:
    return [Message("system", SYSTEM), Message("user", text)]


@pytest.fixture
def engine(tiny_engine: EnsembleEngine) -> Iterator[EnsembleEngine]:
    with EnsembleEngine(replace(tiny_engine.config, max_concurrent=16)) as engine:
        yield engine.load()


def prompt(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def fed_tokens(engine: EnsembleEngine) -> list[int]:
    """Filled with the numbers of tokens of every later forward pass of the first member."""
    runner = local_members(engine)[0].runner
    step, counts = runner.step, list[int]()

    def counted(segments: Any) -> Any:
        counts.append(sum(len(segment.ids) for segment in segments))
        return step(segments)

    runner.step = counted  # type: ignore[method-assign]
    return counts


def expected(tiny_engine: EnsembleEngine, texts: list[str]) -> dict[str, str]:
    with EnsembleEngine(replace(tiny_engine.config, reuse_prefixes=False)) as plain:
        return {text: plain.generate(prompt(text), PARAMS).text for text in texts}


def test_concurrent_requests_with_one_prompt_read_it_once(engine: EnsembleEngine) -> None:
    member = local_members(engine)[0]
    size = len(member.encode_prompt(_messages("Why?")))
    alone = fed_tokens(engine)
    first = engine.generate(prompt("Why?"), PARAMS).text
    once = sum(alone)
    with EnsembleEngine(engine.config) as fresh:
        together = fed_tokens(fresh.load())
        results = fresh.generate_batch([prompt("Why?")] * 6, PARAMS)
        assert {result.text for result in results} == {first}
        assert sum(together) < 6 * (once - size) + 1.5 * size + 6 * 20, "the prompt was read for each of them"
        assert fresh.metrics().reused_prompt_tokens > 0


def test_prompts_with_a_common_prefix_share_it(engine: EnsembleEngine, tiny_engine: EnsembleEngine) -> None:
    texts = [f"What of {thing}?" for thing in ("tides", "moons", "rocks", "a very long beach", "gulls")]
    counts, member = fed_tokens(engine), local_members(engine)[0]
    results = engine.generate_batch([prompt(text) for text in texts], PARAMS)
    assert [result.text for result in results] == list(expected(tiny_engine, texts).values())
    sizes = [len(member.encode_prompt(_messages(text))) for text in texts]
    assert engine.metrics().reused_prompt_tokens > 0.5 * (len(texts) - 1) * min(sizes)
    assert counts


@pytest.mark.parametrize("way", ["closed", "timed out"])
def test_the_prompt_of_a_stopped_answer_stays_cached(engine: EnsembleEngine, way: str) -> None:
    endless = SamplingParams(max_tokens=300, min_tokens=300, ignore_eos=True)
    if way == "closed":
        stream = engine.stream(prompt("Stop?"), endless)
        next(event for event in stream if isinstance(event, SegmentEvent))
        stream.close()  # type: ignore[attr-defined]
    else:
        began = time.monotonic()
        engine.generate(prompt("Warm?"), PARAMS)
        with pytest.raises(RequestTimeoutError):
            engine.generate(prompt("Stop?"), endless, timeout=max(0.3, 2 * (time.monotonic() - began)))
    while engine.metrics().running:
        time.sleep(0.01)
    before, result = engine.metrics().reused_prompt_tokens, engine.generate(prompt("Stop?"), PARAMS)
    assert engine.metrics().reused_prompt_tokens - before > result.usage.prompt_tokens


def test_a_partly_read_prompt_stays_cached(engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "alone", 16)
    counts, text = fed_tokens(engine), "moon " * 60
    stream = engine.stream(prompt(text), PARAMS)
    while len(counts) < 3:
        time.sleep(0.001)
    stream.close()  # type: ignore[attr-defined]
    while engine.metrics().running:
        time.sleep(0.01)
    read = sum(counts)
    assert read < len(local_members(engine)[0].encode_prompt(_messages(text)))
    before = engine.metrics().reused_prompt_tokens
    engine.generate(prompt(text), PARAMS)
    assert engine.metrics().reused_prompt_tokens - before >= 32, "read tokens are not read again"


def test_the_cache_of_a_failed_member_is_not_kept(engine: EnsembleEngine) -> None:
    runner = local_members(engine)[0].runner
    step, calls = runner.step, iter(range(100))

    def fails(segments: Any) -> Any:
        if next(calls) == 3:
            raise ValueError("a broken kernel")
        return step(segments)

    runner.step = fails  # type: ignore[method-assign]
    with suppress(GenerationError):  # or the other member continues alone
        engine.generate(prompt("Fail?"), PARAMS)
    runner.step = step  # type: ignore[method-assign]
    assert runner.prefixes.memory_bytes == 0


ENDS = st.sampled_from(("run", "run", "stop", "timeout"))
ScheduledRequest = tuple[str, str, float]
"""A text, the way its answer ends, and the seconds after the previous request."""


def ask_all(engine: EnsembleEngine, schedule: list[ScheduledRequest], texts: dict[str, str]) -> None:
    """Ask on schedule; the text of an answer is a prefix of the one in `texts`, or all of it."""
    running = []
    for text, end, pause in schedule:
        time.sleep(pause)
        options = {"timeout": 0.05 + pause} if end == "timeout" else {}
        stream = engine.stream(prompt(text), PARAMS, **options)
        running.append((text, end, stream))
        if end == "stop":
            events = list(islice(stream, int(100 * pause)))
            assert texts[text].startswith("".join(e.text for e in events if isinstance(e, SegmentEvent)))
            stream.close()  # type: ignore[attr-defined]
    for text, end, stream in running:
        if end == "run":
            assert "".join(e.text for e in stream if isinstance(e, SegmentEvent)) == texts[text]
        elif end == "timeout":
            received = ""
            with suppress(RequestTimeoutError):
                for event in stream:
                    received += event.text if isinstance(event, SegmentEvent) else ""
            assert texts[text].startswith(received)


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_texts_do_not_depend_on_sharing_waiting_or_stopping(tiny_engine: EnsembleEngine, data: st.DataObject) -> None:
    texts = [f"{word} {n}" for n in range(4) for word in ("Why", "Why the sea is salt and the moon is round,")]
    whole = expected(tiny_engine, texts)
    request = st.tuples(st.sampled_from(texts), ENDS, st.just(0.0))
    schedule = data.draw(st.lists(request, min_size=30, max_size=36))
    with EnsembleEngine(replace(tiny_engine.config, max_concurrent=8)) as engine:
        ask_all(engine, schedule, whole)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_requests_on_any_schedule_give_the_texts_of_the_naive_round(tiny_engine: EnsembleEngine) -> None:
    """An engine without prefix reuse and the naive round give the same texts."""
    beginnings = ("Why", "Why the sea is salt and the moon is round,", "Tell me of ships, " * 8, "")
    texts = [f"{beginning} {n} tides?" for n in range(4) for beginning in beginnings]
    whole = expected(tiny_engine, texts)
    for text in texts:
        assert naive_text(tiny_engine, text, len(whole[text])) == whole[text]

    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(data=st.data())
    def on_schedule(data: st.DataObject) -> None:
        pauses = st.sampled_from((0.0, 0.0, 0.0, 0.005, 0.02, 0.05))
        request = st.tuples(st.sampled_from(texts), ENDS, pauses)
        schedule = data.draw(st.lists(request, min_size=200, max_size=200))
        cache = data.draw(st.sampled_from((None, 8 << 20)))  # memory for all requests, or for a few at a time
        config = replace(tiny_engine.config, max_concurrent=16, cache_bytes=cache)
        with EnsembleEngine(config) as engine:
            ask_all(engine, schedule, whole)
            assert engine.metrics().reused_prompt_tokens > 0

    on_schedule()


def naive_text(engine: EnsembleEngine, text: str, length: int) -> str:
    """The first `length` characters of the naive round's answer."""
    members, reply = local_members(engine), ""
    with eager(members):
        for result in naive_rounds(engine.config, members, _messages(text), PARAMS):
            reply += result.segment
            if len(reply) >= length:
                break
    return reply[:length]


def test_a_piece_uses_its_allowed_time() -> None:
    pace = Pace()
    assert pace.alone == pace.tokens(0.0) == 128, "nothing was timed yet"
    pace.learn(0.05, 0)
    pace.learn(0.05 + 0.2, 100)
    assert (pace.step, pace.token) == (pytest.approx(0.05), pytest.approx(0.002))
    assert pace.tokens(0.05) == 16, "25, in grains of 16"
    assert pace.tokens(-0.1) == 0
    assert pace.alone == 112, f"{PIECE_SECONDS} s are 125 tokens"
    pace.learn(0.06, 100)
    assert pace.alone <= 200, "it grows by a factor of two at most"
    slow = Pace()
    slow.learn(1.0, 0)
    slow.learn(1.1, 64)
    assert slow.alone == 128, "with slow weights, a piece is worth its forward pass"
    dear = Pace(step=0.1, token=0.1, last=16)
    assert dear.alone == 64, "a smaller piece would read the weights for few tokens"


def test_a_long_answer_does_not_make_the_weights_slower_to_read() -> None:
    pace = Pace()
    for seconds in (0.1, *[0.4] * 10):  # after thousands of tokens
        pace.learn(seconds, 0)
    assert pace.step < 0.25
    pace.learn(0.15, 40)
    assert pace.step <= 0.15


def test_running_answers_keep_half_of_the_time() -> None:
    pace, reading = Pace(step=0.1, token=0.001, last=500), ReadingTime()
    answers, prompts = 0.0, 0.0
    for rides in (True, False) * 50:
        tokens, planned = reading.pieces(pace, rides, prompt_left=1000)
        reading.saved -= planned
        work, read = 0.1 if rides else 0.0, 0.0015 * tokens + (0.1 if tokens and not rides else 0.0)
        reading.learn(pace, planned, work, read)
        answers, prompts = answers + work, prompts + read
    assert prompts == pytest.approx(answers, rel=0.1), "also where a token takes longer than was measured"


def test_a_piece_waits_until_it_is_worth_its_forward_pass() -> None:
    pace, reading = Pace(step=0.1, token=0.001, last=500), ReadingTime()
    assert reading.pieces(pace, False, 1000) == (0, 0.0), "the weights would be read for prompts alone"
    reading.learn(pace, 0.0, answers=0.2, prompts=0.0)
    assert reading.pieces(pace, False, 1000) == (96, 0.2)
    assert reading.pieces(pace, True, 1000)[0] == 288
    late = ReadingTime(saved=-0.08)
    assert late.pieces(pace, True, 1000) == (0, 0.0)
    assert late.pieces(pace, True, 12)[0] == 16, "a short prompt needs no more"
    dear = Pace(step=0.1, token=0.1, last=16)
    assert reading.pieces(dear, True, 1000) == (0, 0.0)
    reading.learn(dear, 0.0, answers=1.0, prompts=0.0)
    assert reading.pieces(dear, True, 1000)[0] == 64, "reading continues at any cost"


def test_the_shortest_prompts_go_first_and_the_oldest_is_not_starved() -> None:
    long, short, shortest = (_reading(size) for size in (900, 300, 40))
    answering = _waiting(ForwardRequest(_Sequence(0)))

    def pieces(budget: int, *limits: int) -> list[int]:
        fed = share_prompt_tokens([long, answering, short, shortest], budget, *limits)
        assert answering in fed
        sizes = {work: work.pending.prompt for work in fed if work.pending is not None}
        return [sizes.get(work, 0) for work in (long, short, shortest)]

    assert pieces(100, 100) == [15, 45, 40], "the oldest gets a quarter of the rest after the shortest"
    assert pieces(100, 20) == [5, 15, 40], "a prompt that is almost read has precedence"
    assert pieces(20, 20) == [5, 0, 15]
    assert pieces(2000, 20) == [900, 300, 40]
    assert pieces(0, 20) == [0, 0, 0]
    assert pieces(0, 20, 64) == [0, 0, 40], "a short one need not wait"
    assert pieces(50, 20, 64) == [2, 8, 40]


class _Sequence:
    def __init__(self, unread: int) -> None:
        self.prompt_to_read = unread

    def waits_for(self, other: Any, own_left: int, other_left: int) -> bool:
        return False


def _reading(unread: int) -> StageWork[Any]:
    return _waiting(ForwardRequest(_Sequence(unread), prompt=min(unread, 1024)))


def _waiting(request: ForwardRequest) -> StageWork[Any]:
    async def stage() -> None:
        await request

    work = StageWork(stage())
    work.resume()
    return work
