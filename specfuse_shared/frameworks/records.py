"""Records of an answer as plain JSON, for the metadata fields of frameworks.

Also OpenAI's tool choice and response format as settings of the engine, and the reasoning of several members as one
text, for clients with a single field.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from specfuse_shared.errors import ClosedValueWarning, ConfigError, UnfinishedValueError
from specfuse_shared.events import EnsembleResult, SegmentEvent, ThinkingEvent
from specfuse_shared.loading.config_files import plain
from specfuse_shared.messages import Message
from specfuse_shared.text.grammars.grammar import Grammar, schema_request
from specfuse_shared.text.tool_calls import CALL_CLOSE, CallDelta, CallReader, TextDelta
from specfuse_shared.types import Candidate, FinishReason, RoundRecord, TokenLogprob, TopLogprob, Usage

_BRACKETS = re.compile(rf'["\]}}]*(?:{CALL_CLOSE})?')
Detail = Literal["summary", "full", "none"]
Whole = Literal["none", "value", "call", "all"]
"""The part that must be complete: nothing, an answer without calls, an answer with a call, or both."""

SUMMARY_DIFFERENCES, SUMMARY_FIELDS = 8, 20
"""The most of them in a summary, which stays with each message of a conversation."""

CLOSED = "closed"
"""A value of a call's option `whole`: a value must be complete, possibly closed by brackets and quotes."""


def segment_record(event: SegmentEvent) -> dict[str, Any]:
    """Who wrote a segment and how it was judged. `start`/`end` are its character offsets in the answer.

    No key is named `index`: LangChain would merge list items by it. Text that was held back until the end has no
    round: its `round` and `member` are None.
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


def reasoning_tokens(usage: Usage) -> int:
    """The members' reasoning before the answer, each in its own tokens."""
    return sum(member.thinking for member in usage.members.values())


def usage_record(usage: Usage) -> dict[str, Any]:
    """Token counts of the reference member in the form of OpenAI's API: reasoning is part of the completion."""
    thoughts = reasoning_tokens(usage)
    completion = usage.completion_tokens + thoughts
    details = {"completion_tokens_details": {"reasoning_tokens": thoughts}} if thoughts else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": usage.prompt_tokens + completion,
        **details,
    }


def ledger(result: EnsembleResult, detail: Detail = "full") -> dict[str, Any]:
    """The record of an answer as plain JSON: nothing, a summary of each member's part, or also every round.

    A summary has the most important differences, the fields on which members agree least, and the numbers of those left
    out.
    """
    if detail == "none":
        return {}
    left_out = {"text", "logprobs", "thinking"}
    record = {key: value for key, value in result.to_dict(rounds=detail == "full").items() if key not in left_out}
    record = {key: value for key, value in record.items() if value or key not in ("closing", "loops", "fields")}
    if detail == "summary":
        record |= _most(record, "differences", SUMMARY_DIFFERENCES, range(len(record["differences"])))
        fields = record.get("fields", [])
        by_share = sorted(range(len(fields)), key=lambda n: 1.0 if fields[n]["share"] is None else fields[n]["share"])
        record |= _most(record, "fields", SUMMARY_FIELDS, by_share)
        record["usage"] = {name: record["usage"][name] for name in ("prompt_tokens", "completion_tokens", "reference")}
    parts: dict[str, Any] = plain({**record, "summary": [asdict(member) for member in result.summary()]})
    return parts


def _most(record: Mapping[str, Any], key: str, limit: int, ranked: Sequence[int]) -> dict[str, Any]:
    """The first `limit` of a list by rank, in their original order, and the number of those left out."""
    if len(ranked) <= limit:
        return {}
    selected = [record[key][number] for number in sorted(ranked[:limit])]
    return {key: selected, f"{key}_left_out": len(ranked) - limit}


def finish_reason(result: EnsembleResult, called: bool = False) -> str:
    """The finish reason in the words of OpenAI's API; "repetition" counts as "stop".

    `called`: the answer has begun a call. A call or value that `max_tokens` cut has the reason "length". So
    has a call that was closed because it repeated itself.
    """
    if _is_cut(result, called):
        return "length"
    return "tool_calls" if called else "stop"


