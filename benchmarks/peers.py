"""Members compared with other engines: transformers' `generate`, vLLM, llama.cpp and Ray.

    python benchmarks/peers.py alone [--vllm URL] [--tokens 48] [--repeats 3] [--threads N] [--json FILE]
    python benchmarks/peers.py gguf FILE FILE… [--data FOLDER] [--rows 4] [--tokens 48] [--threads 1]
        [--cache-tokens N] [--json FILE]
    python benchmarks/peers.py server --server http://127.0.0.1:8000/v1 MODEL [--tokens 1000] [--candidates 2]
        [--prompts]
    python benchmarks/peers.py ray FOLDER FOLDER [--answers 6] [--tokens 120]

`alone`: one member of our engine compared with other decoders of its model: transformers' `generate`, and a vLLM
server. The model is SmolLM2-135M-Instruct in bf16 on the CPU, without an adapter, greedy, with answers of a fixed
length, one and eight at once. All decoders alternate in one run, so that other work on the machine affects all of them.
The engine has one member here, so it fuses nothing. If llama-cpp-python is installed, a member on llama.cpp is compared
with that library, both with the original file (Q4_1). The vLLM server must serve the same converted weights
(`--print-folder` prints their folder).

`gguf`: ensembles of GGUF files, with members on llama.cpp compared with the same files on transformers: each member
alone, then the first two, three and so on. They answer open questions (FOLDER/open.jsonl, or the questions of this
file) one after another, greedy, with a fixed length. Each engine runs in a separate process, and tokens a second are
per second of processor time, so that other work on the machine has little effect. Memory is the maximum growth of the
process after the import of its libraries, read after each answer. On llama.cpp, the time of fused answers is also
compared with the time of the members to decode their drafted tokens alone, without speculation. Files that do not fit
into memory on transformers are left out.

`server`: the cost of a member on a vLLM server, with each way of verification that a server offers. Each round drafts
five tokens, and verifies candidates of five tokens after a context that grows by a segment: at the token endpoint, by
cached prefixes (`logprob_token_ids`), and with --prompts by `prompt_logprobs`. The token endpoint returns the
log-probabilities of the draft with the draft, so it is also measured without that candidate. Then answers under a JSON
schema are drafted with as few requests as the server allows, and with one request a token. All ways alternate on one
server, which needs --enable-scale-out for all of them. If it has a key, put it into $SPECFUSE_SERVER_KEY.

`ray`: the cost of a round with all members on nodes of a Ray cluster, compared with the same members in this process.
It starts a cluster on this machine, with a node for each member. Answers alternate, so that other work affects both. It
needs a core for each member and one to coordinate: with fewer, the members share cores.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import torch
import typer
from figures import RESULTS, Figure, report
from vllm_peer import Peer

sys.path.insert(0, str(Path(__file__).parents[1]))

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    EnsembleResult,
    Grammar,
    MemberConfig,
    Message,
    PlacementError,
    SamplingParams,
    demo_members,
)
from specfuse_shared.config import Switch
from specfuse_shared.events import FinishEvent, SegmentEvent
from specfuse_shared.loading.planning import has_llama_cpp
from specfuse_shared.members.server.member import ServerMember
from specfuse_shared.members.server.session import ServerSession
from specfuse_shared.members.server.vllm import CompletionsEndpoint, Continuation, ScoredLine, ServerClient
from specfuse_shared.members.stages import Commit, Draft, Drafted, Op
from specfuse_shared.text.grammars.constraint import AnswerConstraint

if TYPE_CHECKING:
    from llama_peer import LlamaPeer

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True)

QUESTIONS = [f"Describe entry {n} of the observatory's log: its moon, its wind and its visitors." for n in range(8)]


class Peers:
    def __init__(self, folder: Path, file: Path, tokens: int, url: str | None) -> None:
        from transformers import AutoModelForCausalLM

        from tests.support.against_naive import local_members

        member = MemberConfig(str(folder), name="smollm2", dtype="bfloat16", device="cpu")
        self.engine = EnsembleEngine(EnsembleConfig([member], reuse_prefixes=False)).load()
        self.local, self.tokens = local_members(self.engine)[0], tokens
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.server = Peer(url) if url is not None else None
        self.llama: tuple[EnsembleEngine, LlamaPeer] | None = None
        if has_llama_cpp():
            from llama_peer import LlamaPeer

            quantised = MemberConfig(str(file), name="smollm2", backend="llama.cpp")
            on_llama = EnsembleEngine(EnsembleConfig([quantised], reuse_prefixes=False)).load()
            self.llama = on_llama, LlamaPeer(file, torch.get_num_threads())
        self.prompts = [self.local.encode_prompt([Message("user", question)]) for question in QUESTIONS]

    def ours(self, count: int, engine: EnsembleEngine | None = None) -> float:
        """Tokens a second of our engine."""
        params = SamplingParams(max_tokens=self.tokens, min_tokens=self.tokens, ignore_eos=True)
        start = time.perf_counter()
        results: list[Any] = (engine or self.engine).generate_batch(QUESTIONS[:count], params)
        return float(sum(r.usage.completion_tokens for r in results)) / (time.perf_counter() - start)

    @torch.inference_mode()
    def library(self, count: int) -> float:
        """Tokens a second of `generate` with a padded batch."""
        longest = max(map(len, self.prompts[:count]))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in self.prompts[:count]])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in self.prompts[:count]])
        start = time.perf_counter()
        length = {"max_new_tokens": self.tokens, "min_new_tokens": self.tokens}
        self.model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **length)
        return count * self.tokens / (time.perf_counter() - start)

    def run(self, repeats: int) -> list[Figure]:
        figures: list[Figure] = []
        kinds: dict[str, Callable[[int], float]] = {"engine": self.ours, "generate": self.library}
        if (server := self.server) is not None:
            kinds["vLLM"] = lambda n: server.speed(self.prompts[:n], self.tokens)
        pairs = [("engine", name) for name in list(kinds)[1:]]
        if self.llama is not None:
            engine, peer = self.llama
            kinds["engine on llama.cpp"] = lambda n: self.ours(n, engine)
            kinds["llama.cpp"] = lambda n: peer.speed(self.prompts[:n], self.tokens)
            pairs += [("engine on llama.cpp", "llama.cpp"), ("engine on llama.cpp", "engine")]
        for count in (1, len(QUESTIONS)):
            speeds: dict[str, list[float]] = {name: [] for name in kinds}
            for _ in range(repeats + 1):
                for name, speed in kinds.items():
                    speeds[name].append(speed(count))
            rates = {name: statistics.median(values[1:]) for name, values in speeds.items()}
            for ours, name in pairs:
                detail = f"{rates[ours]:.1f} ÷ {rates[name]:.1f} tokens/s"
                figures.append(Figure(f"{count} at once: {ours} ÷ {name}", rates[ours] / rates[name], 1, True, detail))
        return figures


@app.command()
def alone(
    vllm: Annotated[str | None, typer.Option(metavar="URL", help="a vLLM server with the same model")] = None,
    tokens: Annotated[int, typer.Option(help="tokens of an answer")] = 48,
    repeats: Annotated[int, typer.Option(help="runs of each measurement; the median counts")] = 3,
    print_folder: Annotated[bool, typer.Option("--print-folder", help="print the weights' folder and exit")] = False,
    out: Annotated[Path, typer.Option("--json", help="file of the figures")] = RESULTS / "peers.json",
    threads: Annotated[int | None, typer.Option(help="threads of this process; default: torch's")] = None,
) -> None:
    """One member ÷ `generate`, vLLM and llama.cpp."""
    from specfuse_shared.loading.gguf import converted

    if threads is not None:
        torch.set_num_threads(threads)
    [smollm2] = [member for member in demo_members() if "smollm2" in member.label]
    folder = converted(Path(smollm2.model), None, lambda stage: None)
    if print_folder:
        print(folder)
        return
    peers = Peers(folder, Path(smollm2.model), tokens, vllm)
    figures = peers.run(repeats)
    facts = [("vLLM", "not measured" if peers.server is None else f"{peers.server.version}, {peers.server.model}")]
    report("one member compared with other engines, SmolLM2-135M, bf16", figures, out, facts)
    peers.engine.close()


# ── ensembles of GGUF files ───────────────────────────────────────────────────────────────────────

OPEN_SUBJECTS = ("the tide", "honey", "a lighthouse", "iron")
OPEN_QUESTIONS = tuple(f"Say a few things about {subject}." for subject in OPEN_SUBJECTS)


@dataclass(frozen=True, slots=True)
class Task:
    """The work of one process."""

    files: tuple[str, ...]
    backend: str
    speculation: Switch
    questions: tuple[str, ...]
    tokens: int
    threads: int
    cache_tokens: int | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens of the reference member; drafted tokens of each member; processor seconds; seconds; processor seconds to
    the first words; MiB of memory."""

    tokens: int
    drafted: tuple[int, ...]
    busy: float
    seconds: float
    first: float
    memory: float

    @property
    def rate(self) -> float:
        """Tokens per second of processor time."""
        return self.tokens / self.busy


