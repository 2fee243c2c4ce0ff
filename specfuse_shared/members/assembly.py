"""The members of an ensemble, and the lanes that run them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from specfuse_shared.config import EnsembleConfig
from specfuse_shared.loading.planning import plan_ensemble
from specfuse_shared.loading.pretrained import LoadProgress, OnProgress, load_tokenizer
from specfuse_shared.member_config import MemberConfig
from specfuse_shared.members.base import Lane, Member, MemberInfo, OnForward
from specfuse_shared.members.lane_thread import LaneThread
from specfuse_shared.members.lanes import lanes_of
from specfuse_shared.members.local import LocalMember
from specfuse_shared.members.local_lane import LocalLane
from specfuse_shared.text.chat_template import PromptEncoder
from specfuse_shared.text.member_text import MemberText

logger = logging.getLogger(__name__)


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


def distant_member(config: MemberConfig, info: MemberInfo, cache_dir: str | None = None) -> Member:
    """A member whose model is elsewhere: its tokenizer and template are read here. Raises `MemberLoadError`."""
    tokenizer = load_tokenizer(config, cache_dir)
    prompts = PromptEncoder(tokenizer, config.chat_template, config.template_options, info.name, config.thinking)
    return Member(info, MemberText(prompts, info.report.stop_token_ids, info.vocabulary_size))


def assemble(members: Sequence[LocalMember], on_forward: OnForward) -> Assembly:
    """Local members in lanes: with one lane there is no thread and nothing to wait for."""
    own, *others = (LocalLane(lane, cores, on_forward) for lane, cores in lanes_of(members))
    return Assembly(tuple(member.member for member in members), own, tuple(map(LaneThread, others)))


def load_members(config: EnsembleConfig, on_progress: OnProgress | None) -> Iterator[LocalMember]:
    """Plan where the members go, then load each into its place. Raises `MemberLoadError`."""
    names = config.names

    def report(name: str, stage: str) -> None:
        index = names.index(name) + 1
        logger.info("member %s (%d of %d): %s", name, index, len(names), stage)
        if on_progress is not None:
            on_progress(LoadProgress(name, index, len(names), stage))

    plan, execution = plan_ensemble(config, convert=True, on_stage=report), config.execution
    for member in config.member_configs:
        tell, place = partial(report, member.label), plan.of(member.label)
        yield LocalMember(member, cache_dir=config.cache_dir, on_stage=tell, place=place, execution=execution)
        tell("ready")
