"""The first hour on a card: all measurements that need one, in steps that can be interrupted and resumed.

    python benchmarks/first_hour.py OUT [--only STEP …] [--again] [--device cuda:0]
    python benchmarks/first_hour.py OUT --tiny     the same code on a CPU in small; its figures say nothing

Needs torch, transformers, and this repository as it is checked out; other missing requirements are reported, and their
parts left out. Each step is a process of less than ten minutes, writes OUT/STEP.json and OUT/STEP.md line by line, and
is not run again once it is done: repeat the same command after an interruption (Ctrl-C, SIGTERM), or after the card was
taken away. OUT/hour.md has all tables. The status is 1 if a step failed.

versions   versions, symbols that decide what graphs forgive, streams, tools
costs      copies, matrix products, attention with and without a mask from 1k to 32k, launches, uploads
graphs     graphs dropped and captured again, and captures while another thread waits; under compute-sanitizer if found
tests      the tests marked gpu
speed      benchmarks/gpu.py: decoding, rounds, 1, 8 and 32 answers, speculation on and off
contexts   the same after 512 to 32,768 tokens
soak       mixed lengths and little memory for caches, every answer compared with dynamic execution
profile    where the time of a round goes, at 1 and at 32 answers
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import psutil
import torch
from figures import Sheet, read_sheet

ROOT = Path(__file__).resolve().parents[1]
MOST_SECONDS = 580
DONE = "done"


@dataclass(frozen=True)
class Card:
    """Where a step runs, and how: `out` is its folder."""

    out: Path
    device: torch.device
    tiny: bool


def versions(sheet: Sheet, card: Card) -> None:
    from first_hour_steps import versions

    versions(sheet, card.device)


def costs(sheet: Sheet, card: Card) -> None:
    from first_hour_steps import costs

    costs(sheet, card.device)


def graphs(sheet: Sheet, card: Card) -> None:
    from first_hour_steps import graphs

    graphs(sheet, card.device)
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
    """The part that runs under the sanitiser."""
    from first_hour_steps import graphs

    with tempfile.TemporaryDirectory() as folder:
        graphs(Sheet(Path(folder), "sanitised", "", True), torch.device(device))


def tests(sheet: Sheet, card: Card) -> None:
    from importlib.util import find_spec

    if find_spec("pytest") is None:
        sheet.lacks("the tests: pytest is not installed")
        return
    file = card.out / "tests.xml"
    # pyproject.toml's own options and folders
    done = _run([sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={file}"], MOST_SECONDS - 20)
    if not file.exists():
        raise RuntimeError(f"pytest did not start: {(done.stdout + done.stderr)[-600:]}")
    suite = next(ElementTree.parse(file).getroot().iter("testsuite"))
    for name in ("tests", "skipped", "failures", "errors"):
        sheet.add(name, suite.get(name))
    for case in suite.iter("testcase"):
        for found in (*case.iter("failure"), *case.iter("error")):
            sheet.add(f"{found.tag}: {case.get('name')}", (found.get("message") or "")[:300])
    for reason, count in Counter(found.get("message") or "" for found in suite.iter("skipped")).items():
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
    found = read_sheet(file)
    if found is None:
        raise RuntimeError(f"gpu.py wrote nothing: {done.stderr[-600:]}")
    for figure in found["figures"]:
        bound = f"{'≥' if figure['at_least'] else '≤'} {figure['target']:g}"
        sheet.add(figure["name"], f"{figure['ratio']:.2f}", f"aim {bound}; {figure['detail']}")
    for name, value in found["facts"].items():
        sheet.add(name, value)
    if done.returncode:
        raise RuntimeError(f"gpu.py ended with {done.returncode}: {done.stderr[-300:]}")


def soak(sheet: Sheet, card: Card) -> None:
    from first_hour_steps import soak

    soak(sheet, card.device, 15 if card.tiny else 420)


def profile(sheet: Sheet, card: Card) -> None:
    from first_hour_steps import profiled

    profiled(sheet, card.device, card.tiny)


STEPS: dict[str, Callable[[Sheet, Card], None]] = {
    step.__name__: step for step in (versions, costs, graphs, tests, speed, contexts, soak, profile)
}


def run_step(name: str, card: Card) -> int:
    """One step in this process; its sheet says how it ended."""
    title = next(line for line in (__doc__ or "").splitlines() if line.startswith(f"{name} "))[len(name) :].strip()
    sheet = Sheet(card.out, name, f"{name}: {title}", card.tiny)
    sheet.write()
    try:
        STEPS[name](sheet, card)
    except Exception as error:  # a card of another make: the other steps still say something
        sheet.add("failed", f"{type(error).__name__}: {error}"[:1000])
        sheet.end("failed")
        return 1
    sheet.end(DONE)
    return 0


def run_all(names: Sequence[str], card: Card, again: bool) -> int:
    failed = 0
    for name in names:
        known = read_sheet(card.out / f"{name}.json")
        if not again and known is not None and known["status"] == DONE and known["tiny"] == card.tiny:
            print(f"{name}: done before, in {known['seconds']:g} s", flush=True)
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
    """Say of a step that was killed how it ended."""
    if (found := read_sheet(file)) is not None:
        file.write_text(json.dumps({**found, "status": status}, indent=1, ensure_ascii=False) + "\n", "utf-8")


def gather(out: Path) -> None:
    """All tables in one file, in the order of the steps."""
    files = [out / f"{name}.md" for name in STEPS]
    (out / "hour.md").write_text("\n".join(file.read_text("utf-8") for file in files if file.exists()), "utf-8")


def _step(command: Sequence[str]) -> int | None:
    """The status of a process that ends in time; if this one ends, nothing of that one keeps running."""
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
    """It and all that it started; Windows has no groups of processes."""
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
    """The repository need not be installed."""
    paths = (str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS), metavar="STEP")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU, to see that everything runs")
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


if __name__ == "__main__":
    sys.exit(main())
