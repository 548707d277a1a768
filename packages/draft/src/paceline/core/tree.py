"""DraftTree: the proposal of a drafter.

Node 0 is the root: the last committed token, whose keys and values the target does not have yet. Each other node is a
drafted token that follows its parent. A chain is a tree without branches. The root alone is plain decoding.

    DraftTree.chain(7, [1, 2, 3])                  # 7 -> 1 -> 2 -> 3
    DraftTree.of(7, tokens=[1, 2, 9], parent=[0, 1, 0])   # 7 -> 1 -> 2 and 7 -> 9
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(eq=False)
class DraftTree:
    """A tree of drafted tokens after the last token of a row.

    tokens       int64 [n]; tokens[0] is the root, already committed.
    parent       int64 [n]; parent[0] is -1, and parents come before their children.
    probe        bool [n] or None: nodes that are run only for their predictions and never accepted (lookahead).
                 Children of a probe are probes.
    hidden       float tensor [n, H] or None: states of the nodes after the target's layers that the drafter has run.
                 Their keys and values are in the cache after the row, and `verify` goes on from there.
    chances      float64 [n] or None: the drafter's estimate of the probability that a node and its ancestors are
                 accepted.
    origin       int64 [n] or None: in a tree that was cut, each node's number in the tree that was proposed.
    source       name of the drafter that proposed it, for reports.
    owner        the drafter that proposed it, set by the engine and read by `Round.is_from`.
    calls        number of a draft model's forwards, one after another, that it took."""

    tokens: IntArray
    parent: IntArray
    probe: NDArray[np.bool_] | None = None
    hidden: Any = None
    chances: Floats | None = None
    origin: IntArray | None = None
    source: str = ""
    owner: Any = field(default=None, repr=False)
    calls: int = 0

    @classmethod
    def root(cls, token: int) -> DraftTree:
        """Make a tree without drafted tokens. token: the last committed token."""
        return cls(np.array([token]), np.array([-1]))

    @classmethod
    def chain(cls, root: int, drafted: Sequence[int] | IntArray, **kw: Any) -> DraftTree:
        """Make a chain: `root`, then `drafted`."""
        n = len(drafted) + 1
        tokens = np.empty(n, np.int64)
        tokens[0] = root
        tokens[1:] = drafted
        tree = cls(tokens, np.arange(-1, n - 1), **kw)
        tree.depth, tree.max_depth = np.arange(n), n - 1
        return tree

    @classmethod
    def of(cls, root: int, tokens: Sequence[int], parent: Sequence[int], **kw: Any) -> DraftTree:
        """Make a tree of drafted `tokens`. parent: number of each token's parent (0 is the root, 1 the first token)."""
        tree = cls(np.array([root, *tokens], np.int64), np.array([-1, *parent], np.int64), **kw)
        if (tree.parent[1:] >= np.arange(1, len(tree))).any() or (tree.parent[1:] < 0).any():
            raise ValueError("a node's parent must come before it, and node 0 is the only root")
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the node before it."""
        return self.max_depth == len(self) - 1

    @cached_property
    def depth(self) -> IntArray:
        """Depth of each node, int64 [n], 0 for the root. A node's position is the root's position plus its depth."""
        return depths(self.parent)

    @cached_property
    def max_depth(self) -> int:
        """Largest number of tokens that this draft can add."""
        return max(self.depth.tolist())

    @cached_property
    def _children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in range(len(self))]
        for child, above in enumerate(self.parent.tolist()):
            if above >= 0 and (self.probe is None or not self.probe[child]):
                children[above].append(child)
        return children

    @property
    def may_be_cut(self) -> bool:
        """Whether nodes may be removed after drafting: there are no probes and no states."""
        return self.probe is None and self.hidden is None

    def children(self, node: int) -> list[int]:
        """The children of `node` that may be accepted, without probes."""
        return self._children[node]

    def clipped(self, max_depth: int) -> DraftTree:
        """The tree without nodes deeper than `max_depth`. The root always stays."""
        if len(self) - 1 <= max_depth or self.depth.max() <= max(max_depth, 0):
            return self
        keep = np.flatnonzero(self.depth <= max(max_depth, 0))
        if self.hidden is not None and keep[-1] >= len(keep):
            raise ValueError("a self-drafter's tree must keep to row.max_draft: its nodes are already cached")
        return self.keeping(keep)

    def keeping(self, nodes: IntArray) -> DraftTree:
        """The tree with only `nodes`, int64, ascending: the root, and other nodes with their parents."""
        new_index = np.full(len(self), -1)
        new_index[nodes] = np.arange(len(nodes))
        parent = np.where(self.parent[nodes] < 0, -1, new_index[self.parent[nodes]])
        arrays = ("tokens", "probe", "hidden", "chances")
        selected = {name: values[nodes] for name in arrays if (values := getattr(self, name)) is not None}
        origin = nodes if self.origin is None else self.origin[nodes]
        return replace(self, parent=parent, origin=origin, **selected)

    def proposed(self, path: Sequence[int]) -> list[int]:
        """The numbers that the nodes of `path` had in the tree as it was proposed."""
        return list(path) if self.origin is None else self.origin[list(path)].tolist()

    def trunk(self) -> IntArray:
        """The drafted tokens, int64, on the path that takes the first child of each node, without probes."""
        if self.is_chain and self.probe is None:
            return self.tokens[1:]
        chain, node = [], 0
        while children := self.children(node):
            node = children[0]
            chain.append(int(self.tokens[node]))
        return np.array(chain, np.int64)


def depths(parent: IntArray) -> IntArray:
    """Depth of each node, int64 [n], by `parent` int64 [n] (parents first, -1 above the root)."""
    if len(parent) > 64 and (parent == np.arange(-1, len(parent) - 1)).all():  # The chunk of a prompt is a chain.
        return np.arange(len(parent))
    # A dozen steps over lists take less time than one NumPy call.
    depth = [0]
    for above in parent[1:].tolist():
        depth.append(depth[above] + 1)
    return np.array(depth)


def ancestors(parent: IntArray) -> NDArray[np.bool_]:
    """bool [n, n]: entry (i, j) says whether node i sees node j, that is, j is i or an ancestor of i."""
    n = len(parent)
    if (parent == np.arange(n) - 1).all():
        return np.tri(n, dtype=bool)
    seen = np.eye(n, dtype=bool)
    for i in range(1, n):
        seen[i] |= seen[parent[i]]
    return seen


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """Join trees. The result has each path of `trees` once; the first tree's paths come first.

    Raises ValueError if the roots differ, or if a tree has probes or states."""
    if any(t.tokens[0] != trees[0].tokens[0] for t in trees):
        raise ValueError("trees with different roots cannot be merged")
    if any(t.probe is not None or t.hidden is not None for t in trees):
        raise ValueError("only drafts without probes or states of their own can be merged")
    index: dict[tuple[int, int], int] = {}
    tokens, parent = [int(trees[0].tokens[0])], [-1]
    for tree in trees:
        where = [0]
        for token, above in zip(tree.tokens[1:].tolist(), tree.parent[1:].tolist(), strict=True):
            key = (where[above], token)
            if key not in index:
                index[key] = len(tokens)
                tokens.append(token)
                parent.append(key[0])
            where.append(index[key])
    sources = dict.fromkeys(t.source for t in trees if t.num_drafted)
    return DraftTree(np.array(tokens), np.array(parent), source="+".join(sources))
