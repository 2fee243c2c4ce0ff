"""A member of this machine, on the engine that suits it."""

from __future__ import annotations

import logging

from specfuse_shared.config import MemberConfig
from specfuse_shared.loading.gguf import OnStage
from specfuse_shared.loading.planning import backend_of
from specfuse_shared.members.local.member import InProcessMember, LocalMember
from specfuse_shared.placement.plan import Assignment

logger = logging.getLogger(__name__)


def load_in_process(
    config: MemberConfig,
    *,
    cache_dir: str | None = None,
    on_stage: OnStage = lambda stage: None,
    place: Assignment | None = None,
    execution: str = "auto",
) -> InProcessMember:
    """A member in its `place`, or where it fits by itself. Raises `MemberLoadError`."""
    backend = backend_of(config)
    logger.info("member %s runs on %s (%s)", config.label, backend.name, backend.reason or "there is no other")
    if backend.is_llama_cpp:
        from specfuse_shared.members.llamacpp.member import LlamaMember

        return LlamaMember(config, cache_dir=cache_dir, on_stage=on_stage, place=place)
    member = LocalMember(config, cache_dir=cache_dir, on_stage=on_stage, place=place, execution=execution)
    member.why = backend.reason
    return member
