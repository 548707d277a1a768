"""The suffix automaton of a complete text: read-only arrays, saved in a store and shared by every row.

Most states have one successor, in `targets`. The other states, the *blocks*, come first and have a range of `edges`.

    states   int32 [S, 3]: length, suffix link, where its strings end for the first time
    targets  int32 [S - B]: the successor of state B + i, by the token text[first end]
    blocks   int32 [B + 1, 3]: first edge, how often its strings occur, where they end for the last time
    edges    int32 [E, 3]: token, target, how often; the FRONT most frequent of a block first, the rest by token
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.core.tree import IntArray
from paceline.draft.text import automaton as growing
from paceline.draft.text.store import Progress, silent
from paceline.errors import StoreError

FRONT = 8  # successors of a block that are sorted by frequency; a tree has at most this many children a node
MOST_TOKENS = (2**31 - 1) // 3
_STEP = 1 << 18  # tokens between two reports of progress

AT, COUNT, LATEST = range(3)  # columns of blocks; of edges: token, target, count
LENGTH, LINK, FIRST, RECENT, TOKEN, TARGET, _ = growing.STATE
FROM, SYMBOL, TO, _ = growing.EDGE


def build_part(
    text: NDArray[Any], ends: IntArray, vocab_size: int, progress: Progress = silent
) -> dict[str, NDArray[np.int32]]:
    """The part of a corpus store that `from_parts` reads. End tokens separate documents.

    Raises StoreError for a corpus that might have more edges than int32 can number."""
    if len(text) > MOST_TOKENS:
        raise StoreError(f"an automaton holds {MOST_TOKENS:,} tokens, and the corpus has {len(text):,}; use max_tokens")
    return {f"automaton_{name}": array for name, array in freeze(text, progress).items()}


def freeze(text: NDArray[Any], progress: Progress) -> dict[str, NDArray[np.int32]]:
    """Build the growing form in steps, then rearrange it."""
    grown = growing.SuffixAutomaton(len(text))
    for at in range(0, len(text), _STEP):
        grown.extend(text[at : at + _STEP])
        progress(0.8 * at / len(text))
    num_states, num_edges, last, _ = grown._counts.tolist()
    states, edges = grown._states[:num_states], grown._edges[:num_edges]
    del grown  # and with it the hash table, a third of the memory
    occurs = (states[:, LENGTH] == states[:, FIRST]).astype(np.int32)  # 1 for the empty string too
    states[:, RECENT] = states[:, FIRST]
    _count(states, occurs, np.argsort(states[:, LENGTH], kind="stable"))
    progress(0.85)
    is_block = states[:, TOKEN] < 0
    is_block[edges[:, FROM]] = True  # more edges than the one a state holds
    while last >= 0:  # the text's own suffixes; the last one is the empty string
        is_block[last] = True
        last = int(states[last, LINK])
    order = np.argsort(~is_block, kind="stable")  # blocks first
    num_blocks, number = int(is_block.sum()), np.empty(num_states, np.int32)
    number[order] = np.arange(num_states, dtype=np.int32)
    frozen = {"states": states[order[:, None], [LENGTH, LINK, FIRST]]}
    frozen["states"][1:, 1] = number[frozen["states"][1:, 1]]  # the first state, the empty string, has no link
    frozen["targets"] = number[states[order[num_blocks:], TARGET]]
    progress(0.9)
    holds = np.flatnonzero(is_block & (states[:, TOKEN] >= 0))
    begins = np.concatenate([number[holds], number[edges[:, FROM]]])
    tokens = np.concatenate([states[holds, TOKEN], edges[:, SYMBOL]])
    targets = np.concatenate([states[holds, TARGET], edges[:, TO]])
    frozen["blocks"] = np.full((num_blocks + 1, 3), len(begins), np.int32)
    frozen["blocks"][0, AT] = 0
    np.cumsum(np.bincount(begins, minlength=num_blocks), out=frozen["blocks"][1:, AT])
    frozen["blocks"][:-1, COUNT] = occurs[order[:num_blocks]]
    frozen["blocks"][:-1, LATEST] = states[order[:num_blocks], RECENT]
    del states, edges, is_block, order  # most of the memory; sorting needs as much again
    by_count = np.lexsort((tokens, -occurs[targets], begins))
    block = begins[by_count]
    place = np.arange(len(block), dtype=np.int32) - frozen["blocks"][block, AT]
    sorted_edges = by_count[np.lexsort((np.where(place < FRONT, place, tokens[by_count] + FRONT), block))]
    frozen["edges"] = np.stack([tokens, number[targets], occurs[targets]], 1)[sorted_edges]
    progress(1.0)
    return frozen


@njit(cache=True)
def _count(states, occurs, order):  # type: ignore[no-untyped-def]
    """Make `occurs` [S] and the column of last ends exact; both know the one place where a prefix of the text ends.

    Where a string ends, its suffixes end too. So counts and last ends are passed up the links, from the longest states
    to the shortest: `order` [S] is by length."""
    for i in range(len(order) - 1, 0, -1):
        state = order[i]
        link = states[state, LINK]
        occurs[link] += occurs[state]
        states[link, RECENT] = max(states[link, RECENT], states[state, RECENT])


_ARRAYS = ("states", "targets", "blocks", "edges")


class FrozenAutomaton:
    """Arrays as above. A place in it is (state, length): the longest suffix read so far that is in the text."""

    def __init__(self, text: NDArray[Any], arrays: Mapping[str, NDArray[np.int32]]):
        # Read-only like a mapped file, so that one version is compiled.
        self.text = _read_only(text)
        self.states, self.targets, self.blocks, self.edges = (_read_only(arrays[name]) for name in _ARRAYS)

    @classmethod
    def of(cls, text: Sequence[int] | NDArray[Any], progress: Progress = silent) -> Self:
        """The automaton of `text`. progress: called with the share done, 0 to 1."""
        whole = np.asarray(text, None if isinstance(text, np.ndarray) else np.int32)
        return cls(whole, freeze(whole, progress))

    @property
    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        return self.text, self.states, self.targets, self.blocks, self.edges

    def transfer(self, state: int, length: int, tokens: Sequence[int] | IntArray) -> tuple[int, int]:
        """The place after reading `tokens` from (state, length); (0, 0) is the beginning."""
        after, matched = transfer(*self.arrays, state, length, np.asarray(tokens, np.int64))
        return int(after), int(matched)

    def chain(self, state: int, size: int, *, recent: bool) -> IntArray:
        """The `size` tokens after the state's first occurrence, or its last one; fewer where the text ends."""
        return _chain(*self.arrays, state, size, recent)

    def tree(
        self, state: int, size: int, *, width: int, depth: int, ends: Sequence[int]
    ) -> tuple[IntArray, IntArray, NDArray[np.float64]]:
        """The most probable continuations: tokens [m], parents [m] and probabilities [m], m at most `size`.

        Probabilities are relative frequencies, multiplied along the path; nodes come in their order. Parents: 1 is the
        first node, 0 the place itself. At most `width` nodes at a level, none deeper than `depth` or below `ends`."""
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
    """Follow each token's edge; without one, go to the longest suffix that has it."""
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
    """FrozenAutomaton.chain. Up to the next block all occurrences continue alike; `recent` matters from there on."""
    num_blocks = len(blocks) - 1
    start, forced = np.int64(states[state, 2]), 0
    while recent and forced < size and state >= num_blocks:
        state = np.int64(targets[state - num_blocks])
        forced += 1
    if recent and state < num_blocks:
        start = np.int64(blocks[state, LATEST]) - forced
    return text[start : start + size].astype(np.int64)


