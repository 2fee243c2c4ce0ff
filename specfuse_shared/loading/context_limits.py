"""The context of an ensemble before its members are loaded, from configurations on this machine. Imports no torch."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from specfuse_shared.config import EnsembleConfig, MemberConfig
from specfuse_shared.errors import SpecFuseError
from specfuse_shared.loading.gguf import (
    gguf_file,
    gguf_head,
)


def stated_context(config: EnsembleConfig) -> int | None:
    """Tokens of the smallest member's context, from configurations on this machine.

    Reads no weights and contacts no hub; None if no member states it.
    """
    stated = [limit for member in config.member_configs if (limit := _stated_context(member))]
    return min(stated, default=None)


def _stated_context(config: MemberConfig) -> int | None:
    with suppress(SpecFuseError, OSError, ValueError):
        file = gguf_file(config, fetch=False)
        stated = (
            _configured_context(config.model, config.revision, config.trust_remote_code)
            if file is None
            else gguf_head(file).context
        )
        limits = [config.max_context, config.cache_tokens, stated]
        return min((limit for limit in limits if limit), default=None)
    return config.max_context


@lru_cache(maxsize=256)
def _configured_context(model: str, revision: str | None, trust_remote_code: bool) -> int | None:
    """Of a folder or of a repository in the hub's cache. transformers is asked only where the file leaves it out."""
    from huggingface_hub import try_to_load_from_cache

    file = Path(model) / "config.json"
    if not file.is_file():
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
        if not isinstance(cached, str):
            return None
        file = Path(cached)
    stated = json.loads(file.read_text("utf-8"))
    for settings in (stated.get("text_config"), stated):
        if isinstance(settings, dict) and isinstance(limit := settings.get("max_position_embeddings"), int):
            return limit
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        model, revision=revision, trust_remote_code=trust_remote_code, local_files_only=True
    )
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
