"""Events, errors and requests as JSON, for a remote engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from specfuse_shared import errors
from specfuse_shared.config import SamplingParams
from specfuse_shared.errors import ConfigError, EngineClosedError, GenerationError, SpecFuseError
from specfuse_shared.events import Event, ExitEvent, FinishEvent, SegmentEvent, StartEvent, ThinkingEvent, WarningEvent
from specfuse_shared.messages import Message
from specfuse_shared.serving.calls import CallOptions, tools_of

_KINDS: Mapping[str, type[Event]] = {
    "start": StartEvent,
    "thinking": ThinkingEvent,
    "segment": SegmentEvent,
    "exit": ExitEvent,
    "warning": WarningEvent,
    "finish": FinishEvent,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_ADAPTERS: Mapping[str, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


def event_to_json(event: Event) -> dict[str, Any]:
    """The whole event as plain JSON; its kind is its "type"."""
    name = _NAMES[type(event)]
    return {"type": name, **_ADAPTERS[name].dump_python(event, mode="json")}


def event_from_json(data: Mapping[str, Any]) -> Event:
    """The event that `event_to_json` wrote. Raises `pydantic.ValidationError` or `KeyError` for anything else."""
    event: Event = _ADAPTERS[data["type"]].validate_python({key: data[key] for key in data if key != "type"})
    return event


def error_to_json(error: SpecFuseError) -> dict[str, Any]:
    """Kind, message and public attributes of an engine error."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    attributes = {name: getattr(error, name) for name in error.shared}
    return {"kind": kind, "message": error.public, "attributes": attributes}


def error_from_json(data: Mapping[str, Any]) -> SpecFuseError:
    """The error that `error_to_json` wrote; one of a kind that is unknown here is a plain `SpecFuseError`."""
    kind = getattr(errors, str(data.get("kind")), SpecFuseError)
    if not (isinstance(kind, type) and issubclass(kind, SpecFuseError)):
        kind = SpecFuseError
    remake, _ = SpecFuseError().__reduce__()[:2]
    message, state = str(data.get("message")), data.get("attributes") or {}
    attributes = {name: state.get(name) for name in kind.shared}
    if issubclass(kind, (GenerationError, EngineClosedError)):
        attributes["_public"] = message
    made: SpecFuseError = remake(kind, (message,), attributes)
    return made


def request_to_json(messages: Sequence[Message], params: SamplingParams, options: CallOptions) -> dict[str, Any]:
    """A call of the engine as the body of a chat completion, whose settings are named as the engine's are.

    Raises `ConfigError` for a call to a subset of the members: on a server, a subset is a model with its own name.
    """
    if options.get("members") is not None:
        raise ConfigError('a server takes no members=… in a call: name one of its models, such as "demo/gemma3-270m"')
    return {
        "messages": [message.to_dict() for message in messages],
        **asdict(params),
        "tools": [tool.to_dict() for tool in tools_of(options.get("tools") or ())],
        "tool_choice": _choice(options.get("tool_choice", "auto")),
        "parallel_tool_calls": bool(options.get("parallel_tool_calls")),
        "timeout": options.get("timeout"),
    }


def _choice(choice: str) -> Any:
    words = {"auto": "auto", "none": "none", "any": "required"}
    return words.get(choice) or {"type": "function", "function": {"name": choice}}
