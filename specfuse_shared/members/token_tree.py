"""The tokens of one round that stand behind a member's committed context, as a tree.

Drafted tokens and every candidate's tokens share nodes where they share a prefix, so nothing is fed twice. Pure
bookkeeping: ids and positions, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ROOT = -1


@dataclass(frozen=True, slots=True)
class Branch:
    """A continuation: the first `base` committed answer tokens, then `tokens`."""

    base: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Node:
    """One token. `trunk`: committed tokens it may see; `position`: its place in the sequence; `slot`: in the cache."""

    token: int
    parent: int
    trunk: int
    position: int
    slot: int | None = None


@dataclass(slots=True)
class TokenTree:
    """Nodes by number; a parent always has a smaller number than its children."""

    nodes: list[Node] = field(default_factory=list)
    _children: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def child(self, parent: int, trunk: int, token: int) -> int:
        """The node of `token` behind `parent` (or behind the first `trunk` committed tokens), made if new."""
        key = (parent, trunk, token)
        if key not in self._children:
            position = trunk if parent == ROOT else self.nodes[parent].position + 1
            self.nodes.append(Node(token, parent, trunk, position))
            self._children[key] = len(self.nodes) - 1
        return self._children[key]

    def path(self, trunk: int, tokens: tuple[int, ...]) -> list[int]:
        """Nodes of `tokens` in a row behind the first `trunk` committed tokens."""
        node, path, known = ROOT, [], self._children
        for token in tokens:
            next_node = known.get((node, trunk, token))
            node = self.child(node, trunk, token) if next_node is None else next_node
            path.append(node)
        return path

    def find(self, trunk: int, tokens: tuple[int, ...]) -> list[int]:
        """As `path`, as far as there are nodes; makes none."""
        node, path = ROOT, []
        for token in tokens:
            next_node = self._children.get((node, trunk, token))
            if next_node is None:
                break
            node = next_node
            path.append(node)
        return path

    def below(self, node: int, trunk: int, numbers: Iterable[int]) -> list[int]:
        """Those of `numbers`, parents first, that descend from `node` (of those at the root: behind `trunk` tokens)."""
        descendants: set[int] = set()
        for number in numbers:
            parent = self.nodes[number].parent
            if parent in descendants or (parent == node and (node != ROOT or self.nodes[number].trunk == trunk)):
                descendants.add(number)
        return sorted(descendants)

    def lineage(self, node: int) -> list[int]:
        """`node` and its ancestors, nearest first."""
        ancestors = []
        while node != ROOT:
            ancestors.append(node)
            node = self.nodes[node].parent
        return ancestors
