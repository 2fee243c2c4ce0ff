"""Two members on vLLM servers answer the question over the documents.

    vllm serve Qwen/Qwen3-4B --port 8001
    vllm serve google/gemma-3-4b-it --port 8002
    python examples/rag_servers.py Qwen/Qwen3-4B=http://127.0.0.1:8001/v1 google/gemma-3-4b-it=http://127.0.0.1:8002/v1

Only the retriever, tokenizers and templates run in this process. If the servers need a key, set $SPECFUSE_SERVER_KEY.
"""

from __future__ import annotations

import argparse
import os
import sys

import _corpus
from rag_langchain import MAX_TOKENS, MiniLM, build_chain, open_store

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import MemberConfig, SpecFuseError

KEY_ENV = "SPECFUSE_SERVER_KEY"


def member(text: str) -> MemberConfig:
    """A member from MODEL=URL."""
    model, _, url = text.partition("=")
    return MemberConfig(model, server=url, api_key_env=KEY_ENV if os.environ.get(KEY_ENV) else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("members", nargs="+", metavar="MODEL=URL")
    parser.add_argument("--question", default=_corpus.QUESTION)
    options = parser.parse_args()
    _corpus.quiet()
    try:
        with ChatSpecFuse(members=[member(text) for text in options.members], max_tokens=MAX_TOKENS).load() as model:
            store = open_store(_corpus.STORE, MiniLM())
            for part in build_chain(store, model).stream(options.question):
                if "answer" in part:
                    print(part["answer"].text, end="", flush=True)
            print()
            store.client.close()
    except SpecFuseError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
