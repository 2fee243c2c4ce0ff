"""The models that the server offers: ensembles, and each member of one alone; how far they are loaded."""

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
"""`degraded`: some members are lost, and the others answer. `failed`: loading did not work, or an engine broke."""
LONGEST_RETRY = 60
"""Seconds."""
_SPREAD = (0.8, 1.2)
_UNKNOWN_ANSWER_SECONDS = 1.0
"""Seconds of an answer, before any ended."""


class ModelsLoadingError(EngineBusyError):
    """The members are still being loaded."""


@dataclass(frozen=True, slots=True)
class Model:
    """An ensemble, or one `member` of it alone, under the name that clients ask for."""

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
    """All models by name, over engines that belong to the caller. `load` fills them; any thread may ask meanwhile."""

    def __init__(self, engines: Mapping[str, EnsembleEngine]) -> None:
        self.engines = dict(engines)
        self._by_id: dict[str, Model] = {}
        for name, engine in self.engines.items():
            members = engine.config.names
            alone = [Model(f"{name}/{member}", engine, member) for member in members] if len(members) > 1 else []
            for model in (Model(name, engine), *alone):
                if model.id in self._by_id:
                    raise ConfigError(
                        f"{model.id!r} is an ensemble and a member of another one: call the ensemble otherwise"
                    )
                self._by_id[model.id] = model
        self._status: Status = "loading"
        self._stage = "starting"

    @property
    def status(self) -> Status:
        """As of now: engines and their lanes are asked."""
        if self._status != "ok":
            return self._status
        if self.broken:
            return "failed"
        return "degraded" if self.lost else "ok"

    @property
    def stage(self) -> str:
        """What is being loaded, what is lost, or why it failed."""
        if self.status == "failed" and self.broken:
            return f"broken: {', '.join(self.broken)}"
        return f"without {', '.join(self.lost)}" if self.status == "degraded" else self._stage

    @property
    def broken(self) -> list[str]:
        """Ensembles whose engine broke."""
        return [name for name, engine in self.engines.items() if engine.failure is not None]

    @property
    def lost(self) -> list[str]:
        """Members that cannot be reached now."""
        return [f"{name}/{member}" for name, engine in self.engines.items() for member in engine.lost_members]

    def load(self) -> None:
        """Load every engine, one after the other. Raises what the first that cannot be loaded raises."""
        try:
            for name, engine in self.engines.items():
                self._stage = f"{name}: planning"
                engine.load(lambda progress, ensemble=name: self._observe(ensemble, progress))  # type: ignore[misc]
        except BaseException as error:
            self._status, self._stage = "failed", str(error) if isinstance(error, SpecFuseError) else "internal error"
            raise
        self._status, self._stage = "ok", "ready"

    def close(self) -> None:
        """End the answers that run; each raises `EngineClosedError`."""
        for engine in self.engines.values():
            engine.close()

    def named(self, name: str) -> Model:
        """The model of this name, loaded or not. Raises `UnknownModelError`."""
        if (model := self._by_id.get(name)) is None:
            names = ", ".join(map(repr, self._by_id))
            raise UnknownModelError(f"there is no model {name!r}: use one of {names}")
        return model

    def find(self, name: str) -> Model:
        """The model of this name. Raises `UnknownModelError`, or `ModelsLoadingError` where it cannot answer yet."""
        model = self.named(name)
        if self._status == "loading":
            raise ModelsLoadingError(f"the models are being loaded ({self._stage}): try again in a while")
        if self._status == "failed":
            raise EngineClosedError("the models could not be loaded: the server's log says why")
        if model.engine.failure is not None:
            raise EngineClosedError("the engine of this model broke: the server's log says why")
        return model

    def all(self) -> list[Model]:
        return list(self._by_id.values())

    def retry_seconds(self) -> int:
        """Seconds after which a refused client may be answered: the work ahead of it, with some spread.

        Without the spread, all refused clients would come back together.
        """
        if self._status == "loading":
            return 5
        wait = max(map(_wait_seconds, self.engines.values()), default=0.0)
        return min(LONGEST_RETRY, max(1, math.ceil(wait * random.uniform(*_SPREAD))))

    def _observe(self, ensemble: str, progress: LoadProgress) -> None:
        self._stage = f"{ensemble}: {progress.member} ({progress.index} of {progress.total}): {progress.stage}"
        logger.info("loading %s", self._stage)


def _wait_seconds(engine: EnsembleEngine) -> float:
    """Until an answer that is asked for now would begin: rounds of `max_concurrent` answers that are before it."""
    metrics = engine.metrics()
    answering = max(0.0, metrics.answer_seconds.mean - metrics.queue_seconds.mean) or _UNKNOWN_ANSWER_SECONDS
    return answering * (1 + metrics.waiting / engine.config.max_concurrent)
