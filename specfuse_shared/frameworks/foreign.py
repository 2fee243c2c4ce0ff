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
    "api_base": "use base_url=…, the address of specfuse-llm serve",
    "best_of": 'ask several times, with different "seed"s',
    "frequency_penalty": "use repetition_penalty=…, which multiplies where that one subtracts",
    "format": "use with_structured_output or structured_predict, response_format=… or grammar=…",
    "json_mode": 'use with_structured_output or structured_predict, or response_format={"type": "json_object"}',
    "keep_alive": "members stay loaded until close(), or until close_idle_engines()",
    "max_completion_tokens": "use max_tokens=…",
    "max_new_tokens": "use max_tokens=…",
    "n": "an ensemble gives one answer; ask several times, each with a seed",
    "num_ctx": "use MemberConfig(max_context=…); without it a member has all of its model's context",
    "num_gpu": "use MemberConfig(device=…), and specfuse-llm doctor --plan",
    "num_predict": "use max_tokens=…",
    "num_thread": "use the environment variable OMP_NUM_THREADS",
    "presence_penalty": "use repetition_penalty=…, which multiplies where that one subtracts",
    "reasoning": "use MemberConfig(thinking=True)",
    "reasoning_effort": "use MemberConfig(thinking=True) and max_thinking_tokens=…",
    "repeat_penalty": "use repetition_penalty=…",
    "request_timeout": "use timeout=…",
    "think": "use MemberConfig(thinking=True)",
    "thinking": "use MemberConfig(thinking=True)",
    "validate_model_on_init": "use load(), which loads the members or asks the server",
}
"""What Ollama's and OpenAI's models call something that has another name here, or another place."""
_SAYS_NOTHING = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0),
    **dict.fromkeys(("json_mode", "reasoning", "think", "thinking", "validate_model_on_init"), False),
    **dict.fromkeys(("n", "repeat_penalty"), 1),
}
"""Values that ask for what happens anyway."""


def known_here(options: Mapping[str, Any], own: Container[str] = ()) -> dict[str, Any]:
    """The options without those that say nothing. Raises `ConfigError` for those of other models."""
    foreign = {name for name in _INSTEAD if name in options and name not in own}
    for name in sorted(foreign):
        if options[name] not in (None, _SAYS_NOTHING.get(name)):
            raise ConfigError(f"{name} is an option of other models: {_INSTEAD[name]}")
    return {name: value for name, value in options.items() if name not in foreign}
