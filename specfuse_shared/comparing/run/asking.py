"""The answers of all systems: each member alone, the ensemble, and the ensemble without each, in batches.

A few questions are asked one at a time first, with only the asked members loaded, so that seconds are comparable.
Their answers count like all others. Answers in the run's file are not asked again.

Requests to one engine have a maximum in flight, so neither memory nor the queue grows with the number of questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from specfuse_shared.comparing.questions import Question
from specfuse_shared.comparing.run.run_file import Answer, RunFile, answer_key, key_of
from specfuse_shared.config import EnsembleConfig, SamplingParams
from specfuse_shared.errors import EngineClosedError, SpecFuseError

if TYPE_CHECKING:
    from specfuse_shared.serving.engine import EnsembleEngine

T = TypeVar("T")
R = TypeVar("R")
_MOST_THREADS = 64


def asked_together(engine: EnsembleEngine, todo: Iterator[T], ask: Callable[[T], R]) -> Iterator[tuple[T, Future[R]]]:
    """Each item with its outcome, in order of completion. The engine is closed at the end in every case."""
    threads = min(engine.config.max_concurrent, _MOST_THREADS)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="specfuse-comparing")
    running: dict[Future[R], T] = {}
    try:
        while True:
            while len(running) < 2 * threads and (following := next(todo, None)) is not None:
                running[pool.submit(ask, following)] = following
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done
    finally:
        engine.close()  # ends running answers, so that the pool's threads end at once
        pool.shutdown(wait=True, cancel_futures=True)


ENSEMBLE = "the ensemble"
HALF = ("bfloat16", "float16")
MakeEngine = Callable[[EnsembleConfig], "EnsembleEngine"]


@dataclass(frozen=True, slots=True)
class Asker:
    """A member alone, the whole ensemble, or the ensemble without a member. `config`: with these members only.

    `is_sampled`: the answers were chosen among several samples of a member (`specfuse_shared.comparing.EqualCompute`).
    """

    name: str
    config: EnsembleConfig
    without: str | None = None
    is_sampled: bool = False

    @property
    def is_member(self) -> bool:
        """Whether it is a single member, asked once."""
        return len(self.config.names) == 1 and not self.is_sampled


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a comparison: `done` answers of `total`, earlier runs included. `stage`: the current step."""

    stage: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def systems_of(config: EnsembleConfig, leave_one_out: bool = False) -> list[Asker]:
    """Each member, the ensemble and, with `leave_one_out` and more than two members, the ensemble without each."""
    names = config.names
    askers = [*(Asker(name, config.only([name])) for name in names), Asker(ENSEMBLE, config)]
    if leave_one_out and len(names) > 2:
        remaining = {name: [each for each in names if each != name] for name in names}
        askers += [Asker(f"without {name}", config.only(names_left), name) for name, names_left in remaining.items()]
    return askers


def new_engine(config: EnsembleConfig) -> EnsembleEngine:
    from specfuse_shared.serving.engine import EnsembleEngine

    return EnsembleEngine(config)


def size_of(run: RunFile, member: EnsembleConfig, what: str) -> int:
    """A member's "memory_bytes" or "parameters", from its engine; 0 if unknown."""
    return int((run.get(key_of(member, "member")) or {}).get(what, 0))


def _is_part(config: EnsembleConfig, whole: EnsembleConfig) -> bool:
    """Whether an engine over `whole` gives the answers of `config`."""
    return set(config.names) <= set(whole.names) and config == whole.only(config.names)


