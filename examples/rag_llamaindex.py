"""Two small models answer one question over the documents of an observatory, segment by segment.

    python examples/rag_llamaindex.py ["Your question?"] [--store DIR]

LlamaIndex's parts: Markdown splitter, a Qdrant store on disk, a query engine that streams, and SpecFuseLLM as the
model.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import _corpus

from specfuse_shared import SpecFuseError, demo_encoder

try:
    from llama_index.core import Document, StorageContext, VectorStoreIndex
    from llama_index.core.embeddings import BaseEmbedding
    from llama_index.core.node_parser import MarkdownNodeParser
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.schema import BaseNode, TextNode
    from llama_index.vector_stores.qdrant import QdrantVectorStore
    from pydantic import PrivateAttr
    from qdrant_client import QdrantClient

    from llamaindex_specfuse import SpecFuseLLM
except ImportError as error:
    sys.exit(f"This example needs packages that are not installed ({error}): {_corpus.INSTALL}")

QUESTION = "How much does the main mirror weigh?"
COLLECTION = "documents"
NEIGHBOURS = 2
PROMPT = PromptTemplate(
    "Passages from the observatory's pages:\n\n{context_str}\n\nAnswer from them in a short paragraph: {query_str}"
)


class MiniLM(BaseEmbedding):
    """The packaged sentence encoder with LlamaIndex's interface."""

    _encoder: Any = PrivateAttr(default_factory=demo_encoder)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._encoder.encode(texts, normalize_embeddings=True).tolist()
        return vectors

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def split(documents: list[_corpus.Page]) -> list[BaseNode]:
    """One passage per section, with its titles."""
    sections = MarkdownNodeParser(include_prev_next_rel=False, header_path_separator=": ")
    passages: list[BaseNode] = []
    for page in documents:
        for section in sections.get_nodes_from_documents([Document(text=page.text)]):
            title, _, text = section.get_content().lstrip("# ").partition("\n")
            heading = section.metadata["header_path"].removeprefix(": ") + title
            metadata = {"source": page.name, "heading": heading}
            unseen = list(metadata)
            passages.append(
                TextNode(
                    text=f"{heading}\n{text.strip()}",
                    metadata=metadata,
                    excluded_embed_metadata_keys=unseen,
                    excluded_llm_metadata_keys=unseen,
                )
            )
    return passages


def open_index(folder: Path, client: QdrantClient, embedding: MiniLM) -> VectorStoreIndex:
    """The index over the vectors on disk. A new store is filled first."""
    store = QdrantVectorStore(COLLECTION, client=client, index_doc_id=False)  # a store on disk has no such indexes
    if client.collection_exists(COLLECTION):
        return VectorStoreIndex.from_vector_store(store, embed_model=embedding)
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(split(_corpus.pages()), storage_context=context, embed_model=embedding)


def store_folder(folder: Path) -> Path:
    """Folder for the vectors of the current documents; folders of older documents are removed."""
    current = folder / f"llamaindex-{_corpus.fingerprint(_corpus.pages())}"
    for old in folder.glob("llamaindex-*"):
        if old != current:
            shutil.rmtree(old)
    return current


def answer(question: str, folder: Path) -> None:
    """Retrieve, answer, show."""
    _corpus.quiet()
    client = QdrantClient(path=str(store_folder(folder)))
    index = open_index(folder, client, MiniLM())
    llm = SpecFuseLLM(members="demo", max_tokens=60)
    engine = index.as_query_engine(
        llm=llm, streaming=True, similarity_top_k=NEIGHBOURS, text_qa_template=PROMPT, response_mode="simple_summarize"
    )
    response: Any = engine.query(question)
    print(f"Question  {question}\n\nAnswer")
    response.print_response_stream()
    print("\n\nSources")
    for node in response.source_nodes:
        print(f"{node.metadata['source']}  {node.metadata['heading']}")
    client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--store", type=Path, default=_corpus.STORE, help="folder of the vector store")
    options = parser.parse_args()
    try:
        answer(options.question, options.store)
    except SpecFuseError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
