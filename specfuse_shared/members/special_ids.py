"""Tokens of a member that are no text: those that end its turn, and those that no member may write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specfuse_shared.settings.member_config import MemberConfig
from specfuse_shared.text.chat_template import PromptEncoder


def stop_ids_of(holders: Iterable[object], prompts: PromptEncoder, config: MemberConfig) -> tuple[int, ...]:
    """Ids that end a turn: of the generation and model configuration and the tokenizer (`holders`), of the template,
    and of the user."""
    stop_ids: set[int] = set(config.stop_token_ids)
    for holder in holders:
        value = getattr(holder, "eos_token_id", None)
        stop_ids.update([value] if isinstance(value, int) else value or ())
    if (marker := prompts.turn_end()) is not None:
        stop_ids.add(marker)
    return tuple(sorted(stop_ids))


def ids_without_text(tokenizer: object, vocabulary_size: int, stop_ids: Sequence[int]) -> tuple[int, ...]:
    """Control tokens have no text, so no member may write them into the shared answer; nor what pads a vocabulary."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    padding = range(len(tokenizer), vocabulary_size)  # type: ignore[arg-type]
    special = {i for i, token in added.items() if token.special and i < vocabulary_size} | set(padding)
    return tuple(sorted(special - set(stop_ids)))
