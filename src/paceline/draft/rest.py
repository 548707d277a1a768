"""rest: what usually follows the end of the text in a corpus, as a tree.

He et al. 2024, "REST: Retrieval-Based Speculative Decoding" (NAACL 2024, arXiv 2311.08252). The longest suffix of
the text, 16 tokens down to 2, that occurs in a corpus is looked up in a suffix array; the continuations of all its
places make a trie, weighted by how many of them go through a node; the 64 heaviest nodes are the draft.

    places        the range of the suffix array, at most `hits` of them, spread evenly over it
    weight [n]    places that share the node's path, never more than its parent's: the heaviest nodes are a tree

A suffix array is sorted, so the places of a node lie side by side, and its children are read off by striding along
them. No trie is built; a node takes time in proportion to its children.

Where we differ from the published method and why: docs/methods/rest.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from paceline.draft.base import Drafter
from paceline.draft.spec import Options, option
from paceline.draft.text.store import open_for
from paceline.draft.text.suffix_array import SuffixArray
from paceline.engine.request import Request
from paceline.engine.tree import DraftTree, IntArray
from paceline.errors import MethodError
from paceline.target.base import Facts


@dataclass(frozen=True)
class RestConfig(Options):
    """Options of rest."""

    checkpoint: str = option(help="the corpus store, made by `paceline corpus build`")
    nodes: int = option(64, "most nodes of the tree; paper: 64", least=1)
    longest: int = option(16, "longest suffix looked up, tokens; paper: 16", least=1)
    shortest: int = option(2, "shortest suffix looked up, tokens; paper: 2", least=1)
    hits: int = option(1000, "most places in the corpus that are counted; paper: 5000", least=1)
    length: int = option(10, "longest continuation, tokens; paper: 10", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest < self.shortest:
            raise MethodError(f"rest: shortest is {self.shortest}; it must be at most longest, {self.longest}.")


class Rest(Drafter):
    """Drafts the most frequent continuations of the text's end in a corpus, as a tree (suffix array)."""

    name = "rest"
    lossless = "yes"
    paper = "He et al. 2024, REST, arXiv 2311.08252"
    Config = RestConfig

    def __init__(self, config: RestConfig):
        self.config = config

    def bind(self, target: Facts) -> None:
        """Open the corpus; compile. Raises StoreError if the corpus is not one for this model."""
        super().bind(target)
        self._array = SuffixArray.of(open_for(target, self.config.checkpoint))
        self._array.longest([0, 0])
        self.heaviest(0, 0, 0, 1, frozenset())

    def heaviest(
        self, lo: int, hi: int, skip: int, length: int, ends: frozenset[int]
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The heaviest nodes after the places lo..hi of the suffix array, whose match is `skip` tokens long.

        Tokens, parents (0 is the root, 1 the first node) and weights, int64 [n] each, the heaviest first; at most
        `length` deep, and nothing after a token of `ends` or the corpus's end token."""
        array = self._array
        stop = np.array([array.end_token, *ends], np.int64)
        nodes = _heaviest(
            array.text, array.positions, lo, hi, min(hi - lo, self.config.hits), skip, length, stop, self.config.nodes
        )
        return nodes[:, _TOKEN], nodes[:, _PARENT], nodes[:, _HI] - nodes[:, _LO]

    def draft(self, row: Request) -> DraftTree:
        length = min(self.config.length, row.max_draft)
        ends = self.end_tokens(row)
        # What a corpus has after an end token is another document.
        if length < 1 or row.last_token in ends or row.last_token == self._array.end_token:
            return DraftTree.root(row.last_token)
        skip, lo, hi = self._array.longest(
            row.tokens[-self.config.longest :], self.config.longest, self.config.shortest
        )
        tokens, parent, _ = self.heaviest(lo, hi, skip, length, ends)
        return self.tree_after(row, tokens, parent)


_TOKEN, _PARENT, _DEPTH, _LO, _HI = range(5)


@njit(cache=True)
def _heaviest(text, positions, lo, hi, count, skip, length, stop, most):  # type: ignore[no-untyped-def]
    """int64 [n, 5], n <= most: the nodes of Rest.heaviest. _LO and _HI number the `count` places that are counted.

    One list in order of weight, read from the front: a node's children are not heavier than it and come after it, so
    what has been read is final, and what does not fit falls off the end."""
    nodes = np.empty((most, 5), np.int64)
    num, at = 0, -1  # at: the node whose children are looked for, -1 the root
    while at < num:
        begin, end, depth = (0, count, 0) if at < 0 else (nodes[at, _LO], nodes[at, _HI], nodes[at, _DEPTH])
        if depth < length and not (at >= 0 and (stop == nodes[at, _TOKEN]).any()):
            while begin < end:
                token = _token(text, positions, lo, hi, count, begin, skip + depth)
                after = _after(text, positions, lo, hi, count, begin, end, skip + depth, token)
                num = _insert(nodes, num, token, at + 1, depth + 1, begin, after)
                begin = after
        at += 1
    return nodes[:num]


@njit
def _token(text, positions, lo, hi, count, place, offset):  # type: ignore[no-untyped-def]
    """The token at `offset` from the beginning of a counted place."""
    return np.int64(text[positions[lo + place * (hi - lo) // count] + offset])


@njit
def _after(text, positions, lo, hi, count, begin, end, offset, token):  # type: ignore[no-untyped-def]
    """First place of begin..end that does not go on with `token`: in strides, then by halving."""
    step = 1
    while begin + step < end and _token(text, positions, lo, hi, count, begin + step, offset) == token:
        step *= 2
    inside, outside = begin + step // 2, min(begin + step, end)
    while outside - inside > 1:
        middle = (inside + outside) // 2
        if _token(text, positions, lo, hi, count, middle, offset) == token:
            inside = middle
        else:
            outside = middle
    return outside


@njit
def _insert(nodes, num, token, parent, depth, begin, end):  # type: ignore[no-untyped-def]
    """Insert a node after all that are as heavy or heavier. Returns the number of nodes then."""
    weight = end - begin
    if num == len(nodes) and nodes[num - 1, _HI] - nodes[num - 1, _LO] >= weight:
        return num
    at = min(num, len(nodes) - 1)
    while at > 0 and nodes[at - 1, _HI] - nodes[at - 1, _LO] < weight:
        for column in range(5):
            nodes[at, column] = nodes[at - 1, column]
        at -= 1
    nodes[at, _TOKEN] = token
    nodes[at, _PARENT] = parent
    nodes[at, _DEPTH] = depth
    nodes[at, _LO] = begin
    nodes[at, _HI] = end
    return num + 1 if num < len(nodes) else num
