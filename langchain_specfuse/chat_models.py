"""`ChatSpecFuse`: an ensemble of local models as one LangChain chat model. It translates; the engine answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from langchain_specfuse.messages import to_messages
from specfuse_shared.adapters import EnsembleSettings, ledger, segment_record
from specfuse_shared.events import FinishEvent, SegmentEvent
from specfuse_shared.types import EnsembleResult

PROVIDER = "specfuse"


class ChatSpecFuse(EnsembleSettings, BaseChatModel):
    """Several local models answer together, segment by segment.

        model = ChatSpecFuse(members=["HuggingFaceTB/SmolLM2-135M-Instruct", "google/gemma-3-270m-it"])
        for chunk in model.stream("Why is the sky blue?", max_tokens=64):
            ...

    Every streamed chunk is one verified segment; `additional_kwargs["specfuse_segments"]` says which member wrote
    it, how each member scored it and where it stands in the answer. The last chunk is empty and carries
    `usage_metadata` (tokens of the reference member) and, in `response_metadata["specfuse"]`, the record of all
    rounds. `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `seed` and `stop` may be
    given per call. Text only; tools and structured output are refused.
    """

    @property
    def _llm_type(self) -> str:
        return "specfuse-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self._identity()

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        return LangSmithParams(**{**params, "ls_provider": PROVIDER, "ls_model_name": self._model_name()})

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        params = self._sampling({**kwargs, "stop": stop})
        for event in self._resolve_engine().stream(to_messages(messages), params):
            if isinstance(event, SegmentEvent):
                yield _segment_chunk(event)
            elif isinstance(event, FinishEvent):
                yield self._last_chunk(event.result)

    def _last_chunk(self, result: EnsembleResult) -> ChatGenerationChunk:
        usage = result.usage
        message = AIMessageChunk(
            content="",
            chunk_position="last",
            usage_metadata=UsageMetadata(
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
            response_metadata={
                "finish_reason": str(result.finish_reason),
                "model_name": "+".join(result.members),
                "model_provider": PROVIDER,
                "specfuse": ledger(result),
            },
        )
        return ChatGenerationChunk(message=message)


def _segment_chunk(event: SegmentEvent) -> ChatGenerationChunk:
    provenance = {"specfuse_segments": [segment_record(event)]}
    return ChatGenerationChunk(message=AIMessageChunk(content=event.text, additional_kwargs=provenance))