def members_of(task: Task) -> list[MemberConfig]:
    settings: dict[str, Any] = {"backend": task.backend, "device": "cpu"}
    if task.backend == "transformers":
        settings["dtype"] = "bfloat16"
    else:
        settings["cache_tokens"] = task.cache_tokens
    return [MemberConfig(file, **settings) for file in task.files]


def measure_fused(task: Task) -> Measured:
    """Measure in this process; an answer to warm up is not counted."""
    torch.set_num_threads(task.threads)
    process, params = psutil.Process(), SamplingParams(max_tokens=task.tokens, ignore_eos=True)
    before, highest = process.memory_info().rss, 0
    config = EnsembleConfig(
        members_of(task),
        speculation=task.speculation,
        reuse_prefixes=False,
        repetition_guard=False,
        cache_bytes=1 << 30,
    )
    with EnsembleEngine(config) as engine:
        engine.generate("What is a comet?", params)
        began, used, firsts, results = time.monotonic(), time.process_time(), list[float](), list[EnsembleResult]()
        for question in task.questions:
            started = time.process_time()
            for event in engine.stream(question, params):
                if isinstance(event, SegmentEvent) and len(firsts) == len(results):
                    firsts.append(time.process_time() - started)
                if isinstance(event, FinishEvent):
                    results.append(event.result)
            highest = max(highest, process.memory_info().rss)
        busy, seconds = time.process_time() - used, time.monotonic() - began
    drafted = [sum(r.usage.members[name].drafted for r in results) for name in config.names]
    tokens = sum(result.usage.completion_tokens for result in results)
    return Measured(tokens, tuple(drafted), busy, seconds, sum(firsts) / len(firsts), (highest - before) / 2**20)


