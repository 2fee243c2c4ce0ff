"""Code that both adapters share: the settings of a model over an ensemble, and records as plain JSON.

The engine never imports this package.
"""

from specfuse_shared.frameworks.answer_reader import AnswerEnd, AnswerPart, AnswerReader, fold_async
from specfuse_shared.frameworks.records import (
    CLOSED,
    RESPONSE_FORMATS,
    Detail,
    Whole,
    candidate_records,
    ledger,
    logprobs_content,
    reasoning_tokens,
    response_schema,
    segment_record,
    usage_record,
    value_of,
)
from specfuse_shared.frameworks.settings import (
    TRANSPORT_OPTIONS,
    Engine,
    Ensembles,
    EnsembleSettings,
    Members,
    OnSegment,
    config_of,
    members_of_model,
)
from specfuse_shared.loading.config_files import plain_config
from specfuse_shared.messages import CUT_MARK, SILENT_BLOCKS, TEXT_BLOCKS, Role, arguments_said, block_text
from specfuse_shared.serving.calls import choice_of
from specfuse_shared.text.tool_calls import CallDelta, CallReader, ToolUse

__all__ = [
    "CLOSED",
    "CUT_MARK",
    "RESPONSE_FORMATS",
    "SILENT_BLOCKS",
    "TEXT_BLOCKS",
    "TRANSPORT_OPTIONS",
    "AnswerEnd",
    "AnswerPart",
    "AnswerReader",
    "CallDelta",
    "CallReader",
    "Detail",
    "Engine",
    "EnsembleSettings",
    "Ensembles",
    "Members",
    "OnSegment",
    "Role",
    "ToolUse",
    "Whole",
    "arguments_said",
    "block_text",
    "candidate_records",
    "choice_of",
    "config_of",
    "fold_async",
    "ledger",
    "logprobs_content",
    "members_of_model",
    "plain_config",
    "reasoning_tokens",
    "response_schema",
    "segment_record",
    "usage_record",
    "value_of",
]
