"""Chat engines over the real demo ensemble: three turns, with plain text in the prompts."""

from __future__ import annotations

import pytest
from llama_index.core import Document, SummaryIndex
from llama_index.core.chat_engine.types import BaseChatEngine, ChatMode

from llamaindex_specfuse import SpecFuseLLM
from tests.llamaindex.instrumentation import Listener

QUESTIONS = ("When does it open?", "Who can come?", "What is sold there?")
METADATA = ("specfuse", "usage", "prompt_tokens", "candidates", "scores", "gemma", "smollm", "None")
"""Words of `raw` that must not be in a prompt."""


def chat_engine(mode: ChatMode, llm: SpecFuseLLM) -> BaseChatEngine:
    index = SummaryIndex.from_documents([Document(text="The observatory opens at seven. The café sells tarts.")])
    return index.as_chat_engine(chat_mode=mode, llm=llm)


@pytest.mark.parametrize(
    ("mode", "streaming"),
    [
        (ChatMode.SIMPLE, True),
        (ChatMode.CONTEXT, False),
        (ChatMode.CONDENSE_QUESTION, False),
        (ChatMode.CONDENSE_PLUS_CONTEXT, True),
    ],
)
def test_three_turns_put_only_words_into_later_prompts(
    mode: ChatMode, streaming: bool, llm: SpecFuseLLM, listener: Listener
) -> None:
    engine = chat_engine(mode, llm.model_copy(update={"max_tokens": 6}))
    answers = []
    for question in QUESTIONS:
        response = engine.stream_chat(question) if streaming else engine.chat(question)
        answers.append("".join(response.response_gen) if streaming else str(response))

    assert all(answers)
    for message in engine.chat_history:
        assert message.additional_kwargs == {}
    for prompt in listener.prompts():
        assert not [word for word in METADATA if word in prompt]
    with_history = [prompt for prompt in listener.prompts() if QUESTIONS[0] in prompt and QUESTIONS[2] in prompt]
    assert with_history
    assert all(answer.strip() in with_history[0] for answer in answers[:2])
