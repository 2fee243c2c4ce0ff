"""The first hour on a GPU: all measurements that need one, in steps that can be interrupted and resumed.

    python benchmarks/first_hour.py OUT [--only STEP …] [--again] [--device cuda:0]
    python benchmarks/first_hour.py OUT --tiny     the same code on a CPU with small sizes, as a test

It needs torch, transformers, pydantic and a checkout of this repository. Other missing requirements are reported, and
the parts that need them are left out. Each step is a process of less than ten minutes that writes OUT/STEP.json and
OUT/STEP.md line by line. A step that is done is not run again: repeat the command after an interruption (Ctrl-C,
SIGTERM) or a lost machine. OUT/hour.md has all tables. The exit status is 1 if a step failed.

versions   versions, symbols of torch that CUDA graphs depend on, streams, tools
costs      copies, matrix products, attention with and without a mask from 1k to 32k, launches, uploads
graphs     graphs dropped and captured again, captures while another thread waits; also under compute-sanitizer
tests      the tests marked gpu
speed      `benchmarks/gpu.py`: decoding, rounds, 1, 8 and 32 answers, speculation on and off
contexts   the same measurements after 512 to 32,768 tokens
soak       mixed lengths with small caches; every answer is compared with dynamic execution
profile    the operations of a round and their times, for 1 and 32 answers
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import torch
import transformers
from bench_members import engine_over, forwards_of, forwards_text, members, prompt
from figures import Sheet, read_sheet
from torch import profiler
from torch.nn.functional import scaled_dot_product_attention

from specfuse_shared import EnsembleResult, SamplingParams
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.placement.sizing import free_memory
from specfuse_shared.runtime import packed_steps
from specfuse_shared.runtime.attention import choose_kernels, grouped_kernel
from specfuse_shared.runtime.cuda_streams import own_stream
from specfuse_shared.runtime.sampler import Download, upload

ROOT = Path(__file__).resolve().parents[1]
MOST_SECONDS = 580
DONE = "done"


@dataclass(frozen=True)
class Card:
    """The device of the steps, the folder `out` of their results, and whether sizes are small."""

    out: Path
    device: torch.device
    tiny: bool


def versions(sheet: Sheet, card: Card) -> None:
    look_at_versions(sheet, card.device)


def costs(sheet: Sheet, card: Card) -> None:
    measure_costs(sheet, card.device)


def graphs(sheet: Sheet, card: Card) -> None:
    compare_graphs(sheet, card.device)
    tool = shutil.which("compute-sanitizer")
    if tool is None or card.device.type != "cuda":
        sheet.lacks(
            "the same under compute-sanitizer: " + ("it is not installed" if tool is None else "no CUDA device")
        )
        return
    code = f"import first_hour as h; h.sanitised({str(card.device)!r})"
    done = _run([tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code], 400)
    sheet.add("under compute-sanitizer", f"status {done.returncode}", done.stdout[-400:])
    if done.returncode:
        raise AssertionError("compute-sanitizer found errors")


def sanitised(device: str) -> None:
    """The comparison that runs under compute-sanitizer."""
    with tempfile.TemporaryDirectory() as folder:
        compare_graphs(Sheet(Path(folder), "sanitised", "", True), torch.device(device))


def tests(sheet: Sheet, card: Card) -> None:
    from importlib.util import find_spec

    if find_spec("pytest") is None:
        sheet.lacks("the tests: pytest is not installed")
        return
    file = card.out / "tests.xml"
    # options and folders are those in pyproject.toml
    done = _run([sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={file}"], MOST_SECONDS - 20)
    if not file.exists():
        raise RuntimeError(f"pytest did not start: {(done.stdout + done.stderr)[-600:]}")
    suite = next(ElementTree.parse(file).getroot().iter("testsuite"))
    for name in ("tests", "skipped", "failures", "errors"):
        sheet.add(name, suite.get(name))
    for case in suite.iter("testcase"):
        for problem in (*case.iter("failure"), *case.iter("error")):
            sheet.add(f"{problem.tag}: {case.get('name')}", (problem.get("message") or "")[:300])
    for reason, count in Counter(skip.get("message") or "" for skip in suite.iter("skipped")).items():
        sheet.lacks(f"{count} tests: {reason}")
    if done.returncode not in (0, 5):
        raise AssertionError("some tests failed")


def speed(sheet: Sheet, card: Card) -> None:
    _speed(sheet, card, ["--without", "context"])


def contexts(sheet: Sheet, card: Card) -> None:
    _speed(sheet, card, ["--only", "context"])


def _speed(sheet: Sheet, card: Card, parts: Sequence[str]) -> None:
    file = card.out / f"{sheet.name}-gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--json", str(file), *parts]
    command += ["--tiny", "--repeats", "1", "--minutes", "2"] if card.tiny else ["--device", str(card.device)]
    done = _run(command, MOST_SECONDS - 10)
    result = read_sheet(file)
    if result is None:
        raise RuntimeError(f"gpu.py wrote nothing: {done.stderr[-600:]}")
    for figure in result["figures"]:
        bound = f"{'≥' if figure['at_least'] else '≤'} {figure['target']:g}"
        sheet.add(figure["name"], f"{figure['ratio']:.2f}", f"aim {bound}; {figure['detail']}")
    for name, value in result["facts"].items():
        sheet.add(name, value)
    if done.returncode:
        raise RuntimeError(f"gpu.py ended with {done.returncode}: {done.stderr[-300:]}")


def soak(sheet: Sheet, card: Card) -> None:
    compare_for_long(sheet, card.device, 15 if card.tiny else 420)


def profile(sheet: Sheet, card: Card) -> None:
    profiled(sheet, card.device, card.tiny)


STEPS: dict[str, Callable[[Sheet, Card], None]] = {
    step.__name__: step for step in (versions, costs, graphs, tests, speed, contexts, soak, profile)
}


def run_step(name: str, card: Card) -> int:
    """Run a step in this process; its sheet has the status."""
    title = next(line for line in (__doc__ or "").splitlines() if line.startswith(f"{name} "))[len(name) :].strip()
    sheet = Sheet(card.out, name, f"{name}: {title}", card.tiny)
    sheet.write()
    try:
        STEPS[name](sheet, card)
    except Exception as error:  # perhaps an unsupported GPU: the other steps can still succeed
        sheet.add("failed", f"{type(error).__name__}: {error}"[:1000])
        sheet.end("failed")
        return 1
    sheet.end(DONE)
    return 0


def run_all(names: Sequence[str], card: Card, again: bool) -> int:
    failed = 0
    for name in names:
        earlier = read_sheet(card.out / f"{name}.json")
        if not again and earlier is not None and earlier["status"] == DONE and earlier["tiny"] == card.tiny:
            print(f"{name}: done before, in {earlier['seconds']:g} s", flush=True)
            continue
        print(name, flush=True)
        command = [sys.executable, str(Path(__file__)), str(card.out), "--step", name, "--device", str(card.device)]
        began = time.monotonic()
        status = _step([*command, *(["--tiny"] if card.tiny else [])])
        if status is None:
            mark(card.out / f"{name}.json", f"cut after {MOST_SECONDS} s")
        failed += status != 0
        print(f"    {'failed' if status else 'done'} after {time.monotonic() - began:.0f} s", flush=True)
        gather(card.out)
    return int(failed > 0)


def mark(file: Path, status: str) -> None:
    """Write the status of a killed step."""
    if (content := read_sheet(file)) is not None:
        file.write_text(json.dumps({**content, "status": status}, indent=1, ensure_ascii=False) + "\n", "utf-8")


def gather(out: Path) -> None:
    """Write all tables into one file, in the order of the steps."""
    files = [out / f"{name}.md" for name in STEPS]
    (out / "hour.md").write_text("\n".join(file.read_text("utf-8") for file in files if file.exists()), "utf-8")


def _step(command: Sequence[str]) -> int | None:
    """Run a command: its exit status, or None after the time limit. No process of it outlives this one."""
    process = subprocess.Popen(command, env=_environment(), start_new_session=True)
    try:
        return process.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _kill(process)
            process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children; Windows has no process groups."""
    if sys.platform != "win32":
        os.killpg(process.pid, signal.SIGKILL)
        return
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for each in started:
        with suppress(psutil.NoSuchProcess):
            each.kill()


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=seconds)


