"""Builds the arrays of a `FrozenAutomaton`: grows a `SuffixAutomaton`, counts, and renumbers its states.

What the arrays hold is said in `frozen.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.draft.text.automaton import (
    FIRST,
    LAST,
    LENGTH,
    LINK,
    MORE,
    NEXT,
    RECENT,
    SYMBOL,
    TARGET,
    TO,
    TOKEN,
    SuffixAutomaton,
)
from paceline.errors import StoreError

FRONT = 8
"""Successors of a block that are kept by frequency: as many as a tree can branch into."""
BUILD_BYTES = 100
"""Memory a token takes while the automaton of ordinary text is built, and DISK_BYTES when it is saved."""
DISK_BYTES = 36
MOST_TOKENS = (2**31 - 1) // 3
_STEP = 1 << 18  # tokens between two reports of progress

AT, COUNT, LATEST = range(3)  # columns of blocks; of edges: token, target, count


def build_part(
    text: NDArray[Any], ends: NDArray[np.int64], vocab_size: int, progress: Callable[[float], None] | None = None
) -> dict[str, NDArray[np.int32]]:
    """The part of a corpus store that `from_parts` reads. End tokens keep documents apart.

    Raises StoreError for a corpus whose edges int32 might not number."""
    if len(text) > MOST_TOKENS:
        raise StoreError(f"an automaton holds {MOST_TOKENS:,} tokens, and the corpus has {len(text):,}; use max_tokens")
    return {f"automaton_{name}": array for name, array in freeze(text, progress or (lambda done: None)).items()}


def freeze(text: NDArray[Any], progress: Callable[[float], None]) -> dict[str, NDArray[np.int32]]:
    """Build the growing form in steps, then rearrange it."""
    growing = SuffixAutomaton(len(text))
    for at in range(0, len(text), _STEP):
        growing.extend(text[at : at + _STEP])
        progress(0.8 * at / len(text))
    states, edges, counts = growing._states, growing._edges, growing._counts
    states = states[: counts[0]]
    del growing  # and with it the hash table, a third of the memory
    occurs = _count(states, len(text))
    progress(0.85)
    number, num_blocks, num_edges = _number(states, edges, counts[LAST])
    progress(0.9)
    frozen = {
        "states": np.empty((len(states), 3), np.int32),
        "targets": np.empty(len(states) - num_blocks, np.int32),
        "blocks": np.empty((num_blocks + 1, 3), np.int32),
        "edges": np.empty((num_edges, 3), np.int32),
    }
    _rearrange(states, edges, occurs, number, *frozen.values())
    progress(1.0)
    return frozen


@njit(cache=True)
def _count(states, n):  # type: ignore[no-untyped-def]
    """How often each state's strings occur, int32 [S]; makes the column of last ends exact.

    A state that stands for a beginning of the text ends there; whatever ends in a place, its suffixes do too. So
    both go up the links, from the longest states to the shortest."""
    begin = np.zeros(n + 2, np.int64)
    for state in range(len(states)):
        begin[states[state, LENGTH] + 1] += 1
    begin = np.cumsum(begin)
    order = np.empty(len(states), np.int32)
    for state in range(len(states)):
        order[begin[states[state, LENGTH]]] = state
        begin[states[state, LENGTH]] += 1
    occurs = np.zeros(len(states), np.int32)
    for state in range(1, len(states)):
        is_beginning = states[state, LENGTH] == states[state, FIRST]
        occurs[state] = is_beginning
        states[state, RECENT] = states[state, FIRST]
    occurs[0] = 1  # the empty string also ends before the first token
    for i in range(len(order) - 1, 0, -1):
        state = order[i]
        link = states[state, LINK]
        occurs[link] += occurs[state]
        states[link, RECENT] = max(states[link, RECENT], states[state, RECENT])
    return occurs


@njit(cache=True)
def _number(states, edges, last):  # type: ignore[no-untyped-def]
    """New numbers, blocks first; how many blocks there are, and how many edges they have."""
    degree = np.empty(len(states), np.int32)
    for state in range(len(states)):
        degree[state] = states[state, TOKEN] >= 0
        edge = states[state, MORE]
        while edge >= 0:
            degree[state] += 1
            edge = edges[edge, NEXT]
    is_block = degree != 1
    is_block[0] = True
    while last > 0:
        is_block[last] = True
        last = states[last, LINK]
    num_blocks = is_block.sum()
    number = np.empty(len(states), np.int32)
    block, other, num_edges = 0, num_blocks, 0
    for state in range(len(states)):
        if is_block[state]:
            number[state] = block
            block += 1
            num_edges += degree[state]
        else:
            number[state] = other
            other += 1
    return number, num_blocks, num_edges


@njit(cache=True)
def _rearrange(states, edges, occurs, number, new_states, targets, blocks, new_edges):  # type: ignore[no-untyped-def]
    """Fill the frozen arrays."""
    num_blocks = len(blocks) - 1
    end = 0
    for state in range(len(states)):
        new = number[state]
        new_states[new, 0] = states[state, LENGTH]
        new_states[new, 1] = number[states[state, LINK]] if state > 0 else -1
        new_states[new, 2] = states[state, FIRST]
        if new >= num_blocks:
            targets[new - num_blocks] = number[states[state, TARGET]]
            continue
        begin = end
        if states[state, TOKEN] >= 0:
            end = _put(new_edges, end, states[state, TOKEN], states[state, TARGET], occurs, number)
        edge = states[state, MORE]
        while edge >= 0:
            end = _put(new_edges, end, edges[edge, SYMBOL], edges[edge, TO], occurs, number)
            edge = edges[edge, NEXT]
        _sort(new_edges, begin, end)
        blocks[new, AT] = begin
        blocks[new, COUNT] = occurs[state]
        blocks[new, LATEST] = states[state, RECENT]
    for column in range(3):
        blocks[num_blocks, column] = end


@njit
def _put(edges, at, token, target, occurs, number):  # type: ignore[no-untyped-def]
    edges[at, 0] = token
    edges[at, 1] = number[target]
    edges[at, 2] = occurs[target]
    return at + 1


@njit
def _sort(edges, begin, end):  # type: ignore[no-untyped-def]
    """The FRONT most frequent first, ties by token; the rest by token."""
    front = min(begin + FRONT, end)
    for i in range(begin, front):
        best = i
        for j in range(i + 1, end):
            more, same = edges[j, 2] > edges[best, 2], edges[j, 2] == edges[best, 2]
            if more or (same and edges[j, 0] < edges[best, 0]):
                best = j
        for column in range(3):
            edges[i, column], edges[best, column] = edges[best, column], edges[i, column]
    if end - front > 1:
        order, rest = np.argsort(edges[front:end, 0]), edges[front:end].copy()
        for i in range(len(order)):  # element by element: that compiles in half the time
            for column in range(3):
                edges[front + i, column] = rest[order[i], column]
