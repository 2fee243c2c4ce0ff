"""What went wrong, in the words of the command line."""

from __future__ import annotations

import re
from typing import Any

PROGRAM = "specfuse-llm"


def usage_line(error: Any) -> str:
    command = error.ctx.command_path if error.ctx else PROGRAM
    option, near = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if near:
        return f"no option {option}: did you mean {' or '.join(sorted(near))}?"
    message = error.format_message()
    return message if "Did you mean" in message else f"{message.rstrip('.')} (see {command} --help)"


def in_options(message: str) -> str:
    """Configuration speaks of `EnsembleConfig.max_tokens`, the command line of `--max-tokens`."""

    def option(match: re.Match[str]) -> str:
        name = {"members": "member", "model": "member"}.get(match[1], match[1])
        return "--" + name.replace("_", "-")

    if "[ensembles." in message:  # a file has no options
        return message
    return re.sub(r"\b(?:EnsembleConfig|MemberConfig|SamplingParams|ServerSettings)\.(\w+)", option, message)
