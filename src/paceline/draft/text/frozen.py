"""The suffix automaton of a text that is complete: read-only arrays, saved in a store and shared by every row.

Knows tokens as integers and nothing of rows, trees or drafters.

    automaton = FrozenAutomaton.of([1, 2, 3, 1, 2, 4])
    state, length = automaton.transfer(0, 0, [7, 1, 2])      # 2 tokens, "1 2", are the longest suffix in the text
    automaton.tree(state, 2, width=2, depth=1, ends=[])      # 3 and 4, each with probability 0.5

It is built as a `SuffixAutomaton` and frozen. Nine states in ten have one successor, and its token stands in the
text after the place where the state's strings first end; so only the others, the *blocks*, keep edges with tokens.
Blocks are the states with no successor or several, the root, and those that are suffixes of the whole text; they
come first in the numbering. All arrays are int32 but the text, which is uint16 where that is enough; a token of
ordinary text takes fewer than 40 bytes of them.

    text     [n]
    states   [S, 3]      length of the state's longest string; suffix link (-1: root); where it first ends
    targets  [S - B]     the successor of each state that is no block
    blocks   [B + 1, 3]  where its edges begin; how often it occurs; where it ends last
    edges    [E, 3]      token, target, and how often the target occurs; of each block the FRONT most frequent
                         first, by count, then the rest by token

An end counts the tokens up to and including it, so `text[end]` is what followed. A state's strings occur exactly as
often as its only successor's, and end one token before; that is why blocks alone hold counts and last ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.draft.text.freezing import AT, COUNT, FRONT, LATEST, freeze
from paceline.tree import IntArray

_ARRAYS = ("states", "targets", "blocks", "edges")


class FrozenAutomaton:
    """Arrays as above. A place in it is (state, length): the longest suffix read so far that is in the text."""

    def __init__(self, text: NDArray[Any], arrays: Mapping[str, NDArray[np.int32]]):
        # Read-only in memory as in a mapped file, so that only one version is ever compiled.
        self.text = _read_only(text)
        self.states, self.targets, self.blocks, self.edges = (_read_only(arrays[name]) for name in _ARRAYS)

    @classmethod
    def of(cls, text: Sequence[int] | NDArray[Any], progress: Callable[[float], None] | None = None) -> FrozenAutomaton:
        """Of `text`. progress is called with the share done, 0 to 1."""
        whole = np.asarray(text, None if isinstance(text, np.ndarray) else np.int32)
        return cls(whole, freeze(whole, progress or (lambda done: None)))

    @property
    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        return self.text, self.states, self.targets, self.blocks, self.edges

    def transfer(self, state: int, length: int, tokens: Sequence[int] | IntArray) -> tuple[int, int]:
        """The place after reading `tokens` from (state, length); (0, 0) is the beginning. Commits nothing: keep what
        it returns or do not."""
        after, matched = transfer(*self.arrays, state, length, np.asarray(tokens, np.int64))
        return int(after), int(matched)

    def chain(self, state: int, size: int, *, recent: bool) -> IntArray:
        """At most `size` tokens that followed the state's first occurrence, or its last; fewer where the text ends."""
        return _chain(*self.arrays, state, size, recent)

    def tree(
        self, state: int, size: int, *, width: int, depth: int, ends: Sequence[int]
    ) -> tuple[IntArray, IntArray, NDArray[np.float64]]:
        """The most probable continuations: tokens [m], parents [m] and probabilities [m], m at most `size`.

        Probabilities are those of the text, multiplied along the path. Nodes come in the order of theirs; a parent
        is a node's number from 1 on, 0 the place itself. No more than `width` nodes at a level, none deeper than
        `depth`, and nothing after a token of `ends`."""
        return _tree(*self.arrays, state, size, min(width, FRONT), depth, np.array(sorted(ends), np.int64))

    def warm_up(self) -> None:
        """Compile what a draft needs for these arrays, or load it from the cache of earlier runs."""
        state, _ = self.transfer(0, 0, [0])
        self.chain(state, 1, recent=True)
        self.tree(state, 1, width=1, depth=1, ends=[])


def from_parts(array: Callable[[str], NDArray[Any]]) -> FrozenAutomaton:
    """The automaton in a corpus store; `array` gives the store's arrays by name."""
    return FrozenAutomaton(array("text"), {name: array(f"automaton_{name}") for name in _ARRAYS})


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = np.ascontiguousarray(array).view(np.ndarray)
    view.flags.writeable = False
    return view


