"""rest: what usually follows the end of the text in a corpus, as a tree.

He et al. 2024, "REST: Retrieval-Based Speculative Decoding" (NAACL 2024, arXiv 2311.08252). The longest suffix of
the text, 16 tokens down to 2, that occurs in a corpus is looked up in a suffix array; the continuations of all its
places make a trie, weighted by how many of them go through a node; the 64 heaviest nodes are the draft.

    places        the range of the suffix array, at most `hits` of them, spread evenly over it
    weight [n]    places that share the node's path, never more than its parent's: the heaviest nodes are a tree

A suffix array is sorted, so the places of a node lie side by side and its children are found by striding along them:
no trie is ever built, and a node costs what it has children.

Lossless: the drafts are point masses, so acceptance keeps the target's distribution exactly.

Where we differ from the code (github.com/FasterDecoding/REST), and why:
* exactly the `nodes` heaviest are kept, ties to the nearer ones; the code cuts at a weight, and may raise when many
  nodes have it;
* documents are kept apart: no match and no continuation runs from one into the next, and nothing is drafted behind
  an end token;
* nothing found, nothing drafted: the code drafts token 100;
* of more than `hits` places an even spread is taken, not the first, which all go on with the smallest token ids; so
  1000 do what the paper's 5000 did;
* token ids may be as large as 32 bits hold, the code's index has 16; the corpus is mapped, not copied into memory.

The corpus is fixed, and a finished request does not go into it: a sorted array cannot take single texts in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numba import njit

from paceline.draft.base import Drafter
from paceline.draft.text.copying import end_tokens
from paceline.draft.text.store import open_store
from paceline.draft.text.suffix_array import SuffixArray
from paceline.errors import MethodError
from paceline.row import Request
from paceline.target.base import Facts
from paceline.tree import DraftTree, IntArray


@dataclass(frozen=True)
class RestConfig:
    """Options of rest."""

    checkpoint: str = field(metadata={"help": "the corpus store, made by `paceline corpus build`"})
    nodes: int = field(default=64, metadata={"help": "most nodes of the tree; paper: 64"})
    longest: int = field(default=16, metadata={"help": "longest suffix looked up, tokens; paper: 16"})
    shortest: int = field(default=2, metadata={"help": "shortest suffix looked up, tokens; paper: 2"})
    hits: int = field(default=1000, metadata={"help": "most places in the corpus that are counted; paper: 5000"})
    length: int = field(default=10, metadata={"help": "longest continuation, tokens; paper: 10"})

    def __post_init__(self) -> None:
        if min(self.nodes, self.hits, self.length, self.shortest) < 1 or self.longest < self.shortest:
            raise MethodError(
                f"rest: nodes is {self.nodes}, hits {self.hits}, length {self.length}, shortest {self.shortest}, "
                f"longest {self.longest}; all must be 1 or more, and shortest at most longest."
            )


class Rest(Drafter):
    """Drafts the most frequent continuations of the text's end in a corpus, as a tree (suffix array)."""

    name = "rest"
    lossless = "yes"
    paper = "He et al. 2024, REST, arXiv 2311.08252"
    Config = RestConfig

    def __init__(self, config: RestConfig):
        self.config = config
        self._eos: Sequence[int] = ()

    def bind(self, target: Facts) -> None:
        """Open the corpus, compile, take the end tokens. Raises StoreError if the corpus is not one for this model."""
        fingerprint = target.tokenizer.fingerprint if target.tokenizer else None
        store = open_store(self.config.checkpoint, kind="corpus", tokenizer=fingerprint)
        self._array = SuffixArray.of(store)
        self._eos = target.eos_token_ids
        self._array.longest([0, 0])
        self.tree(0, 0, 0, 1, frozenset())

    def tree(
        self, lo: int, hi: int, skip: int, length: int, ends: frozenset[int]
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The heaviest nodes behind the places lo..hi of the suffix array, whose match is `skip` tokens long.

        Tokens, parents (0 is the root, 1 the first node) and weights, int64 [n] each, the heaviest first; at most
        `length` deep, and nothing behind a token of `ends` or the corpus's end token."""
        array = self._array
        stop = np.array([array.end_token, *ends], np.int64)
        nodes = _heaviest(
            array.text, array.positions, lo, hi, min(hi - lo, self.config.hits), skip, length, stop, self.config.nodes
        )
        return nodes[:, _TOKEN], nodes[:, _PARENT], nodes[:, _HI] - nodes[:, _LO]

    def draft(self, row: Request) -> DraftTree:
        length = min(self.config.length, row.max_draft)
        ends = end_tokens(row, self._eos)
        # Behind an end token stands nothing that the model would say.
        if length < 1 or row.last_token in ends or row.last_token == self._array.end_token:
            return DraftTree.root(row.last_token)
        skip, lo, hi = self._array.longest(
            row.tokens[-self.config.longest :], self.config.longest, self.config.shortest
        )
        tokens, parent, _ = self.tree(lo, hi, skip, length, ends)
        if not len(tokens):
            return DraftTree.root(row.last_token)
        return DraftTree(np.append(row.last_token, tokens), np.append(-1, parent), source=self.name)


_TOKEN, _PARENT, _DEPTH, _LO, _HI = range(5)


@njit(cache=True)
def _heaviest(text, positions, lo, hi, count, skip, length, stop, most):  # type: ignore[no-untyped-def]
    """int64 [n, 5], n <= most: the nodes of Rest.tree. _LO and _HI number the `count` places that are counted.

    One list in order of weight, read from the front: a node's children are not heavier than it and go in behind it,
    so what has been read is final, and what does not fit falls off the end."""
    nodes = np.empty((most, 5), np.int64)
    num, at = 0, -1  # at: the node whose children are looked for, -1 the root
    while at < num:
        begin, end, depth = (0, count, 0) if at < 0 else (nodes[at, _LO], nodes[at, _HI], nodes[at, _DEPTH])
        if depth < length and not (at >= 0 and (stop == nodes[at, _TOKEN]).any()):
            while begin < end:
                token = _token(text, positions, lo, hi, count, begin, skip + depth)
                behind = _behind(text, positions, lo, hi, count, begin, end, skip + depth, token)
                num = _insert(nodes, num, token, at + 1, depth + 1, begin, behind)
                begin = behind
        at += 1
    return nodes[:num]


@njit
def _token(text, positions, lo, hi, count, place, offset):  # type: ignore[no-untyped-def]
    """The token `offset` behind where a counted place begins."""
    return np.int64(text[positions[lo + place * (hi - lo) // count] + offset])


@njit
def _behind(text, positions, lo, hi, count, begin, end, offset, token):  # type: ignore[no-untyped-def]
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
    """Put a node behind all that are as heavy or heavier; how many nodes there are then."""
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
