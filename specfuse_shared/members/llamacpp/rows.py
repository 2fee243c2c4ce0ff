"""One answer of a recurrent or hybrid model on llama.cpp, whose state cannot be cut: branch by branch.

As in `specfuse_shared.members.local.row_sequence`, every branch goes on from a copy of a state that was kept; a copy is
a sequence that takes a state of its own with its first token. Branches of all answers still share a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from specfuse_shared.members.llamacpp.context import FedToken
from specfuse_shared.members.llamacpp.runner import LlamaRunner
from specfuse_shared.members.llamacpp.sequence import CellRun, Feed, LlamaSequence, LlamaTree
from specfuse_shared.members.local.forwards import ForwardRequest
from specfuse_shared.members.token_tree import Branch


class LlamaRows(LlamaSequence):
    """Runs without nodes are states that stay: in front of the prompt's last token, the previous trunk, the trunk."""

    def release(self, remember: bool = False) -> None:
        super().release()

    def _plan_prompt(self, count: int, planned: Feed) -> None:
        start = len(self.prompt) - self.prompt_remaining
        if start == len(self.prompt) - 1 and start:
            copied = self.context.copy(self._runs[0].sequence, start)
            self._made(CellRun(copied, start), planned)
        run, end = self._runs[-1], min(start + count, max(1, len(self.prompt) - 1))
        end = end if start < end else len(self.prompt)
        last = len(self.prompt) - 1
        planned.tokens += [FedToken(self.prompt[n], n, (run.sequence,), n == last) for n in range(start, end)]
        planned.prompt = end - start

    def _plan_paths(self, paths: Sequence[Sequence[int]], planned: Feed) -> None:
        for path in sorted(paths, key=len, reverse=True):
            if all(node in self._logits.places or node in planned.nodes for node in path):
                continue
            run, first = self._start(path, planned)
            tokens, positions, own = self._tree.tokens, self._tree.positions, (run.sequence,)
            planned.tokens += [FedToken(tokens[node], positions[node], own, True) for node in path[first:]]
            planned.nodes += path[first:]
            planned.grown[id(run)] = run, list(path[first:])

    def _start(self, path: Sequence[int], planned: Feed) -> tuple[CellRun, int]:
        """The run to go on with, and how many of the path's nodes it holds."""
        trunk = self._tree.trunks[path[0]]
        for run in self._runs:
            size = len(run.nodes)
            if size and run.trunk == trunk and run.nodes == list(path[:size]) and id(run) not in planned.grown:
                return run, size
        kept = [run for run in self._runs if not run.nodes and run.trunk <= trunk and run not in planned.made]
        nearest = max(kept, key=lambda run: run.trunk)
        run = self._made(CellRun(self.context.copy(nearest.sequence, nearest.trunk), trunk), planned)
        committed = (*self.prompt, *self.answer)
        lead = range(nearest.trunk, trunk)
        planned.tokens += [FedToken(committed[n], n, (run.sequence,), False) for n in lead]
        return run, 0

    def undo(self, planned: Feed) -> None:
        """What was fed cannot be taken back: those states go."""
        for run, _ in planned.grown.values():
            if run not in planned.made:
                planned.made.append(run)
        if planned.prompt and self._runs[-1] not in planned.made:
            planned.made.append(self._runs[-1])
            self.prompt_remaining = len(self.prompt)
        planned.grown, planned.prompt = {}, 0
        super().undo(planned)

    def _keep(self, branch: Branch, nodes: Sequence[int]) -> None:
        path = self._path(branch)
        states = [run for run in self._runs if not run.nodes]
        if path:
            won = self._state_behind(branch)
            fits = [run for run in states if run.trunk <= len(self.prompt) + branch.base]
            won.trunk, won.nodes = len(self.prompt) + branch.base + len(branch.tokens), []
            states = [states[0], *fits[1:][-1:], won]
        for run in self._runs:
            if run not in states:
                self.context.free(run.sequence)
        self._runs = states

    def _state_behind(self, branch: Branch) -> CellRun:
        """The state behind the branch's last token; fed anew where a longer draft carried it on."""
        path = self._path(branch)
        state = next((state for state in self._runs if state.nodes == path), None)
        if state is None:
            for node in path:
                self._logits.places.pop(node, None)
            self.run(ForwardRequest(self, (branch,)))
            state = next(state for state in self._runs if state.nodes == path)
        return state


def new_sequence(runner: LlamaRunner, keeps_spare: bool = False) -> LlamaSequence:
    """A sequence for one answer, of the kind that the model supports; `keeps_spare` where a cache can."""
    return LlamaRows(runner) if runner.is_recurrent else LlamaTree(runner, keeps_spare)