def _environment() -> dict[str, str]:
    """The environment with this repository on the path, so that it need not be installed."""
    paths = (str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS), metavar="STEP")
    parser.add_argument("--again", action="store_true", help="run steps again that are done")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU, to test that all steps run")
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and there is none here; --tiny runs the same code on a CPU")
    card = Card(options.out.resolve(), torch.device("cpu" if options.tiny else options.device), options.tiny)
    card.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_step(options.step, card) if options.step else run_all(options.only, card, options.again)
    except KeyboardInterrupt:
        print("interrupted; the same command continues from here", flush=True)
        return 130


# ── hardware and libraries ────────────────────────────────────────────────────────────────────────

Seconds = Callable[[Callable[[], object]], float]
"""Measures the seconds of some work on the device."""
SYMBOLS = ("clearCublasWorkspacesForStream", "_cuda_endAllocateToPool")
MODULES = ("accelerate", "psutil", "rich", "pytest", "bitsandbytes", "torchao", "vllm", "llama_cpp")
TOOLS = ("nvidia-smi", "compute-sanitizer", "nsys", "ncu")


class _Owner:
    """The owner of a stream."""


def look_at_versions(sheet: Sheet, device: torch.device) -> None:
    """Add versions, the symbols of torch that CUDA graphs depend on, and streams."""
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
    own_streams = {stream.cuda_stream for owner in owners if (stream := own_stream(device, owner))}
    sheet.add("streams owned by us", len(own_streams), f"of {len(owners)}")
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        sheet.add("driver, clocks, power", subprocess.run(query, capture_output=True, text=True).stdout.strip())