def measure_apart(task: Task) -> Measured | None:
    """Measure in another process; None if the members do not fit into memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply(measure_fused, (task,))
        except PlacementError as error:
            print(error)
            return None


def compared(files: Sequence[str], here: Measured, there: Measured | None) -> list[Figure]:
    """Ratios of members on llama.cpp to members on transformers, unless the latter do not fit into memory."""
    if there is None:
        return []
    name = " + ".join(Path(file).stem[:20] for file in files)
    return [
        Figure(f"{name}: tokens a second", here.rate / there.rate, 2, True, f"{here.rate:.1f} ÷ {there.rate:.1f}"),
        Figure(
            f"{name}: seconds to the first words",
            here.first / there.first,
            1,
            False,
            f"{here.first:.2f} ÷ {there.first:.2f}",
        ),
        Figure(f"{name}: MiB", here.memory / there.memory, 0.4, False, f"{here.memory:.0f} ÷ {there.memory:.0f}"),
    ]


@app.command()
def gguf(
    named: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="GGUF files; ensembles are the first 2, 3, … of them")
    ],
    data: Annotated[Path | None, typer.Option(help="folder of open.jsonl")] = None,
    rows: Annotated[int, typer.Option(help="number of questions")] = len(OPEN_QUESTIONS),
    tokens: Annotated[int, typer.Option(help="tokens of an answer")] = 48,
    threads: Annotated[int, typer.Option(help="threads of each process")] = 1,
    cache_tokens: Annotated[int | None, typer.Option(help="`cache_tokens` of each member on llama.cpp")] = None,
    out: Annotated[Path, typer.Option("--json", help="file of the figures")] = RESULTS / "gguf_ensembles.json",
) -> None:
    """Ensembles of GGUF files on llama.cpp ÷ the same on transformers."""
    questions = OPEN_QUESTIONS[:rows]
    if data is not None:
        lines = (data / "open.jsonl").read_text("utf-8").splitlines()[:rows]
        questions = tuple(json.loads(line)["prompt"] for line in lines)
    ensembles = [named[:count] for count in range(2, len(named) + 1)]
    figures: list[Figure] = []
    plain: dict[str, Measured] = {}

    def run(files: Sequence[str], backend: str, speculation: Switch = "auto") -> Measured | None:
        measured = measure_apart(Task(tuple(files), backend, speculation, questions, tokens, threads, cache_tokens))
        print(backend, speculation, *(Path(file).stem for file in files), measured, flush=True)
        return measured

    def here(files: Sequence[str], speculation: Switch = "auto") -> Measured:
        measured = run(files, "llama.cpp", speculation)
        if measured is None:
            raise SystemExit("these members do not fit into memory on llama.cpp")
        return measured

    for file in named:
        plain[file] = here([file], "off")
        figures += compared([file], here([file]), run([file], "transformers"))
    for files in ensembles:
        fused = here(files)
        figures += compared(files, fused, run(files, "transformers"))
        alone = [drafted / plain[file].rate for file, drafted in zip(files, fused.drafted, strict=True)]
        detail = f"{fused.busy:.1f} s ÷ " + " + ".join(f"{seconds:.1f} s" for seconds in alone)
        name = f"{len(files)} members: fused ÷ members alone for the same tokens"
        figures.append(Figure(name, fused.busy / sum(alone), 0.75, False, detail))
    sizes = [(Path(file).stem, f"{Path(file).stat().st_size:,} bytes") for file in named]
    report("ensembles of GGUF files, llama.cpp ÷ transformers in bf16", figures, out, sizes)


# ── a vLLM server ─────────────────────────────────────────────────────────────────────────────────

KEY_ENV = "SPECFUSE_SERVER_KEY"
SEGMENT = 5
SCHEMA = {
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "purpose": {"type": "string", "maxLength": 80},
        "sails": {"type": "integer"},
        "old": {"type": "boolean"},
    },
    "required": ["name", "purpose", "sails", "old"],
}
FILLER = "The harbour master counts the boats, writes down their names and looks at the sea again. "
SUBJECTS = (
    "a ship",
    "a fishing boat",
    "a ferry",
    "a lighthouse tender",
    "a rowing boat",
    "a tug",
    "a barge",
    "a yacht",
)

Way = Callable[[list[ScoredLine]], Awaitable[Any]]


def ways_of(member: ServerMember, client: ServerClient, prompts: bool) -> dict[str, Way]:
    """The ways of verification at the server, by name."""
    text, model = CompletionsEndpoint(client), member.dialect.model
    ways: dict[str, Way] = {"prefixes": lambda lines: text.by_prefixes(model, lines)}
    if prompts:
        ways["prompt_logprobs"] = lambda lines: text.by_prompts(model, lines)
    if member.dialect.verification == "tokens":
        ways |= {"tokens": member.dialect.judged, "tokens, no draft": lambda lines: member.dialect.judged(lines[1:])}
    return ways


async def measure_server(
    member: ServerMember, ways: Mapping[str, Way], tokens: int, rounds: int, candidates: int
) -> dict[str, list[float]]:
    """Seconds of each round's draft, and of each way of verification."""
    codec, dialect = member.text.codec, member.dialect
    ids = tuple(codec.encode(FILLER * (tokens // 10))[:tokens])
    seconds: dict[str, list[float]] = {"draft": [], **{way: [] for way in ways}}
    for number in range(rounds):
        began = time.perf_counter()
        draft = (await dialect.continued(Continuation(ids, SEGMENT, SamplingParams(), 0, member.stop_ids))).ids
        seconds["draft"].append(time.perf_counter() - began)
        order = list(ways)
        for turn, way in enumerate(order[number % len(order) :] + order[: number % len(order)]):
            # new candidates each time: earlier ones are in the server's prefix cache
            starts = [(7 * number + 31 * turn + 101 * n) % (tokens - SEGMENT) for n in range(1, candidates)]
            further = [ScoredLine(ids, ids[start : start + SEGMENT], member.stop_ids) for start in starts]
            began = time.perf_counter()
            await ways[way]([ScoredLine(ids, tuple(draft)), *further])
            seconds[way].append(time.perf_counter() - began)
        ids += tuple(draft)
    return seconds


async def drafted(member: ServerMember, subject: str, context: int) -> tuple[float, int]:
    """Seconds of all drafts of an answer under the schema after `context` tokens, and the number of drafted tokens."""
    params = SamplingParams(max_tokens=120, grammar=Grammar.json_schema(SCHEMA))
    question = f"{FILLER * (context // 20)}Describe {subject} in that harbour, as JSON."
    prompt = member.text.encode_prompt([Message("user", question)])
    session = member.open(prompt, params, seed=0)
    constraint = AnswerConstraint(Grammar.json_schema(SCHEMA), member.text.codec, params.max_tokens)
    await session.prefill()
    seconds, tokens, over, number = 0.0, 0, False, 0
    while not over:
        text = constraint.forced()
        if not text:
            began = time.perf_counter()
            draft = await stage_of(session, Draft(SEGMENT, number))
            seconds += time.perf_counter() - began
            assert isinstance(draft, Drafted)
            tokens += draft.tokens
            admitted = constraint.admit(draft.text, draft.ends)
            text, over = admitted.text, admitted.ends or admitted.reason is not None
        over = over or constraint.accepts(text)
        constraint.commit(text)
        await stage_of(session, Commit(text))
        number += 1
    return seconds, tokens


async def stage_of(session: ServerSession, op: Op) -> Any:
    return await session.stage(op)


async def under_a_schema(member: ServerMember, context: int, answers: int, sent: list[int]) -> dict[str, list[float]]:
    """Milliseconds and requests for a drafted token, an entry an answer, with grammars at the server and without."""
    rows: dict[str, list[float]] = {"few": [], "few, requests": [], "each": [], "each, requests": []}
    for number, subject in enumerate(SUBJECTS[:answers]):
        for way in ("few", "each") if number % 2 else ("each", "few"):
            member.dialect.takes_grammars, before = way == "few", sent[0]
            seconds, tokens = await drafted(member, subject, context)
            rows[way].append(1e3 * seconds / tokens)
            rows[f"{way}, requests"].append((sent[0] - before) / tokens)
    return rows


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of `server`; with `prompts`, verification by `prompt_logprobs` is measured, too."""

    model: str
    server: str
    tokens: int
    rounds: int
    candidates: int
    prompts: bool
    answers: int


async def run_server(options: ServerOptions) -> None:
    key = KEY_ENV if os.environ.get(KEY_ENV) else None
    config = MemberConfig(options.model, server=options.server, api_key_env=key, server_timeout=600.0)
    member, sent = ServerMember(config), [0]

    def count(member: str, answers: int, seconds: float, steps: int = 1) -> None:
        sent[0] += 1

    await member.connect(count)
    client = ServerClient(str(config.server), config.server_timeout, os.environ.get(KEY_ENV))
    ways = ways_of(member, client, options.prompts)
    seconds = await measure_server(member, ways, options.tokens, options.rounds, options.candidates)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:<18} {1e3 * value:8.1f} ms (median of {options.rounds - 1} rounds)")
    for name in list(medians)[1:]:
        times, whole = (
            medians["prefixes"] / medians[name],
            (medians["draft"] + medians["prefixes"]) / (medians["draft"] + medians[name]),
        )
        print(f"{name:<18} {times:8.2f} × the speed of prefixes; a whole round {whole:.2f} ×")
    if member.dialect.takes_grammars:
        results = await under_a_schema(member, options.tokens, options.answers, sent)
        rows = {name: statistics.median(values) for name, values in results.items()}
        for way in ("few", "each"):
            print(f"schema, {way:<10} {rows[way]:8.1f} ms and {rows[f'{way}, requests']:.2f} requests a token")
        print(f"schema             {rows['each'] / rows['few']:8.2f} × cheaper")
    await client.close()
    await member.close()


@app.command()
def server(
    model: Annotated[str, typer.Argument(help="hub id or folder of the tokenizer, and the server's name of the model")],
    address: Annotated[str, typer.Option("--server", metavar="URL", help="address of the vLLM server")],
    tokens: Annotated[int, typer.Option(help="tokens of the context")] = 1000,
    rounds: Annotated[int, typer.Option(help="rounds; the first one is not counted")] = 10,
    candidates: Annotated[int, typer.Option(help="candidates of a round")] = 2,
    prompts: Annotated[bool, typer.Option("--prompts", help="also verify by prompt_logprobs, which is slow")] = False,
    answers: Annotated[int, typer.Option(help="answers under a schema, for each way; at most 8")] = 6,
) -> None:
    """A member on a vLLM server, with each way of verification, and under a schema."""
    asyncio.run(run_server(ServerOptions(model, address, tokens, rounds, candidates, prompts, answers)))


# ── Ray ───────────────────────────────────────────────────────────────────────────────────────────


def round_seconds(engine: EnsembleEngine, number: int, tokens: int) -> list[float]:
    """Seconds of each round of an answer."""
    result = engine.generate(f"Say much {number}.", SamplingParams(max_tokens=tokens, ignore_eos=True))
    return [r.timing.total for r in result.rounds]


@app.command("ray")
def on_ray(
    folders: Annotated[list[str], typer.Argument(metavar="FOLDER…", help="folders of the members")],
    answers: Annotated[int, typer.Option(help="answers in each runtime")] = 6,
    tokens: Annotated[int, typer.Option(help="tokens of an answer")] = 120,
) -> None:
    """Rounds with members on Ray, compared with rounds in one process."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in folders:
        cluster.add_node(num_cpus=1)
    here = EnsembleConfig([MemberConfig(folder) for folder in folders], exit="never")
    there = replace(here, runtime="ray", ray_address=cluster.address)
    times: list[list[float]] = [[], []]
    with EnsembleEngine(here) as local, EnsembleEngine(there) as distant:
        for number in range(answers):
            for seconds, engine in zip(times, (local, distant), strict=True):
                seconds += round_seconds(engine, number, tokens)
    ray.shutdown()
    cluster.shutdown()
    for name, seconds in zip(("in this process", "on Ray"), times, strict=True):
        print(f"{name:<16} {1e3 * statistics.median(seconds):8.1f} ms a round (median of {len(seconds)})")


if __name__ == "__main__":
    app()
