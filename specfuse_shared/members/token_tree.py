"""The tokens of one round after a member's committed context, as a tree.

Drafted tokens and every candidate's tokens share nodes where they share a prefix, so nothing is fed twice. Pure
bookkeeping: ids and positions, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ROOT = -1
_TOKEN_BITS = 32


@dataclass(frozen=True, slots=True)
class Branch:
    """A continuation: the first `base` committed answer tokens, then `tokens`."""

    base: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class TokenTree:
    """Nodes by number; a parent always has a smaller number than its children.

    A round makes thousands of nodes, so each is an entry in lists of numbers, which Python's garbage collector does not
    look at: its token and its parent, how many committed tokens it may see (`trunks`), its place in the sequence
    (`positions`) and in the cache (`slots`).
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    trunks: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int | None] = field(default_factory=list)
    _children: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, parent: int, trunk: int, token: int) -> int:
        """The node of `token` after `parent` (or after the first `trunk` committed tokens), made if new."""
        key = _key(parent, trunk, token)
        node = self._children.get(key)
        if node is None:
            node = self._children[key] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.trunks.append(trunk)
            self.positions.append(trunk if parent == ROOT else self.positions[parent] + 1)
            self.slots.append(None)
        return node

    def path(self, trunk: int, tokens: tuple[int, ...]) -> list[int]:
        """Nodes of `tokens` in a row after the first `trunk` committed tokens."""
        node, path = ROOT, []
        for token in tokens:
            node = self.child(node, trunk, token)
            path.append(node)
        return path

    def find(self, trunk: int, tokens: tuple[int, ...]) -> list[int]:
        """Like `path`, up to the first missing node; makes none."""
        node, path = ROOT, []
        for token in tokens:
            next_node = self._children.get(_key(node, trunk, token))
            if next_node is None:
                break
            node = next_node
            path.append(node)
        return path

    def below(self, node: int, trunk: int, numbers: Iterable[int]) -> list[int]:
        """Those among `numbers`, parents first, that descend from `node` (at the root: after `trunk` tokens)."""
        descendants: set[int] = set()
        for number in numbers:
            parent = self.parents[number]
            if parent in descendants or (parent == node and (node != ROOT or self.trunks[number] == trunk)):
                descendants.add(number)
        return sorted(descendants)

    def take_over(self, tree: TokenTree, root: int, below: Iterable[int], trunk: int) -> dict[int, int]:
        """Copy the nodes `below` the `root` of another `tree`, after `trunk` tokens; returns old → new number."""
        numbers = {root: ROOT}
        for old in below:
            numbers[old] = self.child(numbers[tree.parents[old]], trunk, tree.tokens[old])
        return numbers

    def lineage(self, node: int) -> list[int]:
        """`node` and its ancestors, nearest first."""
        ancestors = []
        while node != ROOT:
            ancestors.append(node)
            node = self.parents[node]
        return ancestors


def _key(parent: int, trunk: int, token: int) -> int:
    """A node by its parent and its token; by the trunk where it has no parent."""
    return ~(trunk << _TOKEN_BITS | token) if parent == ROOT else parent << _TOKEN_BITS | token
