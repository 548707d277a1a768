"""Reads from the text structures what drafters never ask for, and tests do."""

from collections.abc import Sequence

import numpy as np

from paceline.draft.text import suffix_tree as suffix_nodes
from paceline.draft.text.automaton import TOKEN, SuffixAutomaton
from paceline.draft.text.frozen import FRONT, FrozenAutomaton
from paceline.draft.text.suffix_tree import SuffixTree


def size(automaton: SuffixAutomaton | FrozenAutomaton) -> tuple[int, int]:
    """States, the root included, and the transitions between them."""
    if isinstance(automaton, FrozenAutomaton):
        return len(automaton.states), len(automaton.targets) + len(automaton.edges)
    states = automaton._states[: automaton._counts[0]]
    return len(states), int((states[:, TOKEN] >= 0).sum() + automaton._counts[1])


def occurrences(frozen: FrozenAutomaton, state: int) -> tuple[int, int, int]:
    """Where the state's strings end for the first time and for the last, and how often they occur."""
    first, steps, num_blocks = int(frozen.states[state, 2]), 0, len(frozen.blocks) - 1
    while state >= num_blocks:
        state, steps = int(frozen.targets[state - num_blocks]), steps + 1
    _, count, latest = frozen.blocks[state].tolist()
    return first, latest - steps, count


def successors(frozen: FrozenAutomaton, state: int, most: int = FRONT) -> list[tuple[int, int]]:
    """(token, count) of what followed, the most frequent first; at most FRONT."""
    num_blocks = len(frozen.blocks) - 1
    if state >= num_blocks:
        return [(int(frozen.text[frozen.states[state, 2]]), occurrences(frozen, state)[2])]
    begin, end = int(frozen.blocks[state, 0]), int(frozen.blocks[state + 1, 0])
    return [(token, count) for token, _, count in frozen.edges[begin : min(end, begin + min(most, FRONT))].tolist()]


def count(tree: SuffixTree, tokens: Sequence[int]) -> int:
    """How often `tokens` stand in the sequences of a suffix tree."""
    node, _ = suffix_nodes.walk(tree._nodes, tree._heads, tree._text, np.array(tokens, np.int32))
    return int(tree._nodes[node, suffix_nodes.COUNT]) if node >= 0 else 0


def num_nodes(tree: SuffixTree) -> int:
    """Nodes of a suffix tree, the root included."""
    used = tree._nodes[: tree._counts[suffix_nodes.NODES]]
    return int((used[:, suffix_nodes.PARENT] > suffix_nodes.GONE).sum())
