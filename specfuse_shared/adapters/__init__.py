"""What both framework adapters share: the settings of a model over an ensemble, and records as plain JSON.

Needs pydantic, which both frameworks bring along. The engine never imports this package.
"""

from specfuse_shared.adapters.ensembles import Members, config_of
from specfuse_shared.adapters.openai_forms import RESPONSE_FORMATS, choice_of, response_schema, value_of
from specfuse_shared.adapters.records import (
    Detail,
    candidate_records,
    check_whole,
    finish_reason,
    last_parts,
    ledger,
    openai_logprobs,
    plain_config,
    segment_record,
    usage_record,
)
from specfuse_shared.adapters.settings import TRANSPORT_OPTIONS, Engine, EnsembleSettings, OnSegment
from specfuse_shared.adapters.thoughts import Thoughts
from specfuse_shared.messages import CUT_MARK, Role, arguments_of
from specfuse_shared.text.tool_calls import CallDelta, CallReader, TextDelta, ToolUse

__all__ = [
    "CUT_MARK",
    "RESPONSE_FORMATS",
    "TRANSPORT_OPTIONS",
    "CallDelta",
    "CallReader",
    "Detail",
    "Engine",
    "EnsembleSettings",
    "Members",
    "OnSegment",
    "Role",
    "TextDelta",
    "Thoughts",
    "ToolUse",
    "arguments_of",
    "candidate_records",
    "check_whole",
    "choice_of",
    "config_of",
    "finish_reason",
    "last_parts",
    "ledger",
    "openai_logprobs",
    "plain_config",
    "response_schema",
    "segment_record",
    "usage_record",
    "value_of",
]
