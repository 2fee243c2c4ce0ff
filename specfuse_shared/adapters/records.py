"""Records of an answer as plain JSON, for the places where frameworks keep such things."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Literal

from specfuse_shared.config import EnsembleConfig
from specfuse_shared.events import SegmentEvent
from specfuse_shared.member_config import MemberConfig
from specfuse_shared.results import EnsembleResult
from specfuse_shared.types import Candidate, FinishReason, RoundRecord, TokenLogprob, TopLogprob, Usage

Detail = Literal["summary", "full", "none"]


def segment_record(event: SegmentEvent) -> dict[str, Any]:
    """Who wrote a segment and how it was judged. `start`/`end` are its character offsets in the answer.

    No key is named `index`: LangChain would merge list items by it. Text that was only held back, and is
    released at the end, has no round of its own: its `round` and `member` are None.
    """
    place = {"start": event.start, "end": event.end}
    record = event.record
    if record is None:
        return {"round": None, "member": None, "scores": {}, "weights": {}, "tokens": 0, **place}
    won = _winner(record)
    return {
        "round": record.index,
        "member": record.winner,
        "scores": dict(won.scores),
        "weights": dict(record.weights),
        "tokens": won.tokens,
        **place,
    }


def candidate_records(event: SegmentEvent) -> list[dict[str, Any]]:
    """All candidates of a segment's round, the winner among them."""
    return [{**asdict(c), "drafters": list(c.drafters)} for c in (event.record.candidates if event.record else ())]


def usage_record(usage: Usage) -> dict[str, int]:
    """Token counts of the reference member."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def ledger(result: EnsembleResult, detail: Detail = "full") -> dict[str, Any]:
    """The record of an answer as plain JSON: nothing, each member's part in it, or all of its rounds, too."""
    if detail == "none":
        return {}
    told = {key: value for key, value in result.to_dict().items() if key not in ("text", "logprobs", "thinking")}
    if detail == "summary":
        told["rounds"] = len(result.rounds)
        told["usage"] = {name: told["usage"][name] for name in ("prompt_tokens", "completion_tokens", "reference")}
    parts: dict[str, Any] = plain({**told, "summary": [asdict(member) for member in result.summary()]})
    return parts


def finish_reason(result: EnsembleResult, called: bool = False) -> str:
    """Why the answer ended, in the words that every provider uses; "repetition" is a reason of ours to stop."""
    if called:
        return "tool_calls"
    return "length" if result.finish_reason is FinishReason.LENGTH else "stop"


def openai_logprobs(result: EnsembleResult) -> dict[str, Any] | None:
    """Log-probabilities of the answer's tokens as OpenAI's API gives them; None unless they were asked for."""
    if result.logprobs is None:
        return None
    return {"content": [{**_probable(t), "top_logprobs": [_probable(top) for top in t.top]} for t in result.logprobs]}


def _probable(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.bytes)}


def plain_config(config: EnsembleConfig | MemberConfig, *, changed: bool = True) -> dict[str, Any]:
    """The settings (those that differ from their defaults) as plain JSON; a policy object appears as its repr."""
    chosen = [f.name for f in fields(config) if not changed or getattr(config, f.name) != f.default]
    return {name: plain(getattr(config, name), changed) for name in chosen}


def plain(value: Any, changed: bool = True) -> Any:
    if isinstance(value, MemberConfig):
        return plain_config(value, changed=changed)
    if isinstance(value, Mapping):
        return {str(k): plain(v, changed) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(v, changed) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def _winner(record: RoundRecord) -> Candidate:
    return next(c for c in record.candidates if record.winner in c.drafters)
