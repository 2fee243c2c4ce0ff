"""A member in this process.

`InProcessMember` is the part that is independent of the backend: the facts that its lane and answers need.
`LocalMember` runs a causal language model of transformers.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from specfuse_shared.config import OLLAMA, EnsembleConfig, MemberConfig, SamplingParams
from specfuse_shared.errors import MissingTemplateWarning
from specfuse_shared.loading.gguf import OnStage, cache_folder
from specfuse_shared.loading.planning import plan_ensemble
from specfuse_shared.loading.pretrained import MemberFiles, prepared
from specfuse_shared.members.local.probe import Attempt, probe
from specfuse_shared.members.local.sequence import SequenceState, new_sequence
from specfuse_shared.members.local.session import TOKEN_COST, LocalSession
from specfuse_shared.members.session import ids_without_text, stop_ids_of
from specfuse_shared.members.stages import CacheUse, Member, MemberInfo
from specfuse_shared.messages import Message, Tool
from specfuse_shared.placement.plan import Assignment, MemoryNeed
from specfuse_shared.placement.sizing import weight_bytes
from specfuse_shared.runtime.attention import choose_kernels
from specfuse_shared.runtime.cuda_streams import Stopwatch
from specfuse_shared.runtime.fused_norms import pack_weights
from specfuse_shared.runtime.int8_products import use_int8_products
from specfuse_shared.runtime.kv_cache import smallest_row
from specfuse_shared.runtime.merged_products import merge_products
from specfuse_shared.runtime.model_runner import ModelRunner, Reclaimable
from specfuse_shared.runtime.mps import is_mps, mps_turn, warn_untested
from specfuse_shared.runtime.packed_layout import PAGE
from specfuse_shared.runtime.paged_attention import uses_kernel
from specfuse_shared.runtime.pages import PageArena
from specfuse_shared.text.chat_template import MemberText, PromptEncoder
from specfuse_shared.text.codec import Codec
from specfuse_shared.types import MemberReport

_NO_TEMPLATE = (
    "{} has no chat template in its file, and Ollama's own is in another language: prompts of member {!r} are plain "
    'turns, "### User:" and "### Assistant:", which its model may not know. Name the one that it was trained with: '
    "MemberConfig(chat_template=…)"
)


class MemberStream(Protocol):
    """Where the work of a member is queued."""

    def entered(self) -> AbstractContextManager[Any]: ...

    def timed(self) -> Stopwatch: ...

    def wait(self) -> None: ...


class InProcessRunner(Reclaimable, Protocol):
    """Runs the model of a member in this process. `device`: the device of its logits."""

    @property
    def device(self) -> torch.device: ...

    @property
    def stream(self) -> MemberStream: ...

    @property
    def reserve_bytes(self) -> int: ...

    @property
    def reports_argmax(self) -> bool:
        """Whether a forward pass sends its most likely tokens along, because each read from the device is a wait."""
        ...


class InProcessMember(ABC):
    """A member of this process: its text side, and the allowed part of its vocabulary.

    `holders`: objects that name end-of-turn ids. `vocabulary_size`: rows of its logits.
    """

    devices: Mapping[str, float]
    context_limit: int | None
    bytes_per_token: int
    token_cost: float = TOKEN_COST
    """The cost of one more token in a forward pass, as a share of a forward pass with one token."""
    sharing: int = 1
    """How many answers shared its last forward."""

    def __init__(self, config: MemberConfig, tokenizer: Any) -> None:
        self._config = config
        self.name = config.label
        template, options = config.chat_template, config.template_options
        self.prompts = PromptEncoder(tokenizer, template, options, self.name, config.thinking)
        if config.model.startswith(OLLAMA) and self.prompts.kind == "plain":
            warnings.warn(_NO_TEMPLATE.format(config.model, self.name), MissingTemplateWarning, stacklevel=2)

    def _know_vocabulary(self, holders: Sequence[object], size: int) -> None:
        tokenizer = self.prompts.tokenizer
        self.vocabulary_size = size
        named = stop_ids_of((*holders, tokenizer), self.prompts, self._config)
        self.stop_ids = tuple(stop for stop in named if stop < size)  # defaults of an architecture may lie beyond it
        self._special = ids_without_text(tokenizer, size, self.stop_ids)
        self.never_guessed = frozenset((*self._special, *self.stop_ids))
        self.text = MemberText(self.prompts, self.stop_ids, size)

    @property
    def codec(self) -> Codec:
        """Its canonical encoding of answers."""
        return self.text.codec

    @property
    @abstractmethod
    def runner(self) -> InProcessRunner:
        """The model's runner."""

    @property
    @abstractmethod
    def may_guess(self) -> bool:
        """Whether it verifies many tokens in one forward pass, and never reads an answer again."""

    @property
    @abstractmethod
    def report(self) -> MemberReport:
        """Facts about the loaded member."""

    def _reported(self, **facts: Any) -> MemberReport:
        """A report of these facts about the model, and of facts from its text side."""
        return MemberReport(
            name=self.name,
            model=self._config.model,
            template=self.prompts.kind,
            context=self.context_limit,
            stop_token_ids=self.stop_ids,
            **facts,
        )

    @property
    def info(self) -> MemberInfo:
        """The member's current facts for the coordinator."""
        return MemberInfo(
            name=self.name,
            weight=self._config.weight,
            devices=dict(self.devices),
            context_limit=self.context_limit,
            thinks=self.prompts.thinks,
            bytes_per_token=self.bytes_per_token,
            smallest_row=1,
            vocabulary_size=self.vocabulary_size,
            report=self.report,
            drafts_under_grammar=self._config.drafts_under_grammar,
            may_guess=self.may_guess,
        )

    @abstractmethod
    def new_sequence(self, keeps_speculative: bool) -> SequenceState:
        """A sequence for one answer; `keeps_speculative` where a cache can."""

    @abstractmethod
    def cache_use(self) -> CacheUse:
        """Memory for answers now."""

    @abstractmethod
    def remember(self, limit: int) -> None:
        """Keep at most `limit` bytes of past answers, for prompts that begin the same way."""

    def use_cores(self, count: int) -> None:  # noqa: B027 torch has no threads for a single member
        """Use this number of cores from now on, if its engine has separate threads."""

    def close(self) -> None:  # noqa: B027 what torch holds goes with its last reference
        """Free memory that is not freed elsewhere. Safe to call twice."""

    @property
    def member(self) -> Member:
        """The coordinator's view of this member."""
        return Member(self.info, self.text)

    @property
    def vocabulary(self) -> Any:
        return self.text.vocabulary

    @property
    def guess_cost(self) -> float:
        """The minimum acceptance rate of a guessed token.

        With n answers a forward pass takes 1 + c·(n − 1), c = `token_cost`, and gives n tokens. One more guess in
        each takes c·n. A card waits for its weights independent of the number of tokens, so other answers do not
        count there.
        """
        n = self.sharing if all(device == "cpu" for device in self.devices) else 1
        return self.token_cost * n / (1 + self.token_cost * (n - 1))

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        return self.text.encode_prompt(messages, tools)

    def open(self, prompt: Sequence[int], params: SamplingParams, seed: int, speculates: bool = False) -> LocalSession:
        """A new answer to `prompt`; `speculates`: it may guess what comes next, which changes nothing but the work."""
        return LocalSession(self, prompt, params, seed, speculates)

    def blocked(self, *, alone: bool, ends_held: bool) -> torch.Tensor | None:
        """Ids that it must not choose: without text, in a shared answer; at the end of a turn, with `ends_held`."""
        if alone:
            return self._stops if ends_held else None
        return self._banned_while_held if ends_held else self.banned_token_ids

    @cached_property
    def banned_token_ids(self) -> torch.Tensor:
        return self._ids(self._special)

    @cached_property
    def _banned_while_held(self) -> torch.Tensor:
        return self._ids([*self._special, *self.stop_ids])

    @cached_property
    def _stops(self) -> torch.Tensor:
        return self._ids(self.stop_ids)

    def is_blocked(self, token: int, blocked: torch.Tensor | None) -> bool:
        """Whether a token is among ids that `blocked` gave, without asking the device."""
        return blocked is not None and token in self._id_sets[id(blocked)]

    @cached_property
    def _id_sets(self) -> dict[int, frozenset[int]]:
        return {}

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        tensor = torch.tensor(list(ids), dtype=torch.long, device=self.runner.device)
        self._id_sets[id(tensor)] = frozenset(ids)
        return tensor


