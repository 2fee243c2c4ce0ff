"""The members of an ensemble, and the lanes that run them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from specfuse_shared.config import EnsembleConfig, MemberConfig
from specfuse_shared.errors import ConfigError, MissingExtraError
from specfuse_shared.loading.gguf import OnStage, gguf_file
from specfuse_shared.loading.planning import needed_memory, plan_ensemble
from specfuse_shared.loading.pretrained import MemberFiles
from specfuse_shared.loading.progress import READY, LoadProgress, OnLoadProgress
from specfuse_shared.loading.sources import check_sources
from specfuse_shared.members.loading import load_in_process
from specfuse_shared.members.local.lane import LaneThread, LocalLane, devices_of, lanes_of
from specfuse_shared.members.local.member import InProcessMember
from specfuse_shared.members.stages import Lane, Member, MemberInfo, OnForward
from specfuse_shared.text.chat_template import MemberText, PromptEncoder
from specfuse_shared.text.grammars.guidance import byte_vocabulary

if TYPE_CHECKING:
    from specfuse_shared.members.pipe import PipedLane
    from specfuse_shared.members.server.member import ServerLane

logger = logging.getLogger(__name__)

Stages = Mapping[str, OnStage]


@dataclass(frozen=True, slots=True)
class Assembly:
    """Members in the order of their configuration, and the lanes that have them all between them.

    `own`: the lane whose steps the thread that coordinates runs itself, if there is one; `others` run by themselves.
    """

    members: tuple[Member, ...]
    own: LocalLane | None = None
    others: tuple[Lane, ...] = ()

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return self.others if self.own is None else (self.own, *self.others)

    def read_vocabularies(self) -> None:
        """As the first grammar would have to, where grammars can be used: it holds the interpreter for a second."""
        with suppress(MissingExtraError):
            byte_vocabulary()
            for member in self.members:
                with suppress(ConfigError):  # a tokenizer without a fast version, which a grammar will name
                    member.text.prepare()


def read_prompts(config: MemberConfig, cache_dir: str | None = None) -> PromptEncoder:
    """A member's template and tokenizer, wherever its model runs; no weight is read. Raises `MemberLoadError`."""
    reads_gguf = config.server is None and config.tokenizer is None and gguf_file(config) is not None
    return _prompts_of(config, config.label, reads_gguf, cache_dir)


def _prompts_of(config: MemberConfig, name: str, reads_gguf: bool, cache_dir: str | None) -> PromptEncoder:
    files = MemberFiles(config, cache_dir)
    tokenizer = files.gguf_tokenizer() if reads_gguf else files.tokenizer()
    return PromptEncoder(tokenizer, config.chat_template, config.template_options, name, config.thinking)


def distant_member(config: MemberConfig, info: MemberInfo, cache_dir: str | None = None) -> Member:
    """A member whose model is elsewhere: its tokenizer and template are read here. Raises `MemberLoadError`."""
    prompts = _prompts_of(config, info.name, info.report.backend == "llama.cpp", cache_dir)
    return Member(info, MemberText(prompts, info.report.stop_token_ids, info.vocabulary_size))


def assemble(members: Sequence[InProcessMember], on_forward: OnForward, cache_bytes: int | None = None) -> Assembly:
    """Local members in lanes: with one lane there is no thread and nothing to wait for."""
    planned = lanes_of(members)
    alike = Counter(devices_of(lane[0]) for lane, _ in planned)  # lanes of a processor divide its memory
    lanes = [LocalLane(lane, cores, on_forward, cache_bytes, 1 / alike[devices_of(lane[0])]) for lane, cores in planned]
    first_lane = lanes[0] if lanes else None
    return Assembly(tuple(member.member for member in members), first_lane, tuple(map(LaneThread, lanes[1:])))


def assemble_ensemble(config: EnsembleConfig, on_forward: OnForward, on_progress: OnLoadProgress | None) -> Assembly:
    """The members wherever they are: those behind servers are reached first. Raises `MemberLoadError`."""
    check_sources(config)
    stages = _stages(config, on_progress)
    served = [member for member in config.member_configs if member.server is not None]
    unserved = [member for member in config.member_configs if member.server is None]
    member_named: dict[str, Member] = {}
    lanes: list[Lane] = []
    try:
        if served:
            lane = _server_lane(served, config, on_forward, stages)
            lanes.append(lane)
            member_named |= {member.name: member.member for member in lane.served.values()}
        if config.runtime == "ray" and unserved:
            for config_of, actor in zip(unserved, _ray_lanes(unserved, config, on_forward, stages), strict=True):
                lanes.append(actor)
                member_named[config_of.label] = distant_member(config_of, actor.members[0], config.cache_dir)
            unserved = []
        local = assemble(tuple(load_members(config, unserved, stages)), on_forward, config.cache_bytes)
    except BaseException:
        for opened in lanes:
            opened.close()
        raise
    member_named |= {member.name: member for member in local.members}
    return Assembly(tuple(member_named[name] for name in config.names), local.own, (*local.others, *lanes))


def load_members(config: EnsembleConfig, here: Sequence[MemberConfig], stages: Stages) -> Iterator[InProcessMember]:
    """Plan where the members of this machine go, then load each into its place. Raises `MemberLoadError`."""
    if not here:
        return
    plan = plan_ensemble(config, convert=True, on_stage=stages)
    for member in here:
        on_stage, place = stages[member.label], plan.of(member.label)
        yield load_in_process(
            member, cache_dir=config.cache_dir, on_stage=on_stage, place=place, execution=config.execution
        )
        on_stage(READY)


def _stages(config: EnsembleConfig, on_progress: OnLoadProgress | None) -> Stages:
    """For each member, what is called with the stages of its loading."""

    def report(index: int, name: str, stage: str) -> None:
        logger.info("member %s (%d of %d): %s", name, index, len(config.names), stage)
        if on_progress is not None:
            on_progress(LoadProgress(name, index, len(config.names), stage))

    return {name: partial(report, index, name) for index, name in enumerate(config.names, 1)}


def _ray_lanes(
    members: Sequence[MemberConfig], config: EnsembleConfig, on_forward: OnForward, stages: Stages
) -> list[PipedLane]:
    try:
        from specfuse_shared.members.ray import ray_lanes
    except ModuleNotFoundError as error:
        raise MissingExtraError('runtime="ray"', "ray") from error

    for member in members:
        stages[member.label]("loading on a node of the cluster")
    memory_of = partial(needed_memory, cache_dir=config.cache_dir)
    lanes = ray_lanes(members, memory_of, config.ray_address, config.execution, config.cache_bytes, on_forward)
    for member in members:
        stages[member.label](READY)
    return lanes


def _server_lane(
    members: Sequence[MemberConfig], config: EnsembleConfig, on_forward: OnForward, stages: Stages
) -> ServerLane:
    try:
        from specfuse_shared.members.server.member import ServerLane, ServerMember
    except ModuleNotFoundError as error:
        raise MissingExtraError("A member behind a server", "servers") from error

    read = []
    for member in members:
        stages[member.label]("reading the tokenizer")
        read.append(ServerMember(member, config.cache_dir))
        stages[member.label](f"asking {member.server}")
    lane = ServerLane(read, on_forward)
    for member in members:
        stages[member.label](READY)
    return lane
