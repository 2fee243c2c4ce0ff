"""A member in this process: a causal language model of transformers."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from specfuse_shared.config import EnsembleConfig
from specfuse_shared.loading.gguf import OnStage
from specfuse_shared.loading.planning import plan_ensemble
from specfuse_shared.loading.pretrained import load_pretrained, prepared
from specfuse_shared.member_config import MemberConfig
from specfuse_shared.members.base import CacheUse, Draft, Question, Stage, Thought, Verdict
from specfuse_shared.members.branchwise import new_sequence
from specfuse_shared.members.probe import probe
from specfuse_shared.members.sequence import PREFILL_CHUNK, DraftRequest, ForwardRequest, LogprobRequest
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.placement.plan import Assignment, MemoryNeed
from specfuse_shared.placement.sizing import weight_bytes
from specfuse_shared.runtime.sampler import Sampler, masked
from specfuse_shared.sampling_params import SamplingParams
from specfuse_shared.text.chat_template import PLAIN_TURN_ENDS, PromptEncoder
from specfuse_shared.text.codec import Encoding, common_prefix, cut_candidate, whole_characters
from specfuse_shared.text.constraint import MemberConstraint, token_vocabulary
from specfuse_shared.text.stops import find_stop, partial_stop
from specfuse_shared.types import MemberReport, Message, Tool

_MOST_EXTRA_TOKENS = 8
"""A draft may run over by this much to finish a character."""


class LocalMember:
    """A causal language model of transformers in this process, in its `place` or where it fits by itself.

    `loaded`: model and tokenizer that are in memory already; else they are read as `config` says.
    """

    def __init__(
        self,
        config: MemberConfig,
        *,
        cache_dir: str | None = None,
        on_stage: OnStage = lambda stage: None,
        place: Assignment | None = None,
        execution: str = "auto",
        loaded: tuple[Any, Any] | None = None,
    ) -> None:
        start = time.monotonic()
        self.name, self.weight = config.label, config.weight
        if loaded is not None:
            (model, tokenizer), place = loaded, _place_of(loaded[0], self.name)
            model = prepared(model, config)
        else:
            place = place or plan_ensemble(EnsembleConfig([config], cache_dir=cache_dir)).of(self.name)
            model, tokenizer = load_pretrained(config, cache_dir, on_stage, place)
        self.devices = place.caches
        self.prompts = PromptEncoder(
            tokenizer, config.chat_template, config.template_options, self.name, config.thinking
        )
        self.codec, self.thinks = self.prompts.codec, self.prompts.thinks
        on_stage("checking parity")
        way = probe(model, self.name, execution)
        self.runner = way.runner(model)
        self.stop_ids = _stop_ids(model, tokenizer, self.prompts, config)
        special = sorted(_special_ids(tokenizer, model) - set(self.stop_ids))
        self.banned_token_ids = torch.tensor(special, dtype=torch.long, device=self.runner.device)
        text = model.config.get_text_config(decoder=True)
        limits = [config.max_context, getattr(text, "max_position_embeddings", None)]
        self.context_limit: int | None = min((n for n in limits if n), default=None)
        self.bytes_per_token = way.bytes_per_token
        self.vocabulary_size: int = model.get_input_embeddings().num_embeddings
        self._report = MemberReport(
            name=self.name,
            model=config.model,
            architecture=type(model).__name__,
            parameters=model.num_parameters(),
            memory_bytes=weight_bytes(model),
            device=place.place,
            quantization=place.quantization,
            dtype=str(model.dtype).removeprefix("torch."),
            attention=text._attn_implementation,
            verification=way.verification,
            probe_error=way.error,
            graphs=way.execution,
            template=self.prompts.kind,
            context=self.context_limit,
            stop_token_ids=self.stop_ids,
            load_seconds=time.monotonic() - start,
        )

    @property
    def report(self) -> MemberReport:
        if self.runner.static is None:
            return self._report
        return replace(self._report, graphs=self.runner.static.graphs.report)

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        return self.prompts.encode(messages, tools)

    @cached_property
    def vocabulary(self) -> Any:
        """The tokens as the grammar library reads them; built when the first grammar comes."""
        return token_vocabulary(self.prompts.tokenizer, self.vocabulary_size, self.stop_ids)

    def open(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> LocalSession:
        return LocalSession(self, prompt, params, seed)

    def cache_use(self) -> CacheUse:
        pool, prefixes = self.runner.pool, self.runner.prefixes
        return CacheUse(pool.memory_bytes, prefixes.memory_bytes, prefixes.reused_tokens)

    def remember(self, limit: int) -> None:
        self.runner.prefixes.limit = limit
        self.runner.prefixes.shrink(limit)


class LocalSession:
    """One answer of a `LocalMember`. Invariant while fusing: cached ids = prompt + canonical ids of the answer."""

    def __init__(self, member: LocalMember, prompt: Sequence[int], params: SamplingParams, seed: int) -> None:
        self._member, self._codec = member, member.codec
        self._prompt = tuple(prompt)
        self.prompt_tokens = len(self._prompt)
        self.context = new_sequence(member.runner)
        self.encoding = Encoding()
        self._text = ""
        self._sampler = Sampler(params, seed, member.name, member.runner.device)
        self._turn_ends = PLAIN_TURN_ENDS if member.prompts.kind == "plain" else ()
        grammar = params.grammar
        self._constraint = MemberConstraint(grammar, member.vocabulary, member.stop_ids) if grammar else None
        # thinking: how much of the thoughts is given out
        # alone: the trailing answer ids whose text is not all given out yet, and how much of it is
        self._unread, self._shown = 0, 0

    @property
    def answer_tokens(self) -> int:
        return len(self.context.answer)

    @property
    def fed(self) -> int:
        return self.context.fed

    def prefill(self) -> Stage:
        if not self.context.prompt:
            self.context.begin(self._prompt)
        while self.context.prompt_remaining:
            yield ForwardRequest(self.context, prompt=min(self.context.prompt_remaining, PREFILL_CHUNK))

    @property
    def thinking_tokens(self) -> int:
        return max(0, len(self.context.prompt) - self.prompt_tokens)

    def think(self, limit: int, most: int) -> Stage:
        prompts, known = self._member.prompts, len(self.context.answer)
        self._sampler.start(-1 - known)
        ids, ended = yield from self._decode([], min(limit, most - known), None, constraint=None)
        ids = [*self.context.answer, *ids]
        text, end = prompts.thoughts(ids)
        ended = ended or end is not None or len(ids) >= most
        ids = ids[:end] + (prompts.thoughts_closing() if ended else [])
        base = known if end is None else min(end, known)
        branch = Branch(base, tuple(ids[base:]))
        yield ForwardRequest(self.context, (branch,))
        self.context.commit(branch)
        if ended:
            self.context.begin_answer()
        fresh, self._shown = text[self._shown :], 0 if ended else max(self._shown, len(text))
        return Thought(fresh, ended)

    def draft(self, limit: int, round_index: int) -> Stage:
        self._sampler.start(round_index)
        if self._constraint is not None:
            self._constraint.start()
        ids, ended = yield from self._decode([], limit, self._member.banned_token_ids, self._constraint)
        text = self._codec.text_after(self.context.answer, ids)
        while not ended and not whole_characters(text) and len(ids) < limit + _MOST_EXTRA_TOKENS:
            ids, ended = yield from self._decode(ids, 1, self._member.banned_token_ids, self._constraint)
            text = self._codec.text_after(self.context.answer, ids)
        text, turn_over = self._cut_turn(text)
        if ended or turn_over:
            return Draft(whole_characters(text), True, len(ids))
        open_turn = partial_stop(text, self._turn_ends)
        text = text[: len(text) - open_turn] if 0 < open_turn < len(text) else text
        return Draft(cut_candidate(text), False, len(ids))

    def verify(self, questions: Sequence[Question]) -> Stage:
        branches = [self._branch(self._codec.extend(self.encoding, q.text)) for q in questions]
        asking = LogprobRequest(
            [(b, self._member.stop_ids if q.ends else ()) for q, b in zip(questions, branches, strict=True)]
        )
        yield ForwardRequest(self.context, tuple(branches), asking=asking)
        judged = self.context.judge(asking)
        sizes = [self._codec.token_bytes(b.tokens) + [1] * q.ends for q, b in zip(questions, branches, strict=True)]
        return [Verdict(tuple(logprobs), tuple(own)) for logprobs, own in zip(judged, sizes, strict=True)]

    def commit(self, text: str) -> Stage:
        encoding = self._codec.extend(self.encoding, text)
        branch = self._branch(encoding)
        yield ForwardRequest(self.context, (branch,))
        self.context.commit(branch)
        self._text, self.encoding = self._text + text, encoding
        if self._constraint is not None:
            self._constraint.commit(text)

    def draft_alone(self, limit: int, round_index: int) -> Stage:
        self._sampler.start(round_index)
        ids, ended = yield from self._decode([], limit, None, self._constraint)
        read = self.context.answer[: len(self.context.answer) - self._unread]
        pending = [*self.context.answer[len(read) :], *ids]
        text = self._codec.text_after(read, pending)
        fresh, turn_over = self._cut_turn(whole_characters(text)[self._shown :])
        if not (ended or turn_over):
            branch = Branch(len(self.context.answer), tuple(ids))
            yield ForwardRequest(self.context, (branch,))
            self.context.commit(branch)
            fresh = fresh[: len(fresh) - partial_stop(fresh, self._turn_ends)]
            self._shown += len(fresh)
            self._unread = len(pending)
            if self._shown == len(text):
                self._unread = self._shown = 0
        self._text += fresh
        return Draft(fresh, ended or turn_over, len(ids))

    def release(self, remember: bool = False) -> None:
        self.context.release(remember)

    def _decode(
        self, ids: list[int], count: int, blocked: torch.Tensor | None, constraint: MemberConstraint | None
    ) -> Generator[ForwardRequest, None, tuple[list[int], bool]]:
        """Sample `count` more tokens behind the committed answer and `ids`; True if the turn ended."""
        base, ids = len(self.context.answer), list(ids)
        if constraint is None and self.context.drafts_ahead:
            draft = DraftRequest(Branch(base, tuple(ids)), count, self._sampler, blocked)
            yield ForwardRequest(self.context, (draft.branch,))
            yield ForwardRequest(self.context, draft=draft)
            more, ended = self.context.drafted(draft, self._member.stop_ids)
            return ids + more, ended
        for _ in range(count):
            if constraint is not None and constraint.finished:
                return ids, True
            branch = Branch(base, tuple(ids))
            yield ForwardRequest(self.context, (branch,))
            logits = self.context.logits(branch)
            if constraint is not None:
                logits = masked(logits, constraint.allowed())
            token = self._sampler.pick(logits, (*self.context.prompt, *self.context.answer, *ids), blocked)
            if token in self._member.stop_ids:
                return ids, True
            if constraint is not None:
                constraint.advance(token)
            ids.append(token)
        return ids, False

    def _branch(self, encoding: Encoding) -> Branch:
        base = common_prefix(self.context.answer, encoding.ids)
        return Branch(base, encoding.ids[base:])

    def _cut_turn(self, text: str) -> tuple[str, bool]:
        """A base model ends its turn by writing the next turn's header; that header is not part of the answer."""
        match = find_stop(self._text, text, self._turn_ends)
        if match is None:
            return text, False
        return text[: max(0, match.start - len(self._text))].rstrip("\n"), True


def _place_of(model: Any, name: str) -> Assignment:
    """The place of a whole model that is in memory."""
    device, size = str(model.device), weight_bytes(model)
    number_format = str(model.dtype).removeprefix("torch.")
    return Assignment(name, number_format, None, MemoryNeed(size, 0, 0), {"": device}, {device: size}, {device: 1.0})


def _stop_ids(model: object, tokenizer: object, prompts: PromptEncoder, config: MemberConfig) -> tuple[int, ...]:
    """Ids that end a turn: of the generation and model configuration, the tokenizer, the template, and the user."""
    found: set[int] = set(config.stop_token_ids)
    generation, settings = getattr(model, "generation_config", None), getattr(model, "config", None)
    for holder in (generation, settings, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or ())
    if (marker := prompts.turn_end()) is not None:
        found.add(marker)
    return tuple(sorted(found))


def _special_ids(tokenizer: object, model: object) -> set[int]:
    """Control tokens have no text, so no member may write them into the shared answer."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    size = model.get_input_embeddings().num_embeddings  # type: ignore[attr-defined]
    padding = range(len(tokenizer), size)  # type: ignore[arg-type]
    return {i for i, token in added.items() if token.special and i < size} | set(padding)
