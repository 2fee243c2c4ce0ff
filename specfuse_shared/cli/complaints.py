"""What went wrong, in the words of the command line."""

from __future__ import annotations

import difflib
import re
from typing import Any

PROGRAM = "specfuse-llm"
INTERRUPTED = 130
"""The exit code after Ctrl-C."""
_OPTIONS = (
    *("member", "max_tokens", "temperature", "seed", "stop", "preset", "segment_tokens", "score", "feedback", "exit"),
    *("backend", "dtype", "quantization", "host", "port", "api_key_env"),
)
"""Settings that are options of a command, too."""


def usage_line(error: Any) -> str:
    command = error.ctx.command_path if error.ctx else PROGRAM
    option, near = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if near:
        best = difflib.get_close_matches(str(option), near, 1, 0) or sorted(near)
        return f"no option {option}: did you mean {best[0]}?"
    message = error.format_message()
    return message if "Did you mean" in message else f"{message.rstrip('.')} (see {command} --help)"


def in_options(message: str) -> str:
    """Configuration speaks of `EnsembleConfig.max_tokens`, the command line of `--max-tokens`."""

    def option(match: re.Match[str]) -> str:
        name = {"members": "member", "model": "member", "server": "member"}.get(match[1], match[1])
        return "--" + name.replace("_", "-") if name in _OPTIONS else match[0]

    if "[ensembles." in message:  # a file has no options
        return message
    return re.sub(r"\b(?:EnsembleConfig|MemberConfig|SamplingParams|ServerSettings)\.(\w+)", option, message)
