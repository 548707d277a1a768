"""A suffix tree of bounded depth: it counts each run of tokens and the tokens that followed it.

A path of up to `depth` tokens starts at every place of a sequence; the paths of the last `depth` places grow with each
token. An edge is a run of tokens: a place and a length in the text. Every path ends at a node, so a node's count holds
on the whole edge above it, and there are at most 2 nodes for each token."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.core.tree import IntArray
from paceline.draft.text.automaton import enlarged, hashed

# Columns of a node. BEST is the child with the highest count, of equals the latest. CHAIN is the next node in a bucket
# of the hash table of (parent, first token of the edge).
PARENT, COUNT, START, LENGTH, BEST, FIRST, NEXT, BACK, CHAIN = range(9)
NODES, FREE, TEXT = range(3)
ROOT, NONE, GONE = 0, -1, -2


# Growing -------------------------------------------------------------------------------------------------------------


@njit(cache=True)
def append(nodes, heads, text, counts, active, tokens):  # type: ignore[no-untyped-def]
    """Extend all growing paths, longest first, by each of `tokens`."""
    for token in tokens:
        at = counts[TEXT]
        text[at] = token
        counts[TEXT] = at + 1
        nodes[ROOT, COUNT] += 1
        for k in range(len(active) - 2, -1, -1):
            node = active[k]
            if node > ROOT and nodes[node, FIRST] < 0 and nodes[node, COUNT] == 1:  # It serves this path alone.
                nodes[node, LENGTH] += 1
                active[k + 1] = node
            elif node >= 0:
                active[k + 1] = _grow(nodes, heads, text, counts, node, at)


@njit
def _grow(nodes, heads, text, counts, node, at):  # type: ignore[no-untyped-def]
    """Extend the path that ends at `node` by text[at]. Returns its new end."""
    child = _child(nodes, heads, text, node, text[at])
    if child >= 0:
        return _follow(nodes, heads, text, counts, node, child, at)
    leaf = _new(nodes, counts)
    nodes[leaf, COUNT] = 1
    nodes[leaf, START] = at
    nodes[leaf, LENGTH] = 1
    _attach(nodes, heads, text, node, leaf)
    return leaf


@njit
def _follow(nodes, heads, text, counts, node, child, at):  # type: ignore[no-untyped-def]
    """Do the work of _grow if the edge to `child` begins with text[at]."""
    # alone: only this path ended at `node`.
    alone = node != ROOT and nodes[node, COUNT] == nodes[child, COUNT] + 1
    if nodes[child, LENGTH] > 1:
        if alone:  # The node slides down the edge.
            _detach(nodes, heads, text, child)
            nodes[node, LENGTH] += 1
            nodes[node, START] = at + 1 - nodes[node, LENGTH]
            nodes[child, START] += 1
            nodes[child, LENGTH] -= 1
            _attach(nodes, heads, text, node, child)
            return node
        return _split(nodes, heads, text, counts, node, child, at)
    nodes[child, COUNT] += 1
    nodes[child, START] = at
    _prefer(nodes, node, child)
    if alone:
        _absorb(nodes, heads, text, counts, node, child)
    return child


@njit
def _split(nodes, heads, text, counts, node, child, at):  # type: ignore[no-untyped-def]
    """Add a node after the first token of the edge to `child`, where a path ends now. Returns the node."""
    middle = _new(nodes, counts)
    nodes[middle, COUNT] = nodes[child, COUNT] + 1
    nodes[middle, START] = at
    nodes[middle, LENGTH] = 1
    _detach(nodes, heads, text, child)
    _attach(nodes, heads, text, node, middle)
    nodes[child, START] += 1
    nodes[child, LENGTH] -= 1
    _attach(nodes, heads, text, middle, child)
    return middle


@njit
def _absorb(nodes, heads, text, counts, node, child):  # type: ignore[no-untyped-def]
    """Remove `node`, at which no path ends and nothing branches: the edge to `child` takes its tokens."""
    parent = nodes[node, PARENT]
    best = nodes[parent, BEST]
    _detach(nodes, heads, text, child)
    _detach(nodes, heads, text, node)
    nodes[child, START] -= nodes[node, LENGTH]
    nodes[child, LENGTH] += nodes[node, LENGTH]
    _attach(nodes, heads, text, parent, child)
    nodes[parent, BEST] = child if best == node else best
    nodes[node, PARENT] = GONE
    nodes[node, NEXT] = counts[FREE]
    counts[FREE] = node


# Nodes, siblings and the hash table ----------------------------------------------------------------------------------


@njit
def _new(nodes, counts):  # type: ignore[no-untyped-def]
    node = counts[FREE]
    if node >= 0:
        counts[FREE] = nodes[node, NEXT]
    else:
        node = counts[NODES]
        counts[NODES] = node + 1
    nodes[node, FIRST] = nodes[node, BEST] = NONE
    return node


@njit
def _attach(nodes, heads, text, parent, child):  # type: ignore[no-untyped-def]
    """Make `child` the first child of `parent`, and add it to the hash table."""
    nodes[child, PARENT] = parent
    nodes[child, BACK] = NONE
    nodes[child, NEXT] = nodes[parent, FIRST]
    if nodes[parent, FIRST] >= 0:
        nodes[nodes[parent, FIRST], BACK] = child
    nodes[parent, FIRST] = child
    _prefer(nodes, parent, child)
    bucket = hashed(heads, parent, text[nodes[child, START]])
    nodes[child, CHAIN] = heads[bucket]
    heads[bucket] = child


@njit
def _detach(nodes, heads, text, child):  # type: ignore[no-untyped-def]
    """Undo _attach, but leave the parent's BEST as it is."""
    parent, before, after = nodes[child, PARENT], nodes[child, BACK], nodes[child, NEXT]
    if before >= 0:
        nodes[before, NEXT] = after
    else:
        nodes[parent, FIRST] = after
    if after >= 0:
        nodes[after, BACK] = before
    bucket = hashed(heads, parent, text[nodes[child, START]])
    if heads[bucket] == child:
        heads[bucket] = nodes[child, CHAIN]
        return
    at = heads[bucket]
    while nodes[at, CHAIN] != child:
        at = nodes[at, CHAIN]
    nodes[at, CHAIN] = nodes[child, CHAIN]