_MEANS = {"clearCublasWorkspacesForStream": "yes: a dropped graph frees the workspace of its stream"}


def _in_libraries(symbol: str) -> bool:
    for file in (Path(torch.__file__).parent / "lib").glob("libtorch_*.so"):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as library:
            if library.find(symbol.encode()) >= 0:
                return True
    return False


def measure_costs(sheet: Sheet, device: torch.device) -> None:
    """Measure copies, matrix products, attention with and without a mask, launches and uploads."""
    choose_kernels(device)
    cuda = device.type == "cuda"
    dtype, scale = (torch.bfloat16, 1) if cuda else (torch.float32, 16)

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(11):
            _wait(device)
            began = time.perf_counter()
            work()
            _wait(device)
            times.append(time.perf_counter() - began)
        return statistics.median(times[2:])

    _copies(sheet, device, (1 << 30) // scale // 4, seconds)
    _matrices(sheet, device, dtype, scale, seconds)
    _attention(sheet, device, dtype, scale, seconds)
    small = torch.zeros(64, device=device)
    sheet.add("a launch", f"{1e6 * seconds(lambda: [small.add_(1) for _ in range(1000)]) / 1000:.2f} µs")
    sheet.add("an upload of 64 numbers", f"{1e6 * seconds(lambda: upload(range(64), device)):.1f} µs")
    sheet.add("a synchronous download", f"{1e6 * seconds(lambda: Download(small).read()):.1f} µs")
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
            spent = seconds(lambda source_on_host=host: target[: 1 << 26].copy_(source_on_host))  # type: ignore[misc]
            sheet.add(f"copy to the device, {kind}", f"{host.nbytes / spent / 1e9:.1f} GB/s")


def _matrices(sheet: Sheet, device: torch.device, dtype: torch.dtype, scale: int, seconds: Seconds) -> None:
    width, inner = 4096 // scale, 14336 // scale
    weight = torch.randn(inner, width, device=device, dtype=dtype)
    for rows in (1, 8, 32, 64, 256, 1024, 4096):
        inputs = torch.randn(rows, width, device=device, dtype=dtype)
        spent = seconds(lambda x=inputs: x @ weight.T)  # type: ignore[misc]
        rate, read = 2 * rows * width * inner / spent / 1e12, weight.nbytes / spent / 1e9
        sheet.add(f"{rows} rows × {width} × {inner}", f"{1e6 * spent:.1f} µs", f"{rate:.2f} TFLOP/s, {read:.0f} GB/s")


def _attention(sheet: Sheet, device: torch.device, dtype: torch.dtype, scale: int, seconds: Seconds) -> None:
    """Measure the attention of a draft's step, masked over a whole row, and the library's kernel without a mask."""
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
            masked = seconds(lambda: grouped_kernel(module, query, keys, values, mask, scaling=0.1))  # noqa: B023
            free = seconds(lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=True))  # noqa: B023
            rate = 2 * keys.nbytes / masked / 1e9
            note = f"{rate:.0f} GB/s; without a mask {1e6 * free:.1f} µs"
            sheet.add(f"attention, {rows} × {slots} slots, masked", f"{1e6 * masked:.1f} µs", note)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ── the engine ───────────────────────────────────────────────────────────────────────────────────

