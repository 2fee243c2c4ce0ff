"""Batches: bounded threads, a run for each input, and concurrent inputs in the engine."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleEngine
from specfuse_shared.errors import PromptTooLongError
from tests.support.marks import weekly
from tests.support.serving import line_of
from tests.support.tiny import byte_level_tokenizer, save_model

QUESTIONS = [f"What is {number}?" for number in range(12)]
LONG = "Write about the sea. " * 400
Batch = Callable[..., list[Any]]


class Runs(BaseCallbackHandler):
    """Keeps the runs, and the highest number of concurrent ones."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.ended: list[Any] = []
        self.open = self.most = 0
        self._lock = threading.Lock()

    def on_chat_model_start(self, *args: Any, run_id: Any, **kwargs: Any) -> None:
        with self._lock:
            self.started.append(run_id)
            self.open += 1
            self.most = max(self.most, self.open)

    def on_llm_end(self, *args: Any, run_id: Any, **kwargs: Any) -> None:
        with self._lock:
            self.ended.append(run_id)
            self.open -= 1

    def on_llm_error(self, *args: Any, run_id: Any, **kwargs: Any) -> None:
        self.on_llm_end(run_id=run_id)


def batch(model: ChatSpecFuse, *args: Any, **options: Any) -> list[Any]:
    return model.batch(*args, **options)


def as_completed(model: ChatSpecFuse, *args: Any, **options: Any) -> list[Any]:
    return [answer for _, answer in sorted(model.batch_as_completed(*args, **options), key=lambda pair: pair[0])]


@pytest.mark.parametrize("way", [batch, as_completed])
def test_each_input_is_a_separate_run_and_they_fill_the_engine(chat: ChatSpecFuse, way: Batch) -> None:
    runs, before = Runs(), threading.active_count()
    with watched_threads() as counts:
        answers = way(chat, QUESTIONS, {"callbacks": [runs]}, max_tokens=4)
    assert [a.text for a in answers] == [chat.invoke(q, max_tokens=4).text for q in QUESTIONS]
    assert len(set(runs.started)) == len(QUESTIONS) == len(runs.ended)
    limit = chat._ensemble().max_concurrent
    assert 1 < runs.most <= limit
    assert max(counts) - before <= limit + 2, "a thread for each answer that runs, and one that an interrupt may leave"


@pytest.mark.parametrize("way", [batch, as_completed])
def test_max_concurrency_may_allow_fewer(chat: ChatSpecFuse, way: Batch) -> None:
    runs = Runs()
    way(chat, QUESTIONS[:6], {"callbacks": [runs], "max_concurrency": 2}, max_tokens=4)
    assert runs.most <= 2


def test_a_given_run_id_applies_to_the_first_input_only(chat: ChatSpecFuse) -> None:
    runs, run_id = Runs(), uuid4()
    with pytest.warns(RuntimeWarning, match="first element"):
        chat.batch(QUESTIONS[:4], {"callbacks": [runs], "run_id": run_id}, max_tokens=2)
    assert runs.started.count(run_id) == 1
    assert len(set(runs.started)) == 4


@pytest.mark.parametrize("way", [batch, as_completed])
def test_exceptions_stay_with_their_input(chat: ChatSpecFuse, way: Batch) -> None:
    first, failed, last = way(chat, ["One?", LONG, "Two?"], return_exceptions=True, max_tokens=4)
    assert isinstance(failed, PromptTooLongError)
    assert isinstance(first, AIMessage)
    assert isinstance(last, AIMessage)
    with pytest.raises(PromptTooLongError):
        way(chat, ["One?", LONG], max_tokens=4)


def test_an_unknown_name_fails_each_input(chat: ChatSpecFuse) -> None:
    failed = chat.batch(["One?", "Two?"], return_exceptions=True, model="unknown")
    assert [type(error).__name__ for error in failed] == ["UnknownModelError"] * 2


def test_configurations_may_differ_by_input(chat: ChatSpecFuse) -> None:
    one, two = Runs(), Runs()
    chat.batch(QUESTIONS[:2], [{"callbacks": [one]}, {"callbacks": [two]}], max_tokens=2)
    assert len(one.started) == len(two.started) == 1
    assert one.started != two.started
    assert chat.batch([]) == list(chat.batch_as_completed([])) == []


async def test_an_asynchronous_batch_is_bounded_too(chat: ChatSpecFuse) -> None:
    runs = Runs()
    answers = await chat.abatch(QUESTIONS, {"callbacks": [runs]}, max_tokens=4)
    assert [a.text for a in answers] == [a.text for a in chat.batch(QUESTIONS, max_tokens=4)]
    assert len(set(runs.started)) == len(QUESTIONS)
    assert 1 < runs.most <= chat._ensemble().max_concurrent
    reported = [pair async for pair in chat.abatch_as_completed(QUESTIONS[:5], max_tokens=4)]
    assert {index: answer.text for index, answer in reported} == {i: answers[i].text for i in range(5)}


async def test_asynchronous_exceptions_stay_with_their_input(chat: ChatSpecFuse) -> None:
    first, failed = await chat.abatch(["One?", LONG], return_exceptions=True, max_tokens=4)
    assert isinstance(failed, PromptTooLongError)
    assert isinstance(first, AIMessage)


def test_an_engine_without_a_queue_accepts_a_batch(tiny: EnsembleEngine) -> None:
    config = type(tiny.config)(tiny.config.members, max_concurrent=2, max_queue=2, when_busy="raise")
    with EnsembleEngine(config) as engine:
        assert len(ChatSpecFuse(engine=engine, max_tokens=2).batch(QUESTIONS)) == len(QUESTIONS)


class watched_threads:
    """Samples the number of threads while a block runs."""

    def __enter__(self) -> list[int]:
        self._counts, self._over = [threading.active_count()], threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self._counts

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self._counts.append(threading.active_count() - 1)

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watcher.join()


PROGRAM = """
import signal
import sys
from langchain_specfuse import ChatSpecFuse

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has jobs in the background ignore it
model = ChatSpecFuse(members=sys.argv[2:], max_tokens=400, seed=1)
model.load()
questions = [f"Write a story of {n} foxes." for n in range(400)]
print("go", flush=True)
if sys.argv[1] == "batch":
    model.batch(questions)
else:
    list(model.batch_as_completed(questions))
"""


@pytest.mark.parametrize("way", ["batch", *weekly("batch_as_completed")])
def test_an_interrupt_stops_the_answers_of_a_batch(tmp_path: Path, way: str) -> None:
    folders = [save_model("llama", byte_level_tokenizer(), tmp_path / name, seed) for seed, name in enumerate("ab")]
    command = [sys.executable, "-c", PROGRAM, way, *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line_of(process, process.stdout, "^go$")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, reported = process.communicate(timeout=60)
    assert process.returncode != 0
    assert reported.rstrip().endswith("KeyboardInterrupt")


def test_closing_a_batch_stops_its_answers(tiny: EnsembleEngine) -> None:
    answers = ChatSpecFuse(engine=tiny, max_tokens=400).batch_as_completed(["Why?", "How?", "Who?"])
    next(iter(answers))
    answers.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 20
    while tiny.metrics().running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert tiny.metrics().running == 0
