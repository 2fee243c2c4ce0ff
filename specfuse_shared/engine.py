"""The engine: members loaded once, answers streamed round by round. The one door to everything in this package."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Self

from specfuse_shared.config import EnsembleConfig, SamplingParams
from specfuse_shared.errors import EngineClosedError
from specfuse_shared.events import Event, FinishEvent
from specfuse_shared.loading import LoadProgress, OnProgress
from specfuse_shared.member import LocalMember, Member
from specfuse_shared.session import AnswerSession
from specfuse_shared.types import EnsembleResult, MemberReport, Message

logger = logging.getLogger(__name__)


class EnsembleEngine:
    """Several causal language models that answer together.

    Loads on first use, or at once with `load`. Safe to call from several threads: their rounds take turns. Use
    as a context manager, or `close` to free the memory.
    """

    def __init__(self, config: EnsembleConfig) -> None:
        self.config = config
        self._members: tuple[Member, ...] = ()
        self._loading, self._turn = threading.Lock(), threading.Lock()
        self._closed = False

    def load(self, on_progress: OnProgress | None = None) -> Self:
        """Load every member now. Raises `MemberLoadError`. Calling it again does nothing."""
        with self._loading:
            self._check_open()
            if not self._members:
                self._members = tuple(self._load_all(on_progress))
        return self

    def describe(self) -> tuple[MemberReport, ...]:
        """What each member turned out to be; loads them if need be."""
        return tuple(member.report for member in self.load()._members)

    def generate(self, messages: str | Sequence[Message], params: SamplingParams | None = None) -> EnsembleResult:
        """Answer a conversation (or one question); the fold of `stream`."""
        for event in self.stream(messages, params):
            if isinstance(event, FinishEvent):
                return event.result
        raise AssertionError("a stream ends with a FinishEvent")

    def stream(self, messages: str | Sequence[Message], params: SamplingParams | None = None) -> Iterator[Event]:
        """Answer a conversation as typed events; verified text arrives at once, in `SegmentEvent`.

        Raises `RequestError` here, before any work, if the request cannot be served; while it runs,
        `GenerationError` with the text so far. Closing the iterator frees the request's caches.
        """
        conversation = [Message("user", messages)] if isinstance(messages, str) else list(messages)
        self.load()
        session = AnswerSession(self.config, self._members, conversation, params or SamplingParams())
        return self._run(session)

    def close(self) -> None:
        """Free the members. Running answers end with `EngineClosedError`. Safe to call twice."""
        with self._loading, self._turn:
            self._closed, self._members = True, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "loaded" if self._members else "not loaded"
        return f"EnsembleEngine({', '.join(self.config.names)}; {state})"

    def _run(self, session: AnswerSession) -> Iterator[Event]:
        try:
            yield from self._in_turn(session.start())
            while not session.finished:
                yield from self._in_turn(session.step())
        finally:
            session.release()

    def _in_turn(self, events: Iterator[Event]) -> list[Event]:
        with self._turn:
            self._check_open()
            return list(events)

    def _load_all(self, on_progress: OnProgress | None) -> Iterator[Member]:
        configs = self.config.member_configs
        for index, member in enumerate(configs, start=1):

            def report(stage: str, name: str = member.label, index: int = index) -> None:
                logger.info("member %s (%d of %d): %s", name, index, len(configs), stage)
                if on_progress is not None:
                    on_progress(LoadProgress(name, index, len(configs), stage))

            yield LocalMember(member, cache_dir=self.config.cache_dir, on_stage=report)
            report("ready")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("this engine was closed: make a new one")