@njit
def step(text, states, targets, blocks, edges, state, token):  # type: ignore[no-untyped-def]
    """The successor of `state` by `token`, or -1."""
    num_blocks = len(blocks) - 1
    if state >= num_blocks:
        return np.int64(targets[state - num_blocks]) if text[states[state, 2]] == token else np.int64(-1)
    begin, end = np.int64(blocks[state, AT]), np.int64(blocks[state + 1, AT])
    front = min(begin + FRONT, end)
    for edge in range(begin, front):
        if edges[edge, 0] == token:
            return np.int64(edges[edge, 1])
    low, high = front, end
    while low < high:
        middle = (low + high) // 2
        if edges[middle, 0] < token:
            low = middle + 1
        else:
            high = middle
    return np.int64(edges[low, 1]) if low < end and edges[low, 0] == token else np.int64(-1)


@njit(cache=True)
def transfer(text, states, targets, blocks, edges, state, length, tokens):  # type: ignore[no-untyped-def]
    """Follow the token's edge where there is one; else drop to the longest suffix that has one."""
    for token in tokens:
        after = step(text, states, targets, blocks, edges, state, token)
        while after < 0 and state > 0:
            state = np.int64(states[state, 1])
            length = np.int64(states[state, 0])
            after = step(text, states, targets, blocks, edges, state, token)
        state, length = (after, length + 1) if after >= 0 else (np.int64(0), np.int64(0))
    return state, length


@njit(cache=True)
def _chain(text, states, targets, blocks, edges, state, size, recent):  # type: ignore[no-untyped-def]
    """Up to the next block there is one continuation, wherever it is read; only from there on `recent` matters."""
    num_blocks = len(blocks) - 1
    start, forced = np.int64(states[state, 2]), 0
    while recent and forced < size and state >= num_blocks:
        state = np.int64(targets[state - num_blocks])
        forced += 1
    if recent and state < num_blocks:
        start = np.int64(blocks[state, LATEST]) - forced
    found = min(size, len(text) - start)
    drafted = np.empty(found, np.int64)
    for i in range(found):
        drafted[i] = text[start + i]
    return drafted


@njit(cache=True)
def _tree(text, states, targets, blocks, edges, state, size, width, depth, ends):  # type: ignore[no-untyped-def]
    """Best first. The nodes that wait are searched for the best one: they are few, and ties keep their order."""
    waiting = np.empty(((size + 1) * width, 4), np.int64)  # token, state, parent, depth
    chance = np.empty(len(waiting))
    taken = np.zeros(depth + 1, np.int64)
    tokens, parents, chances = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size)
    num_waiting, nodes = 0, 0
    if depth > 0:
        num_waiting = _wait(text, states, targets, blocks, edges, state, width, 0, 1, 1.0, waiting, chance, 0)
    while nodes < size:
        best = -1
        for i in range(num_waiting):
            if chance[i] > 0 and (best < 0 or chance[i] > chance[best]):
                best = i
        if best < 0:
            break
        probability, chance[best] = chance[best], 0.0
        token, level = waiting[best, 0], waiting[best, 3]
        if taken[level] == width:
            continue
        taken[level] += 1
        tokens[nodes], parents[nodes], chances[nodes] = token, waiting[best, 2], probability
        nodes += 1
        if level < depth and not (ends == token).any():
            num_waiting = _wait(
                text, states, targets, blocks, edges, waiting[best, 1], width,
                nodes, level + 1, probability, waiting, chance, num_waiting,
            )  # fmt: skip
    return tokens[:nodes], parents[:nodes], chances[:nodes]


@njit
def _wait(  # type: ignore[no-untyped-def]
    text, states, targets, blocks, edges, state, width, parent, level, probability, waiting, chance, at
):
    """Put the successors of `state` after those that wait; how many there are then."""
    num_blocks = len(blocks) - 1
    if state >= num_blocks:
        waiting[at, 0], waiting[at, 1] = text[states[state, 2]], targets[state - num_blocks]
        waiting[at, 2], waiting[at, 3] = parent, level
        chance[at] = probability
        return at + 1
    begin, end = np.int64(blocks[state, AT]), np.int64(blocks[state + 1, AT])
    for edge in range(begin, min(begin + width, end)):
        waiting[at, 0], waiting[at, 1] = edges[edge, 0], edges[edge, 1]
        waiting[at, 2], waiting[at, 3] = parent, level
        chance[at] = probability * edges[edge, 2] / blocks[state, COUNT]
        at += 1
    return at
