"""Many questions at once: each answer arrives with its index as soon as it is finished."""

from __future__ import annotations

import time

from langchain_specfuse import ChatSpecFuse

QUESTIONS = [
    "How does a vaccine work?",
    "What is photosynthesis?",
    "Why do birds migrate?",
    "Name three primary colours.",
]

llm = ChatSpecFuse(members="demo", max_tokens=24)

if __name__ == "__main__":
    began = time.monotonic()
    for index, answer in llm.batch_as_completed(QUESTIONS):
        print(f"{time.monotonic() - began:5.1f} s  {QUESTIONS[index]}  {answer.text}")
