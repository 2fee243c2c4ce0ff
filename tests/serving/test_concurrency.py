"""Many concurrent answers on tiny members equal answers one after another, while others join, leave or cancel."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, Message, SamplingParams, Tool
from specfuse_shared.errors import EngineBusyError, EngineClosedError, RequestError, RequestTimeoutError
from specfuse_shared.events import EnsembleResult, Event, FinishEvent, SegmentEvent
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.policies import ExitDecision, never
from specfuse_shared.runtime.packed_steps import size_of
from specfuse_shared.serving.engine import lease_engine
from specfuse_shared.text.chat_template import PromptEncoder
from tests.support.against_naive import answer_of, local_members, stalls_of_the_loop
from tests.support.many_requests import requests
from tests.support.marks import weekly


@pytest.fixture(scope="module")
def engine(tiny_engine: EnsembleEngine) -> Iterator[EnsembleEngine]:
    """The tiny members without prefix reuse and with memory for few answers, so that requests also queue."""
    config = replace(tiny_engine.config, exit="entropy", reuse_prefixes=False, max_concurrent=6)
    with EnsembleEngine(config) as made:
        yield made.load()


@pytest.fixture(scope="module")
def paged(engine: EnsembleEngine) -> Iterator[EnsembleEngine]:
    with EnsembleEngine(replace(engine.config, execution="paged")) as made:
        yield made.load()


@pytest.fixture(params=["dynamic", "paged"])
def either(request: pytest.FixtureRequest, engine: EnsembleEngine) -> EnsembleEngine:
    """The engine in each execution."""
    chosen = engine if request.param == "dynamic" else request.getfixturevalue(request.param)
    assert isinstance(chosen, EnsembleEngine)
    return chosen


def caches_in_use(engine: EnsembleEngine) -> int:
    return sum(member.runner.pool.memory_bytes for member in local_members(engine))


def wait_until_idle(engine: EnsembleEngine) -> None:
    limit = time.monotonic() + 30
    while (now := engine.metrics()).running or now.waiting:
        assert time.monotonic() < limit, "requests never ended"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def one_after_another(engine: EnsembleEngine) -> list[tuple[str, list[str]]]:
    """Twenty answers, one after another."""
    return [answer_of(engine.generate(question, params)) for question, params in requests(20)]


def test_twenty_concurrent_answers_equal_answers_one_after_another(
    one_after_another: list[tuple[str, list[str]]], either: EnsembleEngine
) -> None:
    prompts, expected = requests(20), one_after_another
    before = either.metrics().batch_size.total
    together = either.generate_batch([question for question, _ in prompts], [params for _, params in prompts])
    assert [answer_of(result) for result in together] == expected
    forwards = either.metrics().batch_size
    assert forwards.total > before
    assert sum(forwards.counts[2:]) > 0, "at least three answers must have shared a forward pass"


@pytest.mark.parametrize("seed", [0, *weekly(1)])
def test_joining_leaving_and_cancelling_change_no_other_answer(
    one_after_another: list[tuple[str, list[str]]], either: EnsembleEngine, seed: int
) -> None:
    prompts, chance = requests(20), random.Random(seed)
    expected = [text for text, _ in one_after_another]

    async def ask(number: int) -> str | None:
        question, params = prompts[number]
        await asyncio.sleep(chance.random() * 0.3)
        if number % 3 == 2:
            stream = either.astream(question, params)
            for _ in range(chance.randint(1, 3)):
                if isinstance(await anext(stream), FinishEvent):
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            return None
        return (await either.agenerate(question, params)).text

    async def ask_all() -> list[str | None]:
        order = chance.sample(range(20), 20)
        answers = dict(zip(order, await asyncio.gather(*(ask(n) for n in order)), strict=True))
        return [answers[n] for n in range(20)]

    result = asyncio.run(ask_all())
    assert [text for text in result if text is not None] == [t for n, t in enumerate(expected) if n % 3 != 2]


def test_threads_and_event_loops_mix(engine: EnsembleEngine) -> None:
    prompts = requests(8)
    expected = [engine.generate(question, params).text for question, params in prompts]
    results: dict[int, str] = {}

    def in_thread(number: int) -> None:
        if number % 2:
            results[number] = asyncio.run(engine.agenerate(*prompts[number])).text
        else:
            results[number] = engine.generate(*prompts[number]).text

    threads = [threading.Thread(target=in_thread, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[n] for n in range(8)] == expected


async def test_async_events_equal_the_streams_events(engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=40)
    streamed = list(engine.stream("How do tides work?", params))
    results = [event async for event in engine.astream("How do tides work?", params)]

    def texts_of(events: list[Event]) -> list[tuple[str, str]]:
        return [(type(e).__name__, e.text if isinstance(e, SegmentEvent) else "") for e in events]

    assert texts_of(results) == texts_of(streamed)


async def test_the_event_loop_never_stalls_and_wait_for_fires_on_time(engine: EnsembleEngine) -> None:
    stalls: list[float] = []

    ticking = asyncio.create_task(stalls_of_the_loop(stalls))
    prompts = [(f"{n} {question}", replace(params, max_tokens=150)) for n, (question, params) in enumerate(requests(8))]
    answers = asyncio.gather(*(engine.agenerate(*each) for each in prompts))
    start = time.perf_counter()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.agenerate("Endless?", SamplingParams(max_tokens=400)), 0.2)
    assert time.perf_counter() - start < 1.0
    await answers
    ticking.cancel()
    assert len(stalls) > 2
    assert max(stalls) < 0.5, "far more than a busy test machine costs: a forward pass ran on the loop"


def test_a_timeout_ends_the_answer_with_its_text_so_far(engine: EnsembleEngine) -> None:
    outputs: list[str] = []
    stream = engine.stream("Never stop", SamplingParams(max_tokens=400), timeout=0.01)
    with pytest.raises(RequestTimeoutError, match="timeout passed") as late:
        outputs.extend(e.text for e in stream if isinstance(e, SegmentEvent))
    assert late.value.text == "".join(outputs)
    assert isinstance(late.value, TimeoutError)
    with pytest.raises(RequestError, match="positive number of seconds"):
        engine.stream("x", timeout=0)


def test_cancellations_and_closed_streams_free_everything(either: EnsembleEngine) -> None:
    engine, chance, question = either, random.Random(1), "What is a lens?"
    expected = engine.generate(question, SamplingParams(max_tokens=30)).text

    async def many() -> None:
        async def one() -> None:
            params = SamplingParams(max_tokens=300)
            if chance.random() < 0.5:
                task = asyncio.create_task(engine.agenerate(question, params))
                await asyncio.sleep(chance.random() * 0.2)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                stream = engine.stream(question, params)
                await asyncio.to_thread(next, stream)
                stream.close()  # type: ignore[attr-defined]

        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(10)))

    asyncio.run(many())
    for _ in range(20):
        next(engine.stream(question, SamplingParams(max_tokens=300)))  # dropped, never closed
    gc.collect()
    wait_until_idle(engine)
    assert caches_in_use(engine) == 0
    assert engine.generate(question, SamplingParams(max_tokens=30)).text == expected


def test_a_stream_that_is_never_read_is_stopped_when_it_is_dropped(engine: EnsembleEngine) -> None:
    stopped = engine.metrics().requests["cancelled"]
    stream = engine.stream("Unheard", SamplingParams(max_tokens=400))
    del stream
    gc.collect()
    wait_until_idle(engine)
    assert engine.metrics().requests["cancelled"] == stopped + 1


def test_a_full_queue_refuses_or_waits_as_configured(tiny_engine: EnsembleEngine) -> None:
    gate, params = threading.Event(), SamplingParams(max_tokens=40)

    def blocking_exit(totals: Sequence[float], round_index: int) -> ExitDecision:
        assert gate.wait(60)
        return never(totals, round_index)

    config = replace(tiny_engine.config, exit=blocking_exit, max_concurrent=1, max_queue=1, when_busy="raise")
    with EnsembleEngine(config) as engine:
        running = engine.stream("First", params)
        next(running)
        waiting = engine.stream("Second", params)
        with pytest.raises(EngineBusyError, match="max_queue=1"):
            engine.stream("Third", params)
        gate.set()
        assert isinstance(list(running)[-1], FinishEvent)
        assert isinstance(list(waiting)[-1], FinishEvent)
    gate.clear()
    with EnsembleEngine(replace(config, when_busy="wait")) as engine:
        streams = [engine.stream("First", params)]
        next(streams[0])
        streams.append(engine.stream("Second", params))
        with pytest.raises(RequestTimeoutError):
            engine.generate("Too late", timeout=0.05)
        gate.set()
        results = engine.generate_batch([f"Question {n}" for n in range(5)], params)
        assert all(isinstance(result, EnsembleResult) and result.text for result in results)
        assert all(isinstance(list(stream)[-1], FinishEvent) for stream in streams)


def test_a_full_queue_refuses_before_anything_is_read(
    tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read, plainly = threading.Event(), list[str](), PromptEncoder.encode

    def blocking_exit(totals: Sequence[float], round_index: int) -> ExitDecision:
        assert gate.wait(60)
        return never(totals, round_index)

    def spied(self: PromptEncoder, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        read.append(messages[0].content)
        return plainly(self, messages, tools)

    monkeypatch.setattr(PromptEncoder, "encode", spied)
    config = replace(tiny_engine.config, exit=blocking_exit, max_concurrent=1, max_queue=1, when_busy="raise")
    with EnsembleEngine(config) as engine:
        streams = [engine.stream("First"), engine.stream("Second")]
        read.clear()
        with pytest.raises(EngineBusyError):
            engine.check_busy()
        with pytest.raises(EngineBusyError):
            engine.generate("Third", SamplingParams(grammar=Grammar.regex("[a-c]{5}")))
        assert not read
        gate.set()
        for stream in streams:
            assert isinstance(list(stream)[-1], FinishEvent)
        engine.check_busy()


async def test_an_abandoned_call_stops_the_prefill(
    tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, read, plainly = threading.Event(), threading.Event(), list[str](), PromptEncoder.encode

    def slow(self: PromptEncoder, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        read.append(self._member)
        begun.set()
        assert gate.wait(60)
        return plainly(self, messages, tools)

    with EnsembleEngine(tiny_engine.config) as engine:
        engine.load()
        monkeypatch.setattr(PromptEncoder, "encode", slow)
        task = asyncio.create_task(engine.agenerate("Why?", SamplingParams(max_tokens=5)))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        monkeypatch.setattr(PromptEncoder, "encode", plainly)
        assert (await engine.agenerate("How?", SamplingParams(max_tokens=5))).text
        assert len(read) == 1, "the second member's prompt is not read"
        assert engine.metrics().running == engine.metrics().waiting == 0


async def test_more_asynchronous_calls_than_the_queue_size_can_wait(tiny_engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=5)
    with EnsembleEngine(replace(tiny_engine.config, max_concurrent=1, max_queue=1)) as engine:
        engine.load()
        answers = [engine.agenerate(f"Question {n}", params) for n in range(40)]
        late = [engine.agenerate("Too late", params, timeout=0.001) for _ in range(5)]
        results = await asyncio.gather(*answers, *late, return_exceptions=True)
        assert all(isinstance(each, EnsembleResult) for each in results[:40])
        assert all(isinstance(each, RequestTimeoutError) for each in results[40:])
        waiting = asyncio.create_task(engine.agenerate("Given up", SamplingParams(max_tokens=400)))
        more = asyncio.create_task(engine.agenerate("Too", SamplingParams(max_tokens=400)))
        third = asyncio.create_task(engine.agenerate("This, too", params))
        await asyncio.sleep(0.05)
        for task in (third, more, waiting):
            task.cancel()
        await asyncio.gather(waiting, more, third, return_exceptions=True)
        assert (await engine.agenerate("And then", params)).text


def test_memory_limits_the_running_answers(tiny_engine: EnsembleEngine) -> None:
    members = local_members(tiny_engine)
    drafts = 2 * tiny_engine.config.segment_tokens
    one = sum(256 * m.bytes_per_token + drafts * m.vocabulary_size * 4 for m in members)
    config = replace(tiny_engine.config, cache_bytes=int(1.5 * one), reuse_prefixes=False)
    with EnsembleEngine(config) as engine, pytest.raises(RequestError, match=r"lower max_tokens"):
        engine.generate("x", SamplingParams(max_tokens=450))
    with EnsembleEngine(replace(config, cache_bytes=int(2.5 * one))) as engine:
        results = engine.generate_batch(["Why?", "How?", "Who?", "When?"], SamplingParams(max_tokens=100))
        assert len(results) == 4
        assert sum(engine.metrics().batch_size.counts[2:]) == 0, "two fit, three do not"
        assert engine.metrics().batch_size.counts[1] > 0


def test_long_prompts_do_not_stop_running_answers(tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specfuse_shared.members.local.lane.Pace.tokens", lambda pace, seconds: 32)
    config = replace(tiny_engine.config, reuse_prefixes=False)
    with EnsembleEngine(config) as engine:
        expected = engine.generate("moon " * 130, SamplingParams(max_tokens=12)).text
        running = [engine.stream(f"Speak {n}", SamplingParams(max_tokens=400)) for n in range(5)]
        for stream in running:
            next(event for event in stream if isinstance(event, SegmentEvent))
        sizes = _forward_sizes(local_members(engine)[0])
        assert engine.generate("moon " * 130, SamplingParams(max_tokens=12)).text == expected
        assert engine.metrics().running > 0, "at least one answer must have run all the time"
        assert max(sizes) <= 32 + 5 * (2 * config.segment_tokens + 8)


@pytest.mark.parametrize("execution", ["dynamic", "paged"])
def test_a_shared_prefix_is_read_once(tiny_engine: EnsembleEngine, execution: str) -> None:
    with (
        EnsembleEngine(replace(tiny_engine.config, execution=execution)) as engine,
        EnsembleEngine(replace(tiny_engine.config, reuse_prefixes=False)) as plain,
    ):
        talk = [Message("system", "You know the sea. " * 5), Message("user", "How do tides follow the moon?")]
        params = SamplingParams(max_tokens=40)
        first = engine.generate(talk, params)
        talk += [Message("assistant", first.text), Message("user", "And the sun?")]
        sizes = [_forward_sizes(member) for member in local_members(engine)]
        second = engine.generate(talk, params)
        assert second.text == plain.generate(talk, params).text
        for member, fed in zip(local_members(engine), sizes, strict=True):
            prompt = len(member.encode_prompt(talk))
            before = len(member.encode_prompt(talk[:2]))
            unread = prompt - before + 2
            limit = size_of(unread) if execution == "paged" else unread
            assert fed[0] <= limit, "the first turn is not read again"
        assert engine.metrics().reused_prompt_tokens > 0
        assert engine.metrics().prefix_bytes > 0


def test_cached_prefixes_stay_within_their_budget(tiny_engine: EnsembleEngine) -> None:
    with EnsembleEngine(replace(tiny_engine.config, cache_bytes=8_000_000)) as engine:
        for number in range(30):
            engine.generate(f"{number} {'moon tide ' * 40}", SamplingParams(max_tokens=5))
            assert engine.metrics().prefix_bytes <= 1_000_000
        assert engine.metrics().prefix_bytes > 0


def test_equal_configurations_share_one_engine_until_the_last_one_is_closed(tiny_engine: EnsembleEngine) -> None:
    config = replace(tiny_engine.config, segment_tokens=5)
    results: list[EnsembleEngine] = []
    leases = [lease_engine(config), lease_engine(replace(config))]
    threads = [threading.Thread(target=lambda lease=lease: results.append(lease.engine.load())) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] is results[1]
    leases[0].close()
    leases[0].close()
    assert leases[1].engine.generate("Still here?", SamplingParams(max_tokens=5)).text
    leases[1].close()
    with pytest.raises(EngineClosedError):
        leases[1].engine.generate("Gone?")
    with lease_engine(config) as fresh:
        assert fresh.engine is not results[0]


def _in_child(engine: EnsembleEngine, answers: multiprocessing.SimpleQueue[str]) -> None:
    try:
        engine.generate("Anybody?", SamplingParams(max_tokens=5))
    except EngineClosedError as error:
        answers.put(str(error))
    with lease_engine(EnsembleConfig(engine.config.members)) as lease:
        answers.put("fresh" if lease.engine is not engine else "same")
    engine.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_gets_a_clear_error_and_a_fresh_registry(engine: EnsembleEngine) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(engine, answers))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert "make a new one here" in answers.get()
    assert answers.get() == "fresh"
    assert engine.generate("Parent?", SamplingParams(max_tokens=5)).text


def _forward_sizes(member: LocalMember) -> list[int]:
    """Tokens of each later forward pass of a member's model."""
    sizes: list[int] = []
    member.runner.model.register_forward_pre_hook(
        lambda _, __, inputs: sizes.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    return sizes
