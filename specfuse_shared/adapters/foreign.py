"""Options that other models take: which of them mean nothing here, and what to use instead of the others."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from specfuse_shared.errors import ConfigError

TRANSPORT_OPTIONS = frozenset(
    {
        *("extra_body", "extra_headers", "extra_query", "metadata", "prompt_cache_key", "safety_identifier"),
        *("service_tier", "store", "stream_options", "user"),
    }
)
"""What components pass for a provider's HTTP client: accepted with a call, and without effect but for `extra_headers`,
which go to a server."""
_INSTEAD = {
    "best_of": 'ask several times, with different "seed"s',
    "format": "use with_structured_output or structured_predict, response_format=… or grammar=…",
    "keep_alive": "members stay loaded until close(), or until close_idle_engines()",
    "max_completion_tokens": "use max_tokens=…",
    "max_new_tokens": "use max_tokens=…",
    "num_ctx": "use MemberConfig(max_context=…); without it a member has all of its model's context",
    "num_gpu": "use MemberConfig(device=…), and specfuse-llm doctor --plan",
    "num_predict": "use max_tokens=…",
    "num_thread": "use the environment variable OMP_NUM_THREADS",
    "reasoning": "use MemberConfig(thinking=True)",
    "reasoning_effort": "use MemberConfig(thinking=True) and max_thinking_tokens=…",
    "think": "use MemberConfig(thinking=True)",
}
"""What Ollama's and OpenAI's models call something that has another name here, or another place."""


def known_here(options: Mapping[str, Any], own: Container[str] = ()) -> dict[str, Any]:
    """The options without those that say nothing. Raises `ConfigError` for those of other models, if they are no `own`.

    `n=1` says nothing.
    """
    foreign = {name for name in (*_INSTEAD, "n") if name in options and name not in own}
    for name in sorted(foreign):
        value = options[name]
        if name != "n" and value is not None:
            raise ConfigError(f"{name} is an option of other models: {_INSTEAD[name]}")
        if name == "n" and value not in (None, 1):
            raise ConfigError(f"n is {value!r}: an ensemble gives one answer; ask several times, each with a seed")
    return {name: value for name, value in options.items() if name not in foreign}