class EvalRun:
    """One run: systems and questions, stored answers, and failures.

    `timed`: the number of questions that are asked one at a time. `failures`: (system, question id) → reason.
    """

    def __init__(
        self,
        askers: Sequence[Asker],
        questions: Sequence[Question],
        run: RunFile,
        *,
        max_tokens: int | None = None,
        timed: int = 3,
        make_engine: MakeEngine | None = None,
        on_progress: OnProgress = lambda progress: None,
    ) -> None:
        self.askers = tuple(askers)
        self.questions = tuple(questions)
        self.run = run
        self._max_tokens = max_tokens
        self._make_engine = make_engine
        self._on_progress = on_progress
        self._timed = self.questions[:: max(1, len(self.questions) // max(1, timed))][:timed]
        self._keys = {(a.name, q.id): answer_key(a.config, q, max_tokens) for a in self.askers for q in self.questions}
        self._wanted = set(self._keys.values())
        self._done = sum(key in run for key in self._wanted)
        self.failures: dict[tuple[str, str], str] = {}

    def ask_all(self) -> None:
        """Ask all missing answers. Raises `EngineClosedError` if an engine fails; earlier answers are kept."""
        self._report("answers that are there")
        for asker in self.askers:
            if asker.is_member and any(self._is_open(asker, question) for question in self._timed):
                with self._loaded(asker.config) as engine:
                    self._ask_alone(engine, asker)
        for config, askers in self._engines():
            with self._loaded(config) as engine:
                for asker in askers:
                    if asker.config == config:
                        self._ask_alone(engine, asker)
                self._ask_together(engine, askers)

    def answers(self) -> dict[str, dict[str, Answer]]:
        """Asker → question id → answer, of those that there are."""
        by_asker: dict[str, dict[str, Answer]] = {asker.name: {} for asker in self.askers}
        for (asker, question), key in self._keys.items():
            if (answer := self.run.answer(key)) is not None:
                by_asker[asker][question] = answer
        return by_asker

    def in_half(self) -> tuple[str, ...]:
        """Members that compute in half precision: their answers may depend on concurrent work."""
        records = {a.name: self.run.get(key_of(a.config, "member")) or {} for a in self.askers if a.is_member}
        return tuple(name for name, record in records.items() if record.get("dtype") in HALF)

    def weight_bytes(self, asker: Asker) -> int:
        """Bytes of its members' weights; 0 if one is unknown."""
        sizes = [self._member_bytes(asker.config.only([name])) for name in asker.config.names]
        return sum(sizes) if all(sizes) else 0

    # ── one at a time ────────────────────────────────────────────────────────────────────────────

    def _ask_alone(self, engine: EnsembleEngine, asker: Asker) -> None:
        todo = [question for question in self._timed if self._is_open(asker, question)]
        if todo:
            with suppress(SpecFuseError):  # the first call includes one-time costs
                engine.generate("Hello", SamplingParams(max_tokens=1))
        for question in todo:
            self._keep(asker, question, partial(self._generate, engine, asker, question), alone=True)
            self._report(f"{asker.name}, one at a time")

    # ── many at once ─────────────────────────────────────────────────────────────────────────────

    def _engines(self) -> Iterator[tuple[EnsembleConfig, list[Asker]]]:
        """The systems that one engine can answer for: members of the same ensemble."""
        pending = [a for a in self.askers if any(self._is_open(a, q) for q in self.questions)]
        for whole in sorted(self.askers, key=lambda a: -len(a.config.names)):
            served = [a for a in pending if _is_part(a.config, whole.config)]
            pending = [a for a in pending if a not in served]
            if served:
                names = {name for asker in served for name in asker.config.names}
                yield whole.config.only([n for n in whole.config.names if n in names]), served

    def _ask_together(self, engine: EnsembleEngine, askers: Sequence[Asker]) -> None:
        self._report("many at a time")
        for (asker, question), done in asked_together(
            engine, self._open(askers), lambda pair: self._generate(engine, *pair)
        ):
            self._keep(asker, question, done.result)
            self._report("many at a time")

    def _open(self, askers: Sequence[Asker]) -> Iterator[tuple[Asker, Question]]:
        """The unanswered pairs, ordered by question, so that answers share its prompt."""
        begun: set[str] = set()
        for question in self.questions:
            for asker in askers:
                key = self._keys[asker.name, question.id]
                if key not in begun and self._is_open(asker, question):
                    begun.add(key)
                    yield asker, question

    # ── common ───────────────────────────────────────────────────────────────────────────────────

    def _generate(self, engine: EnsembleEngine, asker: Asker, question: Question) -> Answer:
        params = question.params(self._max_tokens)
        return Answer.of(engine.generate(question.prompt, params, members=list(asker.config.names)))

    def _keep(self, asker: Asker, question: Question, answer: Callable[[], Answer], *, alone: bool = False) -> None:
        """Store an answer at once. A failure is recorded, and the next run asks again."""
        try:
            result = replace(answer(), alone=alone)
        except EngineClosedError:
            raise
        except SpecFuseError as error:
            self.failures[asker.name, question.id] = str(error)
            return
        self.run.add_answer(self._keys[asker.name, question.id], result, asker.name, question.id)
        self._done += 1

    @contextmanager
    def _loaded(self, config: EnsembleConfig) -> Iterator[EnsembleEngine]:
        """An engine. The sizes of its members are stored, so that a run that only reads answers knows them."""
        self._report(f"loading {', '.join(config.names)}")
        with (self._make_engine or new_engine)(config) as engine:
            for report in engine.load().describe():
                key = key_of(config.only([report.name]), "member")
                if key not in self.run:
                    facts = {name: getattr(report, name) for name in ("dtype", "memory_bytes", "parameters")}
                    self.run.add(key, {"member": report.name, **facts})
            yield engine

    def sizes(self) -> dict[str, int]:
        """Member → parameters; 0 if unknown."""
        configs = {name: asker.config.only([name]) for asker in self.askers for name in asker.config.names}
        return {name: size_of(self.run, config, "parameters") for name, config in configs.items()}

    def _member_bytes(self, config: EnsembleConfig) -> int:
        return size_of(self.run, config, "memory_bytes")

    def _is_open(self, asker: Asker, question: Question) -> bool:
        place = asker.name, question.id
        return self._keys[place] not in self.run and place not in self.failures

    def _report(self, stage: str) -> None:
        self._on_progress(Progress(stage, self._done, len(self._wanted)))