@njit
def _prefer(nodes, parent, child):  # type: ignore[no-untyped-def]
    """Update the best child of `parent` after `child` got one more path."""
    best = nodes[parent, BEST]
    if best == NONE or nodes[child, COUNT] >= nodes[best, COUNT]:
        nodes[parent, BEST] = child


@njit
def _child(nodes, heads, text, parent, token):  # type: ignore[no-untyped-def]
    """The child whose edge begins with `token`, or NONE."""
    child = heads[hashed(heads, parent, token)]
    while child >= 0 and (nodes[child, PARENT] != parent or text[nodes[child, START]] != token):
        child = nodes[child, CHAIN]
    return child


@njit(cache=True)
def hash_all(nodes, heads, text, num_nodes):  # type: ignore[no-untyped-def]
    """Add all nodes to an empty hash table."""
    for node in range(ROOT + 1, num_nodes):
        if nodes[node, PARENT] > GONE:
            bucket = hashed(heads, nodes[node, PARENT], text[nodes[node, START]])
            nodes[node, CHAIN] = heads[bucket]
            heads[bucket] = node


@njit(cache=True)
def walk(nodes, heads, text, tokens):  # type: ignore[no-untyped-def]
    """Walk down `tokens` from the root. Returns the node below the edge on which they end, and how many tokens of that
    edge were used; NONE and 0 if the tokens do not occur."""
    node, used = ROOT, 0
    for token in tokens:
        if used < nodes[node, LENGTH]:
            if text[nodes[node, START] + used] != token:
                return NONE, 0
            used += 1
        else:
            node, used = _child(nodes, heads, text, node, token), 1
            if node < 0:
                return NONE, 0
    return np.int64(node), used


@njit(cache=True)
def speculate(nodes, heads, text, active, context, most, factor, offset, min_prob, branch):  # type: ignore[no-untyped-def]
    """SuffixTree._speculate."""
    best, match, best_score = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64)), 0, 0.0
    for length in range(1, len(context) + 1):
        node, used = walk(nodes, heads, text, context[len(context) - length :])
        if node < 0:
            break
        size = min(most, int(factor * length + offset))
        if size > 0:
            seen = nodes[node, COUNT]
            if node == active[length] and used == nodes[node, LENGTH]:
                seen -= 1
            draft = _likeliest(nodes, text, node, used, nodes[node, COUNT] / max(seen, 1), size, min_prob, branch)
            score = draft[2].sum()
            if len(draft[0]) and score >= best_score:
                best, match, best_score = draft, length, score
    return best[0], best[1], best[2], match


@njit
def _likeliest(nodes, text, node, used, prob, size, min_prob, branch):  # type: ignore[no-untyped-def]
    """The continuations after `used` tokens of the edge to `node`. Returns tokens, parents and probabilities.

    prob  probability at the start, by which all shares are multiplied.

    A list in order of probability is read from the front, and the continuations of each entry are inserted. An entry is
    a drafted token: its node, the tokens used of that node's edge, and its parent."""
    entries, probs = np.empty((size, 3), np.int64), np.empty(size, np.float64)
    num, read = 0, 0
    while True:
        if used < nodes[node, LENGTH]:
            num = insert(entries, probs, num, (np.int64(node), np.int64(used + 1), np.int64(read)), prob)
        else:
            child = nodes[node, FIRST if branch else BEST]
            while child >= 0:
                share = prob * (nodes[child, COUNT] / nodes[node, COUNT])  # A ratio cannot round above `prob`.
                if share >= min_prob:
                    num = insert(entries, probs, num, (np.int64(child), np.int64(1), np.int64(read)), share)
                child = nodes[child, NEXT] if branch else NONE
        if read == num:
            break
        node, used, prob = entries[read, 0], entries[read, 1], probs[read]
        read += 1
    tokens = np.empty(num, np.int64)
    for i in range(num):
        tokens[i] = text[nodes[entries[i, 0], START] + entries[i, 1] - 1]
    return tokens, entries[:num, 2].copy(), probs[:num]