@njit(cache=True)
def _tree(text, states, targets, blocks, edges, state, size, width, depth, ends):  # type: ignore[no-untyped-def]
    """FrozenAutomaton.tree, best first. The waiting nodes are few, so the best one is searched; ties keep order."""
    waiting = np.empty(((size + 1) * width, 4), np.int64)  # token, state, parent, depth
    chance = np.empty(len(waiting))
    taken = np.zeros(depth + 1, np.int64)
    tokens, parents, chances = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size)
    num_waiting, nodes, level, probability, is_end = 0, 0, 0, 1.0, False
    while True:
        if level < depth and not is_end:
            num_waiting = _wait(
                text, states, targets, blocks, edges, state, width,
                nodes, level + 1, probability, waiting, chance, num_waiting,
            )  # fmt: skip
        best = -1
        for i in range(num_waiting):
            if chance[i] > 0 and taken[waiting[i, 3]] < width and (best < 0 or chance[i] > chance[best]):
                best = i
        if best < 0 or nodes == size:
            break
        state, level, probability, chance[best] = waiting[best, 1], waiting[best, 3], chance[best], 0.0
        taken[level] += 1
        tokens[nodes], parents[nodes], chances[nodes] = waiting[best, 0], waiting[best, 2], probability
        is_end = (ends == waiting[best, 0]).any()
        nodes += 1
    return tokens[:nodes], parents[:nodes], chances[:nodes]


@njit
def _wait(  # type: ignore[no-untyped-def]
    text, states, targets, blocks, edges, state, width, parent, level, probability, waiting, chance, at
):
    """Append the successors of `state` to the waiting nodes; the number of these."""
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
