"""Steps of the first hour on a card: its hardware and libraries without a model, and the engine on it."""

from __future__ import annotations

import mmap
import platform
import random
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_members import engine_over, forwards_of, members, prompt, reported
from figures import Sheet
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from specfuse_shared import EnsembleResult, SamplingParams
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.placement.sizing import free_memory
from specfuse_shared.runtime import static_runner as static_runner
from specfuse_shared.runtime.attention import choose_kernels, grouped_kernel
from specfuse_shared.runtime.cuda_streams import own_stream
from specfuse_shared.runtime.sampler import Download, upload

Seconds = Callable[[Callable[[], object]], float]
"""How long the device takes for some work."""
SYMBOLS = ("clearCublasWorkspacesForStream", "_cuda_endAllocateToPool")
MODULES = ("accelerate", "psutil", "rich", "pytest", "bitsandbytes", "torchao", "vllm", "llama_cpp")
TOOLS = ("nvidia-smi", "compute-sanitizer", "nsys", "ncu")


class _Owner:
    """Has a stream while it lives."""


def versions(sheet: Sheet, device: torch.device) -> None:
    """Versions, symbols of torch that decide what graphs forgive, and streams."""
    sheet.add("python", platform.python_version())
    sheet.add("torch", torch.__version__, f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    sheet.add("transformers", transformers.__version__)
    for symbol in SYMBOLS:
        sheet.add(f"torch has {symbol}", "yes" if _in_libraries(symbol) else "no", _MEANS.get(symbol, ""))
    for kind, names, there in (("module", MODULES, find_spec), ("tool", TOOLS, shutil.which)):
        missing = [name for name in names if not there(name)]
        sheet.add(f"{kind}s found", ", ".join(name for name in names if name not in missing) or "none")
        sheet.add(f"{kind}s missing", ", ".join(missing) or "none")
    if device.type != "cuda":
        sheet.lacks("streams, driver and memory: no CUDA device")
        return
    facts = torch.cuda.get_device_properties(device)
    sheet.add("card", facts.name, f"{facts.total_memory / 2**30:.1f} GiB, {facts.multi_processor_count} processors")
    sheet.add("different streams", len({torch.cuda.Stream(device).cuda_stream for _ in range(128)}), "of 128 made")
    owners = [_Owner() for _ in range(40)]
    own = {stream.cuda_stream for owner in owners if (stream := own_stream(device, owner))}
    sheet.add("streams of our own", len(own), f"of {len(owners)}")
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        sheet.add("driver, clocks, power", subprocess.run(asked, capture_output=True, text=True).stdout.strip())


_MEANS = {"clearCublasWorkspacesForStream": "yes: a graph that goes takes the workspace of its stream with it"}


def _in_libraries(symbol: str) -> bool:
    for file in (Path(torch.__file__).parent / "lib").glob("libtorch_*.so"):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as found:
            if found.find(symbol.encode()) >= 0:
                return True
    return False


def costs(sheet: Sheet, device: torch.device) -> None:
    """Copies, matrix products, attention with and without a mask, launches, uploads."""
    choose_kernels(device)
    cuda = device.type == "cuda"
    dtype, scale = (torch.bfloat16, 1) if cuda else (torch.float32, 16)

    def seconds(work: Callable[[], object]) -> float:
        found = []
        for _ in range(11):
            _wait(device)
            began = time.perf_counter()
            work()
            _wait(device)
            found.append(time.perf_counter() - began)
        return statistics.median(found[2:])

    _copies(sheet, device, (1 << 30) // scale // 4, seconds)
    _matrices(sheet, device, dtype, scale, seconds)
    _attention(sheet, device, dtype, scale, seconds)
    small = torch.zeros(64, device=device)
    sheet.add("a launch", f"{1e6 * seconds(lambda: [small.add_(1) for _ in range(1000)]) / 1000:.2f} µs")
    sheet.add("an upload of 64 numbers", f"{1e6 * seconds(lambda: upload(range(64), device)):.1f} µs")
    sheet.add("a download that is waited for", f"{1e6 * seconds(lambda: Download(small).read()):.1f} µs")
    if not cuda:
        sheet.lacks("page-locked copies and a replayed graph: no CUDA device")
        return
    graph, owner = torch.cuda.CUDAGraph(), _Owner()
    with torch.cuda.graph(graph, stream=own_stream(device, owner)):
        for _ in range(1000):
            small.add_(1)
    sheet.add("a kernel of a replayed graph", f"{1e6 * seconds(graph.replay) / 1000:.2f} µs")


def _copies(sheet: Sheet, device: torch.device, numbers: int, seconds: Seconds) -> None:
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    sheet.add("copy on the device", f"{2 * source.nbytes / seconds(lambda: target.copy_(source)) / 1e9:.0f} GB/s")
    sheet.add("read on the device", f"{source.nbytes / seconds(source.sum) / 1e9:.0f} GB/s")
    if device.type == "cuda":
        for kind, host in (("page-locked", torch.ones(1 << 26).pin_memory()), ("pageable", torch.ones(1 << 26))):
            spent = seconds(lambda given=host: target[: 1 << 26].copy_(given))  # type: ignore[misc]
            sheet.add(f"copy to the device, {kind}", f"{host.nbytes / spent / 1e9:.1f} GB/s")


def _matrices(sheet: Sheet, device: torch.device, dtype: torch.dtype, scale: int, seconds: Seconds) -> None:
    width, inner = 4096 // scale, 14336 // scale
    weight = torch.randn(inner, width, device=device, dtype=dtype)
    for rows in (1, 8, 32, 64, 256, 1024, 4096):
        given = torch.randn(rows, width, device=device, dtype=dtype)
        spent = seconds(lambda x=given: x @ weight.T)  # type: ignore[misc]
        rate, read = 2 * rows * width * inner / spent / 1e12, weight.nbytes / spent / 1e9
        sheet.add(f"{rows} rows × {width} × {inner}", f"{1e6 * spent:.1f} µs", f"{rate:.2f} TFLOP/s, {read:.0f} GB/s")


def _attention(sheet: Sheet, device: torch.device, dtype: torch.dtype, scale: int, seconds: Seconds) -> None:
    """As a draft's step calls it, under a mask over a whole row; and the library's kernel that takes none."""
    heads, kv_heads, size = 32 // min(scale, 8), 8 // min(scale, 8), 128
    module = torch.nn.Module()
    module.is_causal = module.training = False  # type: ignore[assignment]
    module.num_key_value_groups = heads // kv_heads  # type: ignore[assignment]
    for slots in (1024, 4096, 8192, 32768):
        slots //= scale
        for rows in (1, 8):
            query = torch.randn(rows, heads, 1, size, device=device, dtype=dtype)
            keys, values = torch.randn(2, rows, kv_heads, slots, size, device=device, dtype=dtype)
            mask = torch.zeros(rows, 1, 1, slots, device=device, dtype=dtype)
            under = seconds(lambda: grouped_kernel(module, query, keys, values, mask, scaling=0.1))  # noqa: B023
            free = seconds(lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=True))  # noqa: B023
            rate = 2 * keys.nbytes / under / 1e9
            note = f"{rate:.0f} GB/s; without a mask {1e6 * free:.1f} µs"
            sheet.add(f"attention, {rows} × {slots} slots, masked", f"{1e6 * under:.1f} µs", note)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ── the engine ───────────────────────────────────────────────────────────────────────────────────

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
    sheet.add(f"equal answers {what}", f"{same} of {count}", f"{ways}; {reported(forwards_of(static))}")
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
    sheet.add("forwards", reported(forwards_of(static)), "; ".join(sorted({m.report.graphs for m in static})))
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
