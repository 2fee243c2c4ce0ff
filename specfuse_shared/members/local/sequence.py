"""A member's cached sequence of one answer: a committed trunk, and the tree of tokens tried in this round.

`SequenceState` is what a member needs of a model: read the prompt, make the next-token logits known along branches,
keep the winner. It knows ids, not text.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from specfuse_shared.members.local.forwards import (
    PREFILL_CHUNK,
    ChosenTokens,
    DraftRequest,
    ForwardRequest,
    LogprobRequest,
    NodeLogits,
    Place,
)
from specfuse_shared.members.token_tree import ROOT, Branch, TokenTree
from specfuse_shared.runtime.cache.prefix_cache import SHORTEST_PREFIX, common_length
from specfuse_shared.runtime.logprobs import PendingLogprobs, TokenRow
from specfuse_shared.runtime.model_runner import Reclaimable


class SequenceState(ABC):
    """The state of one answer in one model.

    `prompt` is frozen, and `prompt_remaining` counts its tokens that are not in the cache yet; `answer` are the
    committed answer ids; between rounds the cache holds `prompt + answer`, and the `spare` tokens behind it that may
    come next. `computed_tokens` counts those that went through the model after the prompt, in so many `forwards`;
    `read_tokens` those of the prompt.
    """

    copies_prompts = False
    """Whether it takes over what other answers of the model have read of a prompt that begins like its own."""

    def __init__(self, runner: Reclaimable, keeps_spare: bool = False) -> None:
        self.runner = runner
        self.keeps_spare = keeps_spare
        self.prompt: tuple[int, ...] = ()
        self.prompt_remaining = 0
        self.answer: tuple[int, ...] = ()
        self.computed_tokens = self.forwards = self.read_tokens = 0
        self.is_sound = True
        """False after a fault: nothing of it is copied or remembered."""
        self._common = weakref.WeakKeyDictionary[SequenceState, int]()
        self._end: torch.Tensor | None = None
        self._end_place: Place | None = None
        self._forget_tree()

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.prompt) + len(self.answer)

    def prefill(self, prompt: Sequence[int]) -> None:
        """Feed a whole prompt, once."""
        self.begin(prompt)
        while self.prompt_remaining:
            self.run(ForwardRequest(self, prompt=min(self.prompt_remaining, PREFILL_CHUNK)))

    def extend(self, branches: Sequence[Branch]) -> None:
        """Make the next-token logits known after every token of each branch, feeding only what is new."""
        self.run(ForwardRequest(self, tuple(branches)))

    def needs(self, request: ForwardRequest) -> bool:
        """Whether the request holds anything that the model has not seen."""
        if request.draft is not None:
            return True
        if request.prompt:
            return self.prompt_remaining > 0
        if request.logprobs is not None:
            lines = [self._line(branch, bool(stops)) for branch, stops in request.logprobs.questions]
        else:
            lines = [self._path(branch) for branch in request.branches]
        fed = self._logits.places
        for line in lines:
            for node in line:
                if node not in fed and node != ROOT:
                    return True
        return False

    def knows(self, branch: Branch) -> int:
        """How many of the branch's tokens, from its first on, went through the model."""
        path = self._paths.get((branch.base, branch.tokens)) or self._tree.find(*self._behind(branch))
        count = next((n for n, node in enumerate(path) if node not in self._logits.places), len(path))
        return max(0, count - (branch.base < len(self.answer)))

    @property
    def room(self) -> int:
        """Tokens for which there is a place without taking more memory; 0 where only what has to be fed can be."""
        return 0

    def logits(self, branch: Branch) -> torch.Tensor:
        """Next-token logits (V) after the branch, which must have been extended."""
        path = self._path(branch)
        return self._logits_row(path[-1] if path else ROOT)

    def likeliest(self, branch: Branch) -> int | None:
        """The likeliest token after the branch where the forward that fed it told; all of those wait but once."""
        path = self._path(branch)
        place = self._logits.likeliest(path[-1]) if path else self._end_place
        return None if place is None else place[0].token(place[1])

    def logprobs(self, branch: Branch, stop_ids: Sequence[int] = ()) -> list[float]:
        """Natural log p of each token of a branch given all before it; waits for the device.

        With stop ids, one more entry: log p that any of them comes next (the member's end of turn).
        """
        return self.judge(LogprobRequest([(branch, stop_ids)])).read()[0]

    def judge(self, request: LogprobRequest) -> PendingLogprobs:
        """Let the device find the log p of branches that were extended, without waiting for it."""
        pending = self.judgement(request)
        PendingLogprobs.together([pending])
        return pending

    def judgement(self, request: LogprobRequest) -> PendingLogprobs:
        """The same, but for `PendingLogprobs.together` to start."""
        lines = [TokenRow(self._line(branch, bool(stops)), branch.tokens, stops) for branch, stops in request.questions]
        return PendingLogprobs(lines, self._logits_row, request.top)

    @property
    def drafts_ahead(self) -> bool:
        """Whether it takes feeds that draft; else tokens are chosen one by one."""
        return False

    def may_draft_ahead(self, branch: Branch) -> bool:
        """Whether it takes one now that goes on from this branch."""
        return False

    def draft_behind(self, branch: Branch) -> None:  # noqa: B027 nothing is in the way where tokens come one by one
        """Forget what would keep a draft from going on ahead behind this branch."""

    def drafted(self, draft: DraftRequest, chosen: ChosenTokens, stop_ids: Sequence[int]) -> tuple[list[int], bool]:
        """Tokens of a draft that was fed, up to the end of the turn, and whether that came; waits for the device."""
        raise NotImplementedError

    def commit(self, branch: Branch) -> None:
        """The branch becomes the trunk; every other branch is dropped."""
        self.extend([branch])  # feeds nothing where the caller saw to it
        path = self._path(branch)
        end = self._logits_row(path[-1] if path else ROOT).clone()
        self._end_place = self._logits.likeliest(path[-1]) if path else self._end_place
        self._keep(branch, path[len(path) - len(branch.tokens) :])
        self.answer, self._end = self.answer[: branch.base] + branch.tokens, end
        self._forget_tree()

    def begin_answer(self) -> None:
        """What is committed so far is part of the prompt: thoughts, behind which the answer begins."""
        self.prompt, self.answer = self.prompt + self.answer, ()
        self._paths.clear()  # branches count from the answer's beginning

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> None:
        """Take a prompt; what is known of it from earlier answers needs no reading."""

    @abstractmethod
    def release(self, remember: bool = False) -> None:
        """Free the cache; `remember` it for later prompts that begin the same way. Safe to call twice."""

    def waits_for(self, other: SequenceState, own_left: int, other_left: int) -> bool:
        """Whether reading on had better wait until `other` has read the prefix that both prompts have in common.

        Both still have to read so many tokens (`prompt_to_read`).
        """
        if not (self.copies_prompts and other.copies_prompts):
            return False
        common = self._common.get(other)
        if common is None:
            common = self._common[other] = common_length(self.prompt[:-1], other.prompt)
        own, read = len(self.prompt) - own_left, len(other.prompt) - other_left
        return own <= read < common and common >= own + SHORTEST_PREFIX

    @property
    def prompt_to_read(self) -> int:
        """Tokens of the prompt that will have to go through the model: those that no answer has read for it."""
        own = read = len(self.prompt) - self.prompt_remaining
        for other, common in self._common.items():
            read = max(read, min(common, len(other.prompt) - other.prompt_remaining))
        return self.prompt_remaining - (read - own if read >= own + SHORTEST_PREFIX else 0)

    @abstractmethod
    def run(self, request: ForwardRequest) -> None:
        """Feed what a request holds that the model has not seen, in forwards of its own."""

    def run_together(self, requests: Sequence[ForwardRequest]) -> None:
        """The same for many sequences of one model, where they are of this kind."""
        for request in requests:
            request.sequence.run(request)

    @abstractmethod
    def _keep(self, branch: Branch, nodes: Sequence[int]) -> None:
        """Make the cache hold the trunk up to `branch.base` and then `nodes`."""

    def _path(self, branch: Branch) -> Sequence[int]:
        """The branch's nodes."""
        base, tokens = key = branch.base, branch.tokens
        nodes = self._paths.get(key)
        if nodes is None:
            trunk, behind = self._behind(branch)
            before = self._paths.get((base, tokens[:-1])) if len(behind) > 1 else None
            if before is None:
                nodes = self._tree.path(trunk, behind)
            else:  # drafts and guesses grow by one token after the other
                nodes = [*before, self._tree.child(before[-1], trunk, tokens[-1])]
            self._paths[key] = nodes
        return nodes

    def _behind(self, branch: Branch) -> tuple[int, tuple[int, ...]]:
        """The branch as tokens behind so much of the trunk; at an inner point, led by a copy of the token before it."""
        trunk = len(self.prompt) + branch.base
        if branch.base == len(self.answer):
            return trunk, branch.tokens
        last = (self.answer[branch.base - 1] if branch.base else self.prompt[-1],)
        return trunk - 1, last + branch.tokens

    def _logits_row(self, node: int) -> torch.Tensor:
        if node == ROOT:
            assert self._end is not None, "prefill comes first"
            return self._end
        return self._logits.row(node)

    def _line(self, branch: Branch, ends: bool) -> Sequence[int]:
        """The nodes whose logits judge the branch's tokens, and what follows them if it `ends`."""
        if not branch.tokens and not ends:
            return []
        path = self._path(branch)
        line = path if branch.base < len(self.answer) else [ROOT, *path]
        return line[: len(branch.tokens) + ends]

    def _forget_tree(self) -> None:
        self._tree = TokenTree()
        self._paths: dict[tuple[int, tuple[int, ...]], Sequence[int]] = {}
        self._logits = NodeLogits()
