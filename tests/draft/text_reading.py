"""Reads from the text structures what drafters never ask for, and tests do."""

import numpy as np

from paceline.draft.text import suffix_tree as suffix_nodes
from paceline.draft.text.automaton import TOKEN


def size(automaton):
    """States, the root included, and the transitions between them."""
    states = automaton._states[: automaton._counts[0]]
    return len(states), int((states[:, TOKEN] >= 0).sum() + automaton._counts[1])


def count(tree, tokens):
    """How often `tokens` stand in the sequences of a suffix tree."""
    node, _ = suffix_nodes.walk(tree._nodes, tree._heads, tree._text, np.array(tokens, np.int32))
    return int(tree._nodes[node, suffix_nodes.COUNT]) if node >= 0 else 0


def num_nodes(tree):
    """Nodes of a suffix tree, the root included."""
    used = tree._nodes[: tree._counts[suffix_nodes.NODES]]
    return int((used[:, suffix_nodes.PARENT] > suffix_nodes.GONE).sum())
