"""Two small models chat, with a memory of the conversation.

    python examples/chat_llamaindex.py ["First message" "Second message" ...]

LlamaIndex's parts: a chat engine with its memory, and SpecFuseLLM as the model.
"""

from __future__ import annotations

import sys

import _corpus
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import Memory

from llamaindex_specfuse import SpecFuseLLM

QUESTIONS = ("My name is Ada and I live in Rome.", "What is my name?", "Where do I live?")


def main() -> None:
    _corpus.quiet()
    llm = SpecFuseLLM(members="demo", max_tokens=30)
    engine = SimpleChatEngine.from_defaults(llm=llm, memory=Memory.from_defaults(token_limit=2000))
    for question in sys.argv[1:] or QUESTIONS:
        print(f"You       {question}\nEnsemble  ", end="")
        engine.stream_chat(question).print_response_stream()
        print()


if __name__ == "__main__":
    main()