_SHARE_FOR_WEIGHTS = 0.7


def pair(device: torch.device, execution: str) -> list[LocalMember]:
    """Two small members in float32: their answers are equal in paged and in dynamic execution."""
    return list(members(True, device, torch.float32, execution, 1e9))[:2]


def answers_of(results: Sequence[Any]) -> list[str]:
    return [result.text if isinstance(result, EnsembleResult) else repr(result) for result in results]


def mixed(loaded: Sequence[LocalMember], count: int, seed: int) -> tuple[list[Any], list[SamplingParams]]:
    """Prompts and answers of different lengths, greedy and sampled."""
    chance, prompts, params = random.Random(seed), [], []
    for number in range(count):
        prompts.append(prompt(loaded, chance.choice((40, 90, 200, 500)), f"Entry {seed}.{number}. "))
        heat = chance.choice((0.0, 0.0, 0.8))
        params.append(
            SamplingParams(max_tokens=chance.choice((6, 20, 45)), temperature=heat, seed=number, ignore_eos=True)
        )
    return prompts, params


def compare_graphs(sheet: Sheet, device: torch.device) -> None:
    """Compare answers while graphs are dropped and captured again, and while another thread waits for the device."""
    pages, packed_steps._MOST_PAGES = packed_steps._MOST_PAGES, 4
    try:
        _compared(sheet, device, "with buffers that grow", 6)
    finally:
        packed_steps._MOST_PAGES = pages
    if device.type != "cuda":
        sheet.lacks("a thread that waits for the device: no CUDA device")
        return
    stop = threading.Event()
    refused = list[str]()

    def wait() -> None:
        while not stop.is_set():
            try:
                torch.cuda.synchronize(device)
            except RuntimeError as error:  # the driver forbids it during a capture
                refused.append(str(error).splitlines()[0])

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        _compared(sheet, device, "while another thread waits for the device", 6)
    finally:
        stop.set()
        thread.join()
    sheet.add("waits of that thread that failed", len(refused), refused[0] if refused else "")


