"""The file of a run: JSON lines, one answer each. Stored answers are not asked again; a killed run loses nothing.

A line is appended in one write; a partial line of a killed run is cut off. The key of an answer contains the system,
its settings and the question, so changed members, settings or questions give other answers.
"""

from __future__ import annotations

import codecs
import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from filelock import FileLock, Timeout

from specfuse_shared.comparing.questions import Question
from specfuse_shared.config import EnsembleConfig
from specfuse_shared.errors import ConfigError, SpecFuseError
from specfuse_shared.events import EnsembleResult
from specfuse_shared.loading.config_files import plain_config

_BINARY = getattr(os, "O_BINARY", 0)
"""Windows would write other line ends."""
MARK = {"specfuse": "compare", "version": 1}
_WITHOUT_EFFECT = ("max_concurrent", "max_queue", "when_busy", "cache_bytes", "reuse_prefixes", "cache_dir")
"""Settings that change the time of an answer, not its text."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in a comparison. `pieces`: (author, text) of each segment. `forwards`: number of forward passes of all
    members. `alone`: no concurrent work, so its seconds are comparable. `work`: (member, tokens of its prompt,
    tokens that went through it after the prompt). `logprob`: mean log p of a token, for samples only. `agreement`: the
    share of the text on which members agree, and the lowest share of a word; None if unknown. `differences`: (start,
    end, kind, share) of words that not all members would have written."""

    text: str
    finish: str
    tokens: int
    rounds: int
    active: float
    forwards: int
    pieces: tuple[tuple[str, str], ...] = ()
    faults: tuple[str, ...] = ()
    alone: bool = False
    seconds: float = 0.0
    first_seconds: float = 0.0
    work: tuple[tuple[str, int, int], ...] = ()
    logprob: float | None = None
    agreement: tuple[float, float] | None = None
    differences: tuple[tuple[int, int, str, float], ...] = ()

    @classmethod
    def of(cls, result: EnsembleResult) -> Self:
        """The answer of an engine, reduced to the facts that a comparison needs.

        Args:
            result: The engine's result.

        Returns:
            The answer, without seconds.

        Example:
            ```python
            from specfuse_shared import SamplingParams
            from specfuse_shared.comparing import Answer

            print(Answer.of(engine.generate("Why is the sky blue?", SamplingParams(max_tokens=8))).text)
            ```
        """
        rounds, agreement = result.rounds, result.agreement
        lowest = min((place.share for place in agreement.places), default=1.0) if agreement else 1.0
        return cls(
            text=result.text,
            finish=str(result.finish_reason),
            tokens=result.usage.completion_tokens,
            rounds=len(rounds),
            active=sum(len(r.active) for r in rounds) / len(rounds) if rounds else 0.0,
            forwards=sum(usage.forwards for usage in result.usage.members.values()),
            pieces=tuple((r.winner, result.text[r.start : r.end]) for r in rounds) if len(result.members) > 1 else (),
            faults=tuple(fault.member for fault in result.warnings),
            seconds=result.total_seconds,
            first_seconds=result.first_segment_seconds or result.total_seconds,
            work=tuple((name, usage.prompt, usage.fed) for name, usage in result.usage.members.items()),
            logprob=fmean(token.logprob for token in result.logprobs) if result.logprobs else None,
            agreement=(agreement.share, lowest) if agreement else None,
            differences=tuple((each.start, each.end, each.kind, each.share) for each in result.differences),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """An answer of a run's file.

        Args:
            data: The fields as plain JSON. Missing ones have their defaults.

        Returns:
            The answer.

        Example:
            ```python
            from specfuse_shared.comparing import Answer

            row = {"text": "Paris", "finish": "stop", "tokens": 1, "rounds": 1, "active": 2.0, "forwards": 3}
            print(Answer.from_dict(row).text)
            ```
        """
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        pieces = tuple((str(who), str(what)) for who, what in values.get("pieces", ()))
        work = tuple((str(who), int(prompt), int(fed)) for who, prompt, fed in values.get("work", ()))
        agreement, differences = values.get("agreement"), values.get("differences", ())
        return cls(
            **{
                **values,
                "pieces": pieces,
                "work": work,
                "faults": tuple(values.get("faults", ())),
                "agreement": None if agreement is None else (float(agreement[0]), float(agreement[1])),
                "differences": tuple((int(a), int(b), str(c), float(d)) for a, b, c, d in differences),
            }
        )


def key_of(config: EnsembleConfig, question: Any) -> str:
    """The key of an answer: the system and the question (plain JSON)."""
    settings = {k: v for k, v in plain_config(config, changed=False).items() if k not in _WITHOUT_EFFECT}
    if len(config.names) == 1:  # settings of rounds have no effect on a single member
        settings = {"members": [{k: v for k, v in settings["members"][0].items() if k != "weight"}]}
    text = json.dumps([settings, question], sort_keys=True, ensure_ascii=False)
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def answer_key(config: EnsembleConfig, question: Question, max_tokens: int | None) -> str:
    """The key of an answer by all members of the configuration."""
    return key_of(config, _asked(question, max_tokens))


def sample_key(
    config: EnsembleConfig, question: Question, max_tokens: int | None, temperature: float, seed: int
) -> str:
    """The key of one sample of a member."""
    return key_of(config, ["sample", temperature, seed, *_asked(question, max_tokens)])


def together_key(
    config: EnsembleConfig, question: Question, max_tokens: int | None, temperature: float, count: int
) -> str:
    """The key of the seconds of this number of concurrent samples of a member."""
    return key_of(config, ["together", temperature, count, *_asked(question, max_tokens)])


def _asked(question: Question, max_tokens: int | None) -> list[Any]:
    choices = list(question.choices) if question.kind == "choice" else []
    return [question.prompt, question.params(max_tokens).max_tokens, choices]


class RunFile:
    """The records of a run, in a file or, with `path=None`, in memory. Use it as a context manager.

    One process writes it at a time; any thread may `add`. Raises `ConfigError` for a file that is not a run's. While it
    is open, FILE.lock exists, because on Windows other programs could not read a locked file.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self._file: int | None = None
        # any thread may close it
        self._claim = None if path is None else FileLock(f"{self.path}.lock", timeout=0, thread_local=False)
        self._lock = threading.Lock()
        self._records: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        if self.path is not None:
            try:
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _BINARY, 0o644)
                self._lock_file()
            except OSError as error:
                self.close()
                hint = "name a file in a folder that exists and that you may write to"
                raise ConfigError(f"the run cannot be kept in {self.path} ({error.strerror}): {hint}") from error
            try:
                self._begin(self._file)
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        if self._claim is not None and self._claim.is_locked:
            with suppress(OSError):  # on Windows, releasing it deletes it
                os.unlink(self._claim.lock_file)
            self._claim.release()

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> dict[str, Any] | None:
        return self._records.get(key)

    def by_question(self) -> dict[str, Answer]:
        """Question id → the last answer to it, from any system: for a file with the answers of one."""
        answers = (record for record in self._records.values() if "question" in record)
        return {str(record["question"]): Answer.from_dict(record) for record in answers}

    def answer(self, key: str) -> Answer | None:
        stored = self._records.get(key)
        return None if stored is None else Answer.from_dict(stored)

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Store a record under a key. Raises `SpecFuseError` if it cannot be written."""
        line = json.dumps({"key": key, **record}, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with self._lock:
            if self._file is not None:
                self._write(self._file, line)
            self._records[key] = dict(record)

    def add_answer(self, key: str, answer: Answer, asker: str, question: str) -> None:
        self.add(key, {"asker": asker, "question": question, **asdict(answer)})

    def _lock_file(self) -> None:
        assert self._claim is not None
        try:
            self._claim.acquire()
        except Timeout as error:
            self.close()
            raise ConfigError(
                f"{self.path} is being written by another run: wait for it, or name another file"
            ) from error

    def _begin(self, file: int) -> None:
        """Read the records, and cut off an incomplete last line."""
        with open(file, "rb", closefd=False) as stream:
            data = stream.read()
        whole, _, rest = data.rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        if (lines or rest) and not _is_mark(lines[0] if lines else rest, torn=not lines):
            raise ConfigError(f"{self.path} is not a run's file: name another one (it was not changed)")
        if rest:
            os.truncate(file, len(data) - len(rest))
        if not lines:
            self._write(file, json.dumps(MARK).encode() + b"\n")
        self._read(lines[1:])

    def _read(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            try:
                record = json.loads(line)
                key = record.pop("key")
            except (ValueError, KeyError, AttributeError):  # a full disk may leave such a line
                continue
            self._records[key] = record

    def _write(self, file: int, line: bytes) -> None:
        try:
            if os.write(file, line) != len(line):
                raise SpecFuseError(
                    f"{self.path} cannot be written any more: is the disk full? Run it again to continue"
                )
        except OSError as error:
            raise SpecFuseError(
                f"{self.path} cannot be written ({error.strerror}): run it again to continue"
            ) from error


def _is_mark(line: bytes, torn: bool) -> bool:
    """Whether a file begins like a run's. `torn`: its first line may be incomplete."""
    line = line.removeprefix(codecs.BOM_UTF8).removesuffix(b"\r")  # as editors of Windows write them
    whole = json.dumps(MARK).encode()
    return whole.startswith(line) if torn else line == whole
