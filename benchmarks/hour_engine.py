"""What the engine does on a card that no tests without one can show: graphs that go, answers for long, a profile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from loaded import engine_over, forwards_of, prompt, told
from shapes import members
from sheet import Sheet
from torch.profiler import ProfilerActivity, profile

from specfuse_shared import EnsembleResult, SamplingParams
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.placement.sizing import free_memory
from specfuse_shared.runtime import static_runner as static_runner

_SHARE_FOR_WEIGHTS = 0.7


def pair(device: torch.device, execution: str) -> list[LocalMember]:
    """Two small members in float32, whose answers are the same in every execution."""
    return list(members(True, device, torch.float32, execution, 1e9))[:2]


def answers_of(results: Sequence[Any]) -> list[str]:
    return [result.text if isinstance(result, EnsembleResult) else repr(result) for result in results]


def mixed(some: Sequence[LocalMember], count: int, seed: int) -> tuple[list[Any], list[SamplingParams]]:
    """Questions and lengths of all sizes, greedy and sampled."""
    chance, asked, params = random.Random(seed), [], []
    for number in range(count):
        asked.append(prompt(some, chance.choice((40, 90, 200, 500)), f"Entry {seed}.{number}. "))
        heat = chance.choice((0.0, 0.0, 0.8))
        params.append(
            SamplingParams(max_tokens=chance.choice((6, 20, 45)), temperature=heat, seed=number, ignore_eos=True)
        )
    return asked, params


def graphs(sheet: Sheet, device: torch.device) -> None:
    """Graphs that are dropped and captured again, and captures while another thread waits for the whole device."""
    most, static_runner._MOST_GRAPHS = static_runner._MOST_GRAPHS, 3
    try:
        _compared(sheet, device, "with at most 3 graphs", 6)
    finally:
        static_runner._MOST_GRAPHS = most
    if device.type != "cuda":
        sheet.lacks("a thread that waits for the device: no CUDA device")
        return
    stop = threading.Event()
    refused = list[str]()

    def wait() -> None:
        while not stop.is_set():
            try:
                torch.cuda.synchronize(device)
            except RuntimeError as error:  # the driver forbids it while anybody captures
                refused.append(str(error).splitlines()[0])

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        _compared(sheet, device, "while another thread waits for the device", 6)
    finally:
        stop.set()
        thread.join()
    sheet.add("waits of that thread that failed", len(refused), refused[0] if refused else "")


def _compared(sheet: Sheet, device: torch.device, what: str, waves: int) -> bool:
    """Answers in static execution against those in dynamic; whether all were the same."""
    static, plain = pair(device, "static"), pair(device, "dynamic")
    same = count = 0
    for wave in range(waves):
        asked, params = mixed(plain, 8, wave)
        found = []
        for some in (static, plain):
            with engine_over(some) as engine:
                found.append(answers_of(engine.generate_batch(asked, params)))
        count += len(asked)
        same += sum(a == b for a, b in zip(*found, strict=True))
    ways = "; ".join(sorted({member.report.graphs for member in static}))
    sheet.add(f"equal answers {what}", f"{same} of {count}", f"{ways}; {told(forwards_of(static))}")
    if same < count:
        raise AssertionError(f"{count - same} of {count} answers {what} differ from those of dynamic execution")
    return True


def soak(sheet: Sheet, device: torch.device, seconds: float) -> None:
    """Mixed lengths with little memory for caches, for a while; every answer compared with dynamic execution."""
    static, plain = pair(device, "static"), pair(device, "dynamic")
    end, count, wrong, wave = time.monotonic() + seconds, 0, 0, 0
    with engine_over(static, cache_bytes=24 << 20) as one, engine_over(plain, cache_bytes=24 << 20) as other:
        while time.monotonic() < end:
            asked, params = mixed(plain, 24, 100 + wave)
            found = [answers_of(engine.generate_batch(asked, params)) for engine in (one, other)]
            count, wave = count + len(asked), wave + 1
            wrong += sum(a != b for a, b in zip(*found, strict=True))
        held = one.metrics().cache_bytes
    sheet.add("answers", count, f"{wave} waves of 24 at once, 24 MiB of caches")
    sheet.add("that differ from dynamic execution", wrong)
    sheet.add("forwards", told(forwards_of(static)), "; ".join(sorted({m.report.graphs for m in static})))
    sheet.add("bytes of caches left", held)
    if wrong:
        raise AssertionError(f"{wrong} of {count} answers differ from those of dynamic execution")


def profiled(sheet: Sheet, device: torch.device, tiny: bool) -> None:
    """Rounds of one answer and of 32: seconds, how long the device computed of them, and its longest operations."""
    dtype = torch.float32 if tiny else torch.bfloat16
    room = 1e9 if tiny else _SHARE_FOR_WEIGHTS * free_memory(str(device))
    some = list(members(tiny, device, dtype, "static" if device.type == "cuda" else "auto", room))
    cuda = device.type == "cuda"
    where = "on the device" if cuda else "on the host"
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    for count in (1, 4 if tiny else 32):
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        asked = [prompt(some, 120 if tiny else 400, f"Entry {n}. ") for n in range(count)]
        with engine_over(some, speculation="auto") as engine:
            for _ in range(2):
                engine.generate_batch(asked, params)
            began = time.perf_counter()
            results = engine.generate_batch(asked, params)
            plain = time.perf_counter() - began
            with profile(activities=kinds) as seen:
                engine.generate_batch(asked, params)
        rounds = max(len(result.rounds) for result in results)  # type: ignore[union-attr]
        events = seen.key_averages()
        busy = sum(getattr(event, key) for event in events) / 1e6
        name = f"{count} at once, {len(some)} members"
        sheet.add(f"a round, {name}", f"{1e3 * plain / rounds:.1f} ms", f"{rounds} rounds, without the profiler")
        sheet.add(f"of it in operations, {name}", f"{1e3 * busy / rounds:.1f} ms", where)
        for event in sorted(events, key=lambda found: -getattr(found, key))[:12]:
            sheet.add(f"{count}: {event.key[:60]}", f"{getattr(event, key) / 1e3:.2f} ms", f"{event.count} calls")
    if not cuda:
        sheet.lacks("time on the device: no CUDA device")
