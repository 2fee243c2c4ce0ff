"""Who may run: a budget of memory and of places."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from specfuse_shared.config import EnsembleConfig
from specfuse_shared.errors import RequestError
from specfuse_shared.fusion.session import AnswerSession
from specfuse_shared.members.base import MemberInfo
from specfuse_shared.placement.plan import LOGIT_BYTES
from specfuse_shared.runtime.cache_sizes import row_capacity

_PREFIX_SHARE = 0.125


class Budget:
    """Bytes that running answers may take on each device, and how many may run and wait.

    What an answer needs on a device: for each member the cache row that holds its prompt and longest answer, and the
    logits of a round's candidates (tokens · vocabulary · 4 bytes). `free`: bytes for answers on each device.
    """

    def __init__(self, config: EnsembleConfig, members: Sequence[MemberInfo], free: Mapping[str, int]) -> None:
        self._config, self._members = config, tuple(members)
        self.max_queue = config.max_queue
        self._sharing = Counter(device for m in members for device in m.devices)
        self.limits = {d: config.cache_bytes or free[d] for d in self._sharing}
        self._taken: Counter[str] = Counter()

    def prefix_bytes(self, member: MemberInfo) -> int:
        """Bytes for what a member remembers of past answers."""
        own = [self.limits[device] / self._sharing[device] / share for device, share in member.devices.items()]
        return int(self._prefix_share * min(own, default=0))

    def needs(self, session: AnswerSession) -> dict[str, int]:
        """Bytes by device. Raises `RequestError` if the answer could not even run alone."""
        needed: dict[str, int] = defaultdict(int)
        prompts = session.participants.prompt_tokens
        drafted = self._config.longest_segment * len(prompts)
        for member in (m for m in self._members if m.name in prompts):
            slots = prompts[member.name] + session.max_tokens + drafted
            slots += session.max_thinking_tokens if member.thinks else 0
            if member.context_limit is not None:
                slots = min(slots, member.context_limit)
            cache = row_capacity(slots, member.smallest_row) * member.bytes_per_token
            for device, share in member.devices.items():
                needed[device] += int(share * (cache + drafted * member.vocabulary_size * LOGIT_BYTES))
        for device, amount in needed.items():
            if amount > self._room(device):
                raise RequestError(
                    f"the answer may need {amount / 2**30:.2f} GiB of cache on {device}, and only "
                    f"{self._room(device) / 2**30:.2f} GiB are there for all answers: shorten the prompt, lower "
                    f"max_tokens, or raise EnsembleConfig(cache_bytes=…)"
                )
        return dict(needed)

    def take(self, needs: Mapping[str, int], running: int) -> bool:
        """Reserve, if there is room."""
        if running >= self._config.max_concurrent:
            return False
        if running and any(self._taken[d] + amount > self._room(d) for d, amount in needs.items()):
            return False
        self._taken.update(needs)
        return True

    def free(self, needs: Mapping[str, int]) -> None:
        self._taken.subtract(needs)

    @property
    def _prefix_share(self) -> float:
        return _PREFIX_SHARE if self._config.reuse_prefixes else 0.0

    def _room(self, device: str) -> float:
        return self.limits[device] * (1 - self._prefix_share)
