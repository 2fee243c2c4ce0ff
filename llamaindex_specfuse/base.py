"""`SpecFuseLLM`: an ensemble of local models as one LlamaIndex LLM. It translates; the engine answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from llamaindex_specfuse.messages import to_messages
from specfuse_shared.adapters import EnsembleSettings, candidate_records, ledger, segment_record, usage_record
from specfuse_shared.events import FinishEvent, SegmentEvent
from specfuse_shared.types import Message


@dataclass(frozen=True, slots=True)
class _Piece:
    """One step of an answer: the new text, the text so far, and what stands behind it."""

    delta: str
    text: str
    raw: dict[str, Any]

    def completion(self) -> CompletionResponse:
        return CompletionResponse(text=self.text, delta=self.delta, raw=self.raw)

    def chat(self) -> ChatResponse:
        message = ChatMessage(role=MessageRole.ASSISTANT, content=self.text)
        return ChatResponse(message=message, delta=self.delta, raw=self.raw)


class SpecFuseLLM(EnsembleSettings, CustomLLM):
    """Several local models answer together, segment by segment.

        llm = SpecFuseLLM(members=["HuggingFaceTB/SmolLM2-135M-Instruct", "google/gemma-3-270m-it"])
        for response in llm.stream_complete("Why is the sky blue?", max_tokens=64):
            ...

    Every streamed response is one verified segment; `raw["specfuse"]` says which member wrote it, how each member
    scored it, where it stands in the answer and what the other candidates were. The last response adds no text:
    it carries `raw["usage"]` (tokens of the reference member) and the record of all rounds, and is what `complete`
    and `chat` return. `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `seed` and
    `stop` may be given per call. A completion is one user turn in each member's own chat template. Text only.
    """

    @classmethod
    def class_name(cls) -> str:
        return "specfuse_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """`context_window` is the smallest member's once the engine is loaded, before that LlamaIndex's default."""
        return LLMMetadata(
            context_window=self._context_limit() or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_tokens,
            is_chat_model=True,
            model_name=self._model_name(),
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return _last(self._pieces(self._prompt_turn(prompt, formatted), kwargs)).completion()

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        pieces = self._pieces(self._prompt_turn(prompt, formatted), kwargs)
        return (piece.completion() for piece in pieces)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _last(self._pieces(self._turns(messages), kwargs)).chat()

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        pieces = self._pieces(self._turns(messages), kwargs)
        return (piece.chat() for piece in pieces)

    def _prompt_turn(self, prompt: str, formatted: bool) -> list[Message]:
        render = self.completion_to_prompt
        return [Message("user", prompt if formatted or render is None else render(prompt))]

    def _turns(self, messages: Sequence[ChatMessage]) -> list[Message]:
        """Templates differ by member, so `messages_to_prompt` counts only if the user set one."""
        render = self.messages_to_prompt
        if render is None or render is generic_messages_to_prompt:
            return to_messages(messages)
        return [Message("user", render(messages))]

    def _pieces(self, messages: list[Message], overrides: dict[str, Any]) -> Iterator[_Piece]:
        text = ""
        for event in self._resolve_engine().stream(messages, self._sampling(overrides)):
            if isinstance(event, SegmentEvent):
                text += event.text
                yield _Piece(event.text, text, {"specfuse": _segment(event)})
            elif isinstance(event, FinishEvent):
                usage = usage_record(event.result.usage)
                yield _Piece("", text, {"usage": usage, "specfuse": ledger(event.result)})


def _segment(event: SegmentEvent) -> dict[str, Any]:
    return {**segment_record(event), "candidates": candidate_records(event)}


def _last(pieces: Iterator[_Piece]) -> _Piece:
    return deque(pieces, maxlen=1).pop()