@njit
def insert(entries, probs, num, entry, prob):  # type: ignore[no-untyped-def]
    """Insert an entry, int64 [columns], after all that are at least as likely. A full list loses its last entry.
    Returns the new `num`."""
    if num == len(entries) and probs[num - 1] >= prob:
        return num
    i = min(num, len(entries) - 1)
    while i > 0 and probs[i - 1] < prob:
        entries[i] = entries[i - 1]
        probs[i] = probs[i - 1]
        i -= 1
    for column in range(entries.shape[1]):
        entries[i, column] = entry[column]
    probs[i] = prob
    return num + 1 if num < len(entries) else num


Run = Sequence[int] | IntArray
"""A run of tokens."""


class Speculation(NamedTuple):
    """A possible continuation of a context.

    tokens  token ids int64 [n].
    parent  parent of each token, int64 [n]; 0 is the root, 1 the first token.
    probs   estimated probability of each token, float64 [n].
    score   sum of the probabilities, an estimate of the number of accepted tokens.
    match   number of tokens of the context that were matched."""

    tokens: IntArray
    parent: IntArray
    probs: NDArray[np.float64]
    score: float
    match: int


class Speculator:
    """A text that can count any run of its tokens and continue it."""

    def speculate(
        self, context: Run, most: int, factor: float = 1, offset: float = 0, min_prob: float = 0.1, branch: bool = False
    ) -> Speculation:
        """The continuation with the highest score over all suffixes of `context`; of equals, that of the longest
        suffix.

        After m matched tokens it has up to min(most, floor(factor * m + offset)) tokens, each with a probability of at
        least `min_prob`: the most frequent path, or with `branch` the likeliest nodes of all."""
        sizes = most, float(factor), float(offset), float(min_prob), branch
        tokens, parent, probs, match = self._speculate(context, *sizes)
        return Speculation(tokens, parent, probs, float(probs.sum()), int(match))

    def _speculate(self, context: Run, *sizes: float) -> tuple[Any, ...]:
        """Like `speculate`. Returns tokens, parents, probabilities and the length of the match."""
        raise NotImplementedError


class SuffixTree(Speculator):
    """Counts all runs of up to `depth` tokens in its sequences.

    depth     length of the longest run that is counted, context and draft together.
    capacity  number of tokens to make room for, at most 92 bytes each. The arrays double as needed."""

    def __init__(self, depth: int, capacity: int = 64):
        self.depth = depth
        self._text = np.empty(0, np.int32)
        self._nodes = np.full((1, 9), NONE, np.int32)
        self._nodes[ROOT, COUNT] = self._nodes[ROOT, LENGTH] = 0
        self._heads = np.empty(0, np.int32)
        self._counts = np.array([1, NONE, 0], np.int64)
        # Entry k is the node of the last k tokens of the open sequence.
        self._active = np.full(depth + 1, NONE, np.int32)
        self._active[0] = ROOT
        self._make_room(max(capacity, 1))

    def __len__(self) -> int:
        return int(self._counts[TEXT])

    def append(self, tokens: Run) -> None:
        """Append `tokens`, each 0 or more, to the open sequence."""
        if self._counts[TEXT] + len(tokens) > len(self._text):
            self._make_room(len(tokens))
        # A fresh int32 array always has the same type, so that only one version is compiled.
        new = np.array(tokens, np.int32)
        append(self._nodes, self._heads, self._text, self._counts, self._active, new)

    def close(self) -> None:
        """End the open sequence. The next tokens begin another."""
        self._active[1:] = NONE

    def learn(self, tokens: IntArray) -> None:
        """Append a whole sequence."""
        self.append(tokens)
        self.close()

    def _speculate(self, context: Run, *sizes: float) -> tuple[Any, ...]:
        """Like `speculate`. The end of the open sequence does not match itself, because nothing has followed it yet."""
        key = np.array(context[-(self.depth - 1) :] if self.depth > 1 else context[:0], np.int32)
        return speculate(self._nodes, self._heads, self._text, self._active, key, *sizes)

    def _make_room(self, more: int) -> None:
        """Make room for `more` tokens."""
        capacity = 2 * (len(self) + more)
        self._text, self._nodes = enlarged(self._text, capacity), enlarged(self._nodes, 2 * capacity + 2)
        self._heads = np.full(1 << (2 * capacity).bit_length(), NONE, np.int32)
        hash_all(self._nodes, self._heads, self._text, self._counts[NODES])


def warm_up() -> None:
    """Compile the tree now, or load it from the cache of earlier runs."""
    tree = SuffixTree(4, 1)
    tree.append([0, 1, 0, 1, 2])
    tree.speculate([0, 1], 2)