def check_whole(
    result: EnsembleResult, whole: Whole = "all", reader: CallReader | None = None, *, may_close: bool = False
) -> None:
    """Raises `UnfinishedValueError` for a value or call that was cut, even if it was closed in time.

    `reader`: the reader of calls that has read the answer. `may_close`: accept a value that closing brackets and quotes
    alone completed, with a Python warning.
    """
    called = reader is not None and reader.calling
    if whole not in ("all", "call" if called else "value"):
        return
    looped = result.finish_reason is FinishReason.REPETITION and bool(result.loops or result.closing)
    if not looped and result.finish_reason is not FinishReason.LENGTH:
        return
    count = result.usage.completion_tokens
    repeated = f" ({result.loops[-1][:80]!r} again and again)" if result.loops else ""
    if may_close and is_closed_nearby(result, called):
        how = f"went in a loop{repeated}" if looped else f"reached max_tokens after {count} tokens"
        warnings.warn(f"a value {how} and was closed there", ClosedValueWarning, stacklevel=2)
        return
    message = f"max_tokens cut the value after {count} tokens: raise max_tokens"
    if looped:
        message = (
            f"the value repeated itself{repeated} and was cut after {count} tokens: ask for less, or in other words"
        )
    text = result.text.removesuffix(result.closing)
    raise UnfinishedValueError(message, member=None, text=text, usage=result.usage)


def is_closed_nearby(result: EnsembleResult, called: bool = False) -> bool:
    """Whether brackets and quotes were enough to close the value, so that none of its content is invented.

    A number at the end of `max_tokens` may be incomplete.
    """
    if called and not result.closing:
        return result.finish_reason is not FinishReason.LENGTH
    before = result.text.removesuffix(result.closing)
    is_number = (
        result.finish_reason is FinishReason.LENGTH and not result.closing.startswith('"') and before[-1:].isdigit()
    )
    return bool(_BRACKETS.fullmatch(result.closing)) and not is_number


def last_parts(
    reader: CallReader | None, result: EnsembleResult, *, may_close: bool = False
) -> Sequence[TextDelta | CallDelta]:
    """The text that a reader of calls held back until the end of the answer. `may_close`: see `check_whole`."""
    if reader is None:
        return ()
    if may_close and is_closed_nearby(result, reader.calling):
        return reader.finish()
    return reader.finish(cut=_is_cut(result, reader.calling), closing=result.closing)


def _is_cut(result: EnsembleResult, called: bool) -> bool:
    """Whether `max_tokens` ended the answer, or a repetitive call was closed."""
    closed = called and result.finish_reason is FinishReason.REPETITION and bool(result.closing)
    return closed or result.finish_reason is FinishReason.LENGTH


def openai_logprobs(result: EnsembleResult) -> dict[str, Any] | None:
    """Log-probabilities of the answer's tokens as OpenAI's API gives them; None unless they were asked for."""
    return None if result.logprobs is None else logprobs_content(result.logprobs)


def logprobs_content(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """These tokens as OpenAI's API gives them."""
    return {"content": [{**_probable(t), "top_logprobs": [_probable(top) for top in t.top]} for t in tokens]}


def _probable(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.bytes)}


def _winner(record: RoundRecord) -> Candidate:
    return next(c for c in record.candidates if record.winner in c.drafters)


RESPONSE_FORMATS = ("text", "json_object", "json_schema")


def response_schema(response_format: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The JSON schema of a response format, None for plain text, and whether it must be enforced to the letter.

    Raises `ConfigError` for a type that is none of `RESPONSE_FORMATS`.
    """
    kind = response_format.get("type")
    if kind == "text":
        return None, False
    if kind == "json_object":
        return {"type": "object"}, False
    if kind != "json_schema":
        raise ConfigError(f"response_format is of type {kind!r}: use one of {', '.join(map(repr, RESPONSE_FORMATS))}")
    spec = response_format.get("json_schema")
    if not isinstance(spec, Mapping) or not isinstance(spec.get("schema", spec), Mapping):
        raise ConfigError('response_format of type "json_schema" needs {"json_schema": {"schema": {…}}}')
    return dict(spec.get("schema", spec)), bool(spec.get("strict"))


def value_of(
    schema: Mapping[str, Any] | None, strict: bool, shown: bool = True
) -> tuple[Grammar | None, list[Message]]:
    """The grammar of a response format's values, and the members' instruction about it if `shown`."""
    if schema is None:
        return None, []
    spec = schema_request(schema) if shown else None
    return Grammar.json_schema(schema, strict=strict), [spec] if spec else []


class Thoughts:
    """Joins the reasoning of concurrent members: streams the reasoning of the first one, then appends the others'."""

    def __init__(self) -> None:
        self._first: str | None = None
        self._others: dict[str, str] = {}

    def feed(self, event: ThinkingEvent) -> str:
        """The text that can be streamed now."""
        self._first = self._first or event.member
        if event.member == self._first:
            return event.text
        self._others[event.member] = self._others.get(event.member, "") + event.text
        return ""

    def rest(self) -> str:
        """The text that was held back, once the answer begins."""
        unsent, self._others = self._others, {}
        return "".join(f"\n\n{thoughts}" for thoughts in unsent.values())
