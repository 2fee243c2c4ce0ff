"""Many answers at once on the real demo members; minutes long, so `make test-all` runs it."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from specfuse_shared import EnsembleEngine, SamplingParams
from tests.support.against_naive import answer_of, stalls_of_the_loop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SUBJECTS = ("the sea", "a lighthouse", "北京", "bread", "a Python loop", "tides", "the moon", "a piano", "glass", "🎉")


def test_twenty_concurrent_float32_answers_equal_answers_one_after_another(exact_engine: EnsembleEngine) -> None:
    requests = [f"Tell me about {SUBJECTS[n % 10]}{', please' * (n // 10 * 4)}." for n in range(20)]
    each = [SamplingParams(max_tokens=24, temperature=n % 2 * 0.8, seed=n) for n in range(20)]
    with EnsembleEngine(replace(exact_engine.config, reuse_prefixes=False)) as engine:
        alone = [answer_of(engine.generate(question, params)) for question, params in zip(requests, each, strict=True)]
        together = engine.generate_batch(requests, each)
    assert [answer_of(result) for result in together] == alone


async def test_a_ticker_on_the_event_loop_never_stalls_a_tenth_of_a_second(demo_engine: EnsembleEngine) -> None:
    stalls: list[float] = []

    ticking = asyncio.create_task(stalls_of_the_loop(stalls))
    await asyncio.gather(
        *(demo_engine.agenerate(f"Tell me about {s}.", SamplingParams(max_tokens=32)) for s in SUBJECTS[:8])
    )
    ticking.cancel()
    assert len(stalls) > 100
    assert max(stalls) < 0.1, f"the loop was blocked for {max(stalls):.3f} s"


def test_memory_is_freed_after_two_hundred_cancellations(demo_engine: EnsembleEngine) -> None:
    chance, params = random.Random(0), SamplingParams(max_tokens=200)
    with EnsembleEngine(replace(demo_engine.config, reuse_prefixes=False)) as engine:
        question, short = "Why is the sky blue?", SamplingParams(max_tokens=20)
        expected = answer_of(engine.generate(question, short))

        async def leave_early() -> None:
            if chance.random() < 0.5:
                task = asyncio.create_task(engine.agenerate(question, params))
                await asyncio.sleep(chance.random())
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                stream = engine.stream(question, params)
                await asyncio.to_thread(next, stream)
                stream.close()  # type: ignore[attr-defined]

        async def leave(times: int) -> None:
            for _ in range(times // 8):
                await asyncio.gather(*(leave_early() for _ in range(8)))

        def spec() -> int:
            while engine.metrics().running:
                time.sleep(0.05)
            gc.collect()
            return int(psutil.Process().memory_info().rss)

        asyncio.run(leave(16))
        before = spec()
        asyncio.run(leave(200))
        assert spec() < 1.05 * before
        assert engine.metrics().cache_bytes == 0
        assert answer_of(engine.generate(question, short)) == expected


def test_memory_does_not_grow_over_twenty_closes() -> None:
    # malloc keeps partly used pages, so the process grows a little with each close, less each time
    work = (
        "import ctypes, psutil\n"
        "from specfuse_shared import EnsembleConfig, EnsembleEngine, SamplingParams, demo_members\n"
        "fields = 'arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost'.split()\n"
        "Info = type('Info', (ctypes.Structure,), {'_fields_': [(name, ctypes.c_size_t) for name in fields]})\n"
        "info = ctypes.CDLL(None).mallinfo2\n"
        "info.restype = Info\n"
        "for _ in range(20):\n"
        "    engine = EnsembleEngine(EnsembleConfig(demo_members()))\n"
        "    engine.generate_batch(['Why is sleep important?'] * 8, SamplingParams(max_tokens=24))\n"
        "    engine.close()\n"
        "    now = info()\n"
        "    used = now.uordblks + now.hblkhd\n"
        "    print('MiB', used >> 20, psutil.Process().memory_info().rss >> 20, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("MiB")]
    used, resident = ([int(line[n]) for line in lines] for n in range(2))
    assert len(used) == 20
    assert max(used) - used[0] <= 50, f"MiB in use after each close: {used}"
    assert max(resident) - resident[0] <= 250, f"MiB of the process after each close: {resident}"
