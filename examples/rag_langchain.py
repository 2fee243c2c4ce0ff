"""Two small models answer one question over the documents of an observatory, segment by segment.

    python examples/rag_langchain.py ["Your question?"] [--store DIR]

LangChain's parts: text splitter, a Qdrant store on disk, the retriever, a prompt, and ChatSpecFuse as the model.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import _corpus
from rich.console import Console
from rich.text import Text

from specfuse_shared import EnsembleConfig, EnsembleEngine, SpecFuseError, demo_encoder, demo_members

try:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.messages import AIMessageChunk
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
    from langchain_qdrant import QdrantVectorStore
    from langchain_text_splitters import MarkdownHeaderTextSplitter, RecursiveCharacterTextSplitter

    from langchain_specfuse import ChatSpecFuse
except ImportError as error:
    sys.exit(f"This example needs packages that are not installed ({error}): {_corpus.INSTALL}")

COLLECTION = "documents"
SECTION_CHARACTERS = 900
NEIGHBOURS = 2
MAX_TOKENS = 60
COLOURS = ("cyan", "magenta", "green", "yellow", "blue")
PROMPT = ChatPromptTemplate.from_template(
    "Passages from the observatory's pages:\n\n{context}\n\nAnswer from them in a short paragraph: {question}"
)


class MiniLM(Embeddings):
    """The packaged sentence encoder with LangChain's interface."""

    def __init__(self) -> None:
        self._encoder = demo_encoder()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._encoder.encode(texts, normalize_embeddings=True).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def split(documents: list[_corpus.Page]) -> list[Document]:
    """One passage per section, with its titles; long sections are split again."""
    by_header = MarkdownHeaderTextSplitter([("#", "title"), ("##", "section")])
    by_length = RecursiveCharacterTextSplitter(chunk_size=SECTION_CHARACTERS, chunk_overlap=0)
    passages = []
    for page in documents:
        for section in by_length.split_documents(by_header.split_text(page.text)):
            heading = ": ".join(section.metadata.values())
            text = f"{heading}\n{section.page_content}"
            passages.append(Document(text, metadata={"source": page.name, "heading": heading}))
    return passages


def open_store(folder: Path, embedding: Embeddings) -> QdrantVectorStore:
    """The vector store on disk; it is rebuilt after a document has changed."""
    documents = _corpus.pages()
    current = folder / f"langchain-{_corpus.fingerprint(documents, SECTION_CHARACTERS)}"
    if not (current / "complete").exists():
        for old in folder.glob("langchain-*"):
            shutil.rmtree(old)
        store = QdrantVectorStore.from_documents(
            split(documents), embedding, path=str(current), collection_name=COLLECTION
        )
        (current / "complete").touch()
        return store
    return QdrantVectorStore.from_existing_collection(COLLECTION, embedding, path=str(current))


def build_chain(store: QdrantVectorStore, model: ChatSpecFuse) -> Runnable[str, dict[str, Any]]:
    """question → {question, documents, answer}."""
    retriever = store.as_retriever(search_kwargs={"k": NEIGHBOURS})
    context = RunnablePassthrough.assign(context=RunnableLambda(lambda state: join(state["documents"])))
    retrieved = RunnableParallel(question=RunnablePassthrough(), documents=retriever)
    return retrieved.assign(answer=context | PROMPT | model)


def join(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


class Display:
    """Prints each segment on a line as it arrives, then the answer and its sources."""

    def __init__(self, console: Console, members: tuple[str, ...]) -> None:
        self.console, self.colours = console, dict(zip(members, cycle(COLOURS), strict=False))
        self.width = max(map(len, members))
        self.answer, self.sources = Text(), list[Document]()

    def show(self, part: dict[str, Any]) -> None:
        self.sources = part.get("documents", self.sources)
        if "answer" in part:
            self.segment(part["answer"])

    def segment(self, chunk: AIMessageChunk) -> None:
        text = "".join(character if character.isprintable() or character == "\n" else " " for character in chunk.text)
        for segment in chunk.additional_kwargs.get("specfuse_segments", ()):
            member = segment["member"]
            scores = ", ".join(f"{judge} {score:.2g}" for judge, score in segment["scores"].items()) or "all agreed"
            line = Text(f"{member:>{self.width}}  ", style=self.colours[member])
            self.console.print(line.append(text.strip()).append(f"  {scores}", "dim"))
            self.answer.append(text, self.colours[member])

    def finish(self) -> None:
        self.heading("Answer")
        self.console.print(self.answer)
        self.heading("Sources")
        for document in self.sources:
            self.console.print(f"{document.metadata['source']}  {document.metadata['heading']}")

    def heading(self, text: str) -> None:
        self.console.print(f"\n{text}", style="bold")


def answer(question: str, folder: Path, console: Console) -> None:
    """Retrieve, answer, show."""
    _corpus.quiet()
    console.print(f"Question  {question}", style="bold")
    console.print("Loading the encoder and two models; the first run also converts them, which takes a minute.")
    store = open_store(folder, MiniLM())
    with EnsembleEngine(EnsembleConfig(demo_members(), exit="never")) as engine:
        engine.load()
        display = Display(console, engine.config.names)
        display.heading("Segments, with each member's score (none if all drafts were equal)")
        for part in build_chain(store, ChatSpecFuse(engine=engine, max_tokens=MAX_TOKENS)).stream(question):
            display.show(part)
        display.finish()
    store.client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("question", nargs="?", default=_corpus.QUESTION)
    parser.add_argument("--store", type=Path, default=_corpus.STORE, help="folder of the vector store")
    options = parser.parse_args()
    try:
        console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False, emoji=False)
        answer(options.question, options.store, console)
    except SpecFuseError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