class LocalMember(InProcessMember):
    """A causal language model of transformers in this process, in its `place` or where it fits by itself.

    `loaded`: model and tokenizer that are in memory already; else they are read as `config` says. `why`: it runs here.
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
        self.why = ""
        if loaded is not None:
            place = _place_of(loaded[0], config.label)
        else:
            place = place or plan_ensemble(EnsembleConfig([config], cache_dir=cache_dir)).of(config.label)
        if any(map(is_mps, place.memory)):
            warn_untested()
        with mps_turn(place.memory):
            self._load(MemberFiles(config, cache_dir, on_stage), place, execution, loaded)

    def _load(
        self,
        files: MemberFiles,
        place: Assignment,
        execution: str,
        loaded: tuple[Any, Any] | None,
    ) -> None:
        start, config = time.monotonic(), files.config
        if loaded is not None:
            model, tokenizer = prepared(loaded[0], config), loaded[1]
        else:
            model, tokenizer = files.pretrained(place)
        parameters, weights = model.num_parameters(), weight_bytes(model)
        if loaded is None:  # a model from the caller stays unchanged
            weights += pack_weights(model)
            if may_be_paged(model.device, execution):
                use_int8_products(model)
            if merges_products(model.device, execution):
                files.on_stage("merging projections")
                merge_products(model)
        self.devices = place.caches
        super().__init__(config, tokenizer)
        files.on_stage("checking parity")
        choose_kernels(torch.device(model.device))
        way = probe(model, self.name, execution, _compiled_code(files, model.device))
        self._runner = way.runner(model)
        holders = (getattr(model, "generation_config", None), model.config)
        self._know_vocabulary(holders, model.get_input_embeddings().num_embeddings)
        self.context_limit = _context_limit(model, config)
        self.bytes_per_token = way.bytes_per_token
        self._report = self._described(place, way, time.monotonic() - start, (parameters, weights))

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    def new_sequence(self, keeps_speculative: bool) -> SequenceState:
        return new_sequence(self.runner, keeps_speculative)

    @property
    def report(self) -> MemberReport:
        graphs = self._report.graphs if self.runner.packed is None else self.runner.packed.graphs.report
        return replace(self._report, why=self.why, graphs=graphs, forwards=self.runner.forwards)

    def _described(self, place: Assignment, way: Attempt, seconds: float, size: tuple[int, int]) -> MemberReport:
        """`size`: parameters, and bytes of all weights."""
        model = self.runner.model
        text = model.config.get_text_config(decoder=True)
        return self._reported(
            architecture=type(model).__name__,
            parameters=size[0],
            memory_bytes=size[1],
            device=place.place,
            quantization=place.quantization,
            dtype=str(model.dtype).removeprefix("torch."),
            attention=text._attn_implementation,
            verification=way.verification,
            probe_error=way.error,
            graphs=way.execution,
            layers=way.layers,
            load_seconds=seconds,
        )

    @property
    def info(self) -> MemberInfo:
        """The member's current facts for the coordinator."""
        smallest = smallest_row(self.runner.device)
        pool = self.runner.pool
        if isinstance(pool, PageArena):
            return replace(super().info, smallest_row=PAGE, cache_tokens=(pool.pages - 1) * PAGE)
        return replace(super().info, smallest_row=smallest)

    @property
    def may_guess(self) -> bool:
        """Whether it verifies many tokens in one forward pass, and never reads an answer again."""
        return self.runner.plan is not None and self.runner.longrope.limit is None

    def cache_use(self) -> CacheUse:
        """Memory for answers now."""
        pool, prefixes = self.runner.pool, self.runner.prefixes
        used, remembered = pool.memory_bytes, prefixes.memory_bytes
        if isinstance(pool, PageArena):  # remembered pages are among those in use
            used = max(0, used - remembered)
        return CacheUse(used, remembered, prefixes.reused_tokens)

    def remember(self, limit: int) -> None:
        """Keep at most `limit` bytes of past answers, for prompts that begin the same way."""
        if limit and isinstance(pool := self.runner.pool, PageArena):
            limit = pool.pages * PAGE * pool.bytes_per_slot  # pages of the past are free as soon as they are wanted
        self.runner.prefixes.limit = limit
        self.runner.prefixes.shrink(limit)


def may_be_paged(device: torch.device, execution: str) -> bool:
    """Whether a model may run over pages on a device with CUDA, where kernels and merged products pay."""
    return execution == "paged" or (execution == "auto" and device.type == "cuda")


def merges_products(device: torch.device, execution: str) -> bool:
    """Whether reading one matrix instead of two pays: a processor has packed weights instead."""
    return device.type == "cuda" and may_be_paged(device, execution)


def _compiled_code(files: MemberFiles, device: torch.device) -> Path | None:
    """Folder for compiled code of layers; None: they are not compiled."""
    if files.config.compile == "off" or not uses_kernel(device):
        return None
    return cache_folder(files.cache_dir) / "compiled"


def _context_limit(model: Any, config: MemberConfig) -> int | None:
    """Tokens of context: the model's, lowered by the configuration; None if neither states any."""
    limits = (config.max_context, getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None))
    return min((limit for limit in limits if limit), default=None)


def _place_of(model: Any, name: str) -> Assignment:
    """The place of a whole model that is in memory."""
    device, size = str(model.device), weight_bytes(model)
    number_format = str(model.dtype).removeprefix("torch.")
    return Assignment(name, number_format, None, MemoryNeed(size, 0, 0), {"": device}, {device: size}, {device: 1.0})
