"""Greedy decoding of one or several sequences with llama.cpp alone, by llama-cpp-python's C interface."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from specfuse_shared.members.llamacpp.library import may_repack

_QUIET = lib.llama_log_callback(lambda level, text, data: None)
"""A module constant, since the library calls it for every line of its log."""


class LlamaPeer:
    """The model of a GGUF file, on `threads` threads."""

    def __init__(self, file: Path, threads: int, sequences: int = 8, context: int = 4096) -> None:
        lib.llama_log_set(_QUIET, None)
        params = lib.llama_model_default_params()
        params.use_extra_bufts = may_repack(lib)  # the setting of our members
        self.model = lib.llama_model_load_from_file(str(file).encode(), params)
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.kv_unified = context, sequences, True
        options.n_threads = options.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, options)
        self.memory = lib.llama_get_memory(self.context)
        self.vocabulary = lib.llama_model_get_vocab(self.model)
        self.size = lib.llama_vocab_n_tokens(self.vocabulary)
        self.batch = lib.llama_batch_init(2048, 0, 1)

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int, ends: bool = False) -> list[list[int]]:
        """Greedy tokens after each prompt, with one batch a step; with `ends`, an answer can end before `tokens`."""
        lib.llama_memory_clear(self.memory, True)
        answers: list[list[int]] = [[] for _ in prompts]
        fed = [(n, at, token) for n, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        last = {n: len(prompt) - 1 for n, prompt in enumerate(prompts)}
        open_ones = set(range(len(prompts)))
        while open_ones:
            self._run([(n, at, token, at == last[n]) for n, at, token in fed])
            fed = []
            for row, n in enumerate(sorted(open_ones)):
                logits = np.ctypeslib.as_array(lib.llama_get_logits(self.context), (len(open_ones), self.size))[row]
                token = int(logits.argmax())
                if not (ends and lib.llama_vocab_is_eog(self.vocabulary, token)):
                    answers[n].append(token)
                if len(answers[n]) < tokens and not (ends and lib.llama_vocab_is_eog(self.vocabulary, token)):
                    last[n] += 1
                    fed.append((n, last[n], token))
            open_ones = {n for n, _, _ in fed}
        return answers

    def speed(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Tokens a second."""
        start = time.perf_counter()
        self.decode(prompts, tokens)
        return len(prompts) * tokens / (time.perf_counter() - start)

    def _run(self, tokens: Sequence[tuple[int, int, int, bool]]) -> None:
        batch: Any = self.batch
        batch.n_tokens = len(tokens)
        for slot, (sequence, position, token, has_logits) in enumerate(tokens):
            batch.token[slot], batch.pos[slot] = token, position
            batch.n_seq_id[slot], batch.seq_id[slot][0], batch.logits[slot] = 1, sequence, has_logits
        if status := lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode: {status}")
