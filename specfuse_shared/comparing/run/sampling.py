"""Samples of members alone: several answers to a question, each with its own seed, kept in the run's file.

A resumed run asks only for missing samples and reproduces them. The module also measures the seconds for a number of
samples asked together, which is the fastest way to get them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from specfuse_shared.comparing.questions import Question
from specfuse_shared.comparing.run.asking import MakeEngine, OnProgress, Progress, asked_together, new_engine
from specfuse_shared.comparing.run.run_file import Answer, RunFile, sample_key, together_key
from specfuse_shared.config import EnsembleConfig, SamplingParams
from specfuse_shared.errors import EngineClosedError, SpecFuseError
from specfuse_shared.validation import check

if TYPE_CHECKING:
    from specfuse_shared.serving.engine import EnsembleEngine

TEMPERATURE = 0.7
"""The temperature of most published self-consistency results (arXiv 2203.11171)."""
MOST_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class Wanted:
    """Samples 1 to `count` of a member. `member`: the configuration with this member alone."""

    member: EnsembleConfig
    question: Question
    count: int


@dataclass(frozen=True, slots=True)
class Timed:
    """A question with timed samples of a member: `count` of them, and 2, 4, 8 … until they take `seconds`."""

    member: EnsembleConfig
    question: Question
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """The `temperature` of samples, and their maximum number (`most`). Raises `ConfigError`."""

    temperature: float = TEMPERATURE
    most: int = MOST_SAMPLES

    def __post_init__(self) -> None:
        greedy = SamplingParams(temperature=self.temperature).greedy
        check(not greedy, f"samples need a temperature above 0, not {self.temperature!r}: at 0 they are all the same")
        check(self.most >= 1, f"the maximum number of samples must be at least 1, not {self.most!r}")


class Sampler:
    """Draws samples of members. `failures`: member → the reason for missing samples."""

    def __init__(
        self,
        run: RunFile,
        sampling: Sampling,
        *,
        max_tokens: int | None = None,
        make_engine: MakeEngine | None = None,
        on_progress: OnProgress = lambda progress: None,
    ) -> None:
        self.run = run
        self.sampling = sampling
        self.failures: dict[str, str] = {}
        self._max_tokens = max_tokens
        self._make_engine = make_engine or new_engine
        self._on_progress = on_progress
        self._done = self._total = 0

    def samples(self, job: Wanted) -> list[Answer]:
        """The stored samples, in the order of their seeds."""
        stored = (self.run.answer(self._key(job, seed)) for seed in range(1, job.count + 1))
        return [answer for answer in stored if answer is not None]

    def ask(self, everything: Sequence[Wanted]) -> None:
        """Ask for missing samples, one member after another, all samples of a question at the same time."""
        self._total = sum(job.count for job in everything)
        self._done = self._total - sum(1 for _ in self._missing(everything))
        self._report("samples of the best member")
        for member in _members(everything):
            of_member = [job for job in everything if job.member == member]
            if next(self._missing(of_member), None) is None:
                continue
            with self._loaded(member) as engine:
                for (each, seed), outcome in asked_together(
                    engine, self._missing(of_member), lambda pair: self._generate(engine, *pair, logprobs=True)
                ):
                    self._keep(each, seed, outcome.result)
                    self._done += 1
                    self._report("samples of the best member")

    def time(self, rows: Sequence[Timed]) -> None:
        """Measure the seconds of samples without concurrent work, unless the run's file has them."""
        for member in _members(rows):
            of_member = [row for row in rows if row.member == member]
            if all(self._unmeasured(row) is None for row in of_member):
                continue
            with self._loaded(member) as engine:
                for row in of_member:
                    while (job := self._unmeasured(row)) is not None and self._time(engine, job):
                        pass

    def times(self, row: Timed) -> dict[int, float]:
        """Number of samples of the row → their seconds, if measured."""
        counts = sorted({row.count, *self._doublings()})
        measured = {count: self.seconds(Wanted(row.member, row.question, count)) for count in counts}
        return {count: seconds for count, seconds in measured.items() if seconds is not None}

    def _doublings(self) -> list[int]:
        return [1 << n for n in range(1, self.sampling.most.bit_length()) if 1 << n <= self.sampling.most]

    def _unmeasured(self, row: Timed) -> Wanted | None:
        """The next number of samples to measure, or None."""
        exact = Wanted(row.member, row.question, row.count)
        if row.count > 1 and self.seconds(exact) is None:
            return exact
        for count in self._doublings():
            job = Wanted(row.member, row.question, count)
            measured = self.seconds(job)
            if measured is None:
                return job
            if measured > row.seconds:
                return None
        return None

    def seconds(self, job: Wanted) -> float | None:
        """The seconds of the concurrent samples; None if they were not measured."""
        stored = self.run.get(self._together(job))
        return None if stored is None else float(stored["seconds"])

    def _time(self, engine: EnsembleEngine, job: Wanted) -> bool:
        """Measure the seconds of the samples. Returns False if one fails."""
        self._report(f"{job.member.names[0]}, {job.count} samples together")
        with ThreadPoolExecutor(job.count, thread_name_prefix="specfuse-sampling") as pool:

            def ask_all(generate: Callable[[int], object]) -> float:
                started = time.monotonic()
                for future in [pool.submit(generate, seed) for seed in range(1, job.count + 1)]:
                    future.result()
                return time.monotonic() - started

            try:
                with suppress(SpecFuseError):  # the first batch of a size includes one-time costs
                    ask_all(lambda seed: engine.generate("Hello", SamplingParams(max_tokens=2)))
                seconds = ask_all(lambda seed: self._generate(engine, job, seed))
            except EngineClosedError:
                raise
            except SpecFuseError as error:
                self.failures.setdefault(job.member.names[0], str(error))
                return False
        record = {"member": job.member.names[0], "together": job.count, "seconds": seconds}
        self.run.add(self._together(job), record)
        return True

    def _generate(self, engine: EnsembleEngine, job: Wanted, seed: int, logprobs: bool = False) -> Answer:
        greedy = job.question.params(self._max_tokens)
        params = replace(greedy, temperature=self.sampling.temperature, seed=seed, logprobs=logprobs)
        return Answer.of(engine.generate(job.question.prompt, params, members=list(job.member.names)))

    def _keep(self, job: Wanted, seed: int, answer: Callable[[], Answer]) -> None:
        try:
            result = answer()
        except EngineClosedError:
            raise
        except SpecFuseError as error:
            self.failures.setdefault(job.member.names[0], str(error))
            return
        record = {"sample_of": job.member.names[0], "to": job.question.id, "seed": seed}
        self.run.add(self._key(job, seed), {**record, **asdict(result)})

    def _missing(self, everything: Sequence[Wanted]) -> Iterator[tuple[Wanted, int]]:
        for job in everything:
            for seed in range(1, job.count + 1):
                if self._key(job, seed) not in self.run:
                    yield job, seed

    @contextmanager
    def _loaded(self, member: EnsembleConfig) -> Iterator[EnsembleEngine]:
        """An engine without prefix reuse, because a cached prompt would make a batch seem faster."""
        self._report(f"loading {member.names[0]}")
        with self._make_engine(replace(member, reuse_prefixes=False)) as engine:
            engine.load()
            yield engine

    def _report(self, stage: str) -> None:
        self._on_progress(Progress(stage, self._done, self._total))

    def _key(self, job: Wanted, seed: int) -> str:
        return sample_key(job.member, job.question, self._max_tokens, self.sampling.temperature, seed)

    def _together(self, job: Wanted) -> str:
        return together_key(job.member, job.question, self._max_tokens, self.sampling.temperature, job.count)


def _members(jobs: Sequence[Wanted | Timed]) -> list[EnsembleConfig]:
    configs: list[EnsembleConfig] = []
    for each in jobs:
        if each.member not in configs:
            configs.append(each.member)
    return configs