def _compared(sheet: Sheet, device: torch.device, condition: str, waves: int) -> None:
    """Compare answers in paged and in dynamic execution."""
    paged, plain = pair(device, "paged"), pair(device, "dynamic")
    same = count = 0
    for wave in range(waves):
        prompts, params = mixed(plain, 8, wave)
        answers = []
        for pair_members in (paged, plain):
            with engine_over(pair_members) as engine:
                answers.append(answers_of(engine.generate_batch(prompts, params)))
        count += len(prompts)
        same += sum(a == b for a, b in zip(*answers, strict=True))
    ways = "; ".join(sorted({member.report.graphs for member in paged}))
    sheet.add(f"equal answers {condition}", f"{same} of {count}", f"{ways}; {forwards_text(forwards_of(paged))}")
    if same < count:
        raise AssertionError(
            f"{count - same} of {count} answers {condition} differ from the answers of dynamic execution"
        )


def compare_for_long(sheet: Sheet, device: torch.device, seconds: float) -> None:
    """Generate answers of mixed lengths with small caches, and compare each one with dynamic execution."""
    paged, plain = pair(device, "paged"), pair(device, "dynamic")
    end, count, wrong, wave = time.monotonic() + seconds, 0, 0, 0
    with engine_over(paged, cache_bytes=24 << 20) as one, engine_over(plain, cache_bytes=24 << 20) as two:
        while time.monotonic() < end:
            prompts, params = mixed(plain, 24, 100 + wave)
            answers = [answers_of(engine.generate_batch(prompts, params)) for engine in (one, two)]
            count, wave = count + len(prompts), wave + 1
            wrong += sum(a != b for a, b in zip(*answers, strict=True))
        cache_bytes = one.metrics().cache_bytes
    sheet.add("answers", count, f"{wave} waves of 24 at once, 24 MiB of caches")
    sheet.add("that differ from dynamic execution", wrong)
    sheet.add("forward passes", forwards_text(forwards_of(paged)), "; ".join(sorted({m.report.graphs for m in paged})))
    sheet.add("bytes in caches at the end", cache_bytes)
    if wrong:
        raise AssertionError(f"{wrong} of {count} answers differ from the answers of dynamic execution")


def profiled(sheet: Sheet, device: torch.device, tiny: bool) -> None:
    """Profile the rounds of one answer and of 32: the time of a round, its time in operations, the longest ones."""
    dtype = torch.float32 if tiny else torch.bfloat16
    most_bytes = 1e9 if tiny else _SHARE_FOR_WEIGHTS * free_memory(str(device))
    loaded = list(members(tiny, device, dtype, "auto", most_bytes))
    cuda = device.type == "cuda"
    where = "on the device" if cuda else "on the host"
    kinds = [profiler.ProfilerActivity.CPU] + ([profiler.ProfilerActivity.CUDA] if cuda else [])
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    for count in (1, 4 if tiny else 32):
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        prompts = [prompt(loaded, 120 if tiny else 400, f"Entry {n}. ") for n in range(count)]
        with engine_over(loaded, speculation="auto") as engine:
            for _ in range(2):
                engine.generate_batch(prompts, params)
            began = time.perf_counter()
            results = engine.generate_batch(prompts, params)
            plain = time.perf_counter() - began
            with profiler.profile(activities=kinds) as profiling:
                engine.generate_batch(prompts, params)
        rounds = max(len(result.rounds) for result in results)  # type: ignore[union-attr]
        events = profiling.key_averages()
        busy = sum(getattr(event, key) for event in events) / 1e6
        name = f"{count} at once, {len(loaded)} members"
        sheet.add(f"a round, {name}", f"{1e3 * plain / rounds:.1f} ms", f"{rounds} rounds, without the profiler")
        sheet.add(f"of it in operations, {name}", f"{1e3 * busy / rounds:.1f} ms", where)
        for event in sorted(events, key=lambda event: -getattr(event, key))[:12]:
            sheet.add(f"{count}: {event.key[:60]}", f"{getattr(event, key) / 1e3:.2f} ms", f"{event.count} calls")
    if not cuda:
        sheet.lacks("time on the device: no CUDA device")


if __name__ == "__main__":
    sys.exit(main())
