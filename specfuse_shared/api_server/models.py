"""The models that the server offers (ensembles, and each member alone), and their loading state."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specfuse_shared.errors import ConfigError, EngineBusyError, EngineClosedError, SpecFuseError, UnknownModelError
from specfuse_shared.loading.progress import LoadProgress
from specfuse_shared.serving.engine import EnsembleEngine

logger = logging.getLogger(__name__)

Status = Literal["loading", "ok", "degraded", "failed"]
"""`degraded`: some members are lost, and the others answer. `failed`: loading or an engine failed."""
LONGEST_RETRY = 60
"""Seconds."""
_SPREAD = (0.8, 1.2)
_UNKNOWN_ANSWER_SECONDS = 1.0
"""Assumed duration of an answer before the first one has ended."""


class ModelsLoadingError(EngineBusyError):
    """The members are still being loaded."""


@dataclass(frozen=True, slots=True)
class Model:
    """An ensemble, or one `member` of it alone. `id`: the name that clients use."""

    id: str
    engine: EnsembleEngine
    member: str | None = None

    @property
    def members(self) -> list[str] | None:
        """The participating members, as the engine expects them; None means all."""
        return None if self.member is None else [self.member]

    def to_dict(self, created: int) -> dict[str, Any]:
        """The model as OpenAI lists it; `specfuse`: details for this project's clients."""
        config = self.engine.config.only(self.members)
        payload = {
            "members": list(config.names),
            "reference": config.reference_name,
            "thinking": [member.label for member in config.member_configs if member.thinking],
            "context_limit": self.engine.context_limit,
            "max_concurrent": config.max_concurrent,
        }
        return {"id": self.id, "object": "model", "created": created, "owned_by": "specfuse", "specfuse": payload}


class Models:
    """All models by name, over engines that belong to the caller. Thread-safe, also during `load`."""

    def __init__(self, engines: Mapping[str, EnsembleEngine]) -> None:
        self.engines = dict(engines)
        self._by_id: dict[str, Model] = {}
        for name, engine in self.engines.items():
            members = engine.config.names
            alone = [Model(f"{name}/{member}", engine, member) for member in members] if len(members) > 1 else []
            for model in (Model(name, engine), *alone):
                if model.id in self._by_id:
                    raise ConfigError(f"{model.id!r} is an ensemble and a member of another one: rename the ensemble")
                self._by_id[model.id] = model
        self._status: Status = "loading"
        self._stage = "starting"

    @property
    def status(self) -> Status:
        """The current status, from the engines and their lanes."""
        if self._status != "ok":
            return self._status
        if self.failed:
            return "failed"
        return "degraded" if self.lost else "ok"

    @property
    def stage(self) -> str:
        """The member being loaded, the lost members, or the reason of the failure."""
        if self.status == "failed" and self.failed:
            return f"failed: {', '.join(self.failed)}"
        return f"without {', '.join(self.lost)}" if self.status == "degraded" else self._stage

    @property
    def failed(self) -> list[str]:
        """Names of ensembles whose engine failed."""
        return [name for name, engine in self.engines.items() if engine.failure is not None]

    @property
    def lost(self) -> list[str]:
        """Names of members that are unreachable now."""
        return [f"{name}/{member}" for name, engine in self.engines.items() for member in engine.lost_members]

    def load(self) -> None:
        """Load the engines one after the other. Raises the error of the first that fails."""
        try:
            for name, engine in self.engines.items():
                self._stage = f"{name}: planning"
                engine.load(lambda progress, ensemble=name: self._observe(ensemble, progress))  # type: ignore[misc]
        except BaseException as error:
            self._status, self._stage = "failed", str(error) if isinstance(error, SpecFuseError) else "internal error"
            raise
        self._status, self._stage = "ok", "ready"

    def close(self) -> None:
        """End all running answers with `EngineClosedError`."""
        for engine in self.engines.values():
            engine.close()

    def named(self, name: str) -> Model:
        """The model of this name, loaded or not. Raises `UnknownModelError`."""
        if (model := self._by_id.get(name)) is None:
            names = ", ".join(map(repr, self._by_id))
            raise UnknownModelError(f"there is no model {name!r}: use one of {names}")
        return model

    def find(self, name: str) -> Model:
        """The model of this name. Raises `UnknownModelError`, or `ModelsLoadingError` while it is loading."""
        model = self.named(name)
        if self._status == "loading":
            raise ModelsLoadingError(f"the models are being loaded ({self._stage}): try again later")
        if self._status == "failed":
            raise EngineClosedError("the models could not be loaded: the server's log says why")
        if model.engine.failure is not None:
            raise EngineClosedError("the engine of this model failed: the server's log says why")
        return model

    def all(self) -> list[Model]:
        return list(self._by_id.values())

    def retry_seconds(self) -> int:
        """Estimated seconds until a refused client could be answered.

        It is randomised, because otherwise all refused clients would retry together.
        """
        if self._status == "loading":
            return 5
        wait = max(map(_wait_seconds, self.engines.values()), default=0.0)
        return min(LONGEST_RETRY, max(1, math.ceil(wait * random.uniform(*_SPREAD))))

    def _observe(self, ensemble: str, progress: LoadProgress) -> None:
        self._stage = f"{ensemble}: {progress.member} ({progress.index} of {progress.total}): {progress.stage}"
        logger.info("loading %s", self._stage)


def _wait_seconds(engine: EnsembleEngine) -> float:
    """Estimated seconds until a new answer would begin. Waiting answers run first, `max_concurrent` at a time."""
    metrics = engine.metrics()
    answering = max(0.0, metrics.answer_seconds.mean - metrics.queue_seconds.mean) or _UNKNOWN_ANSWER_SECONDS
    return answering * (1 + metrics.waiting / engine.config.max_concurrent)
