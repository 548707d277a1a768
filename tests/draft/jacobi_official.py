"""The decoding loop that was released with Make Some Noise, written from a description of it: the negative example.

Short paths through its tree are padded with the root, node 0, and the padding is compared like any other node. Where a
short path is accepted whole and the target then says the root's token, the padding counts as accepted, and the next
root is what the target said after the root, not after the path. `padded=False` compares paths as far as they are long;
the text is then the greedy one. With a vocabulary below ten tokens the released program crashes; this one takes as many
candidates as there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline.draft.shapes import published

CANDIDATES, DEPTH, NGRAM = 10, 5, 3

Logits = Callable[[Sequence[int]], np.ndarray]
"""Next-token logits [V] after some tokens."""


def layout() -> tuple[list[tuple[int, int, int]], list[list[int]]]:
    """(parent, row, column of the table) of each node after the root, and the paths to the leaves, root first.

    The chain of the copied continuation, column 10, comes first, so it is path 0."""
    nodes = [(depth, depth, CANDIDATES) for depth in range(DEPTH)]
    number = {(): 0}
    for path in sorted(published(), key=lambda path: (len(path), path)):
        nodes.append((number[path[:-1]], len(path) - 1, path[-1]))
        number[path] = len(nodes)
    inner = {parent for parent, _, _ in nodes}
    paths = []
    for leaf in range(1, len(nodes) + 1):
        if leaf not in inner:
            path = [leaf]
            while path[0]:
                path.insert(0, nodes[path[0] - 1][0])
            paths.append(path)
    return nodes, paths


def retrieved(pool: Sequence[int]) -> list[int]:
    """What followed the earliest place where most of the last three tokens stood, compared from the right."""
    best, at = -1, 0
    for start in range(len(pool) - 2 * NGRAM + 1):
        matched = 0
        while matched < NGRAM and pool[start + NGRAM - 1 - matched] == pool[-1 - matched]:
            matched += 1
        if matched > best:
            best, at = matched, start
    return list(pool[at + NGRAM : at + NGRAM + DEPTH])


def decode(logits_after: Logits, prompt: Sequence[int], new: int, *, padded: bool = True, seed: int = 0) -> list[int]:
    """`new` tokens after `prompt`, which has 6 tokens or more."""
    random, (nodes, leaves) = np.random.default_rng(seed), layout()
    committed, root = list(prompt[:-1]), prompt[-1]
    table: list[list[int | None]] = [[None] * (CANDIDATES + 1) for _ in range(DEPTH)]
    while len(committed) < len(prompt) + new:
        filled = [[int(random.choice(committed)) if t is None else t for t in row] for row in table]
        texts = [[*committed, root]]
        for parent, row, column in nodes:
            texts.append([*texts[parent], filled[row][column]])
        logits = [logits_after(text) for text in texts]
        said = [int(scores.argmax()) for scores in logits]
        paths = [path + [0] * (DEPTH + 1 - len(path)) if padded else path for path in leaves]
        accepted = [_accepted([texts[node][-1] for node in path], [said[node] for node in path]) for path in paths]
        best = max(range(len(paths)), key=lambda p: (accepted[p], 0 if padded else len(paths[p]), -p))
        path, count = paths[best], accepted[best]
        committed += [texts[node][-1] for node in path[: count + 1]]
        root = said[path[count]]
        table = [[None] * (CANDIDATES + 1) for _ in range(DEPTH)]
        for row, node in enumerate(path[count + 1 :]):
            table[row][:CANDIDATES] = np.argsort(-logits[node], kind="stable")[:CANDIDATES].tolist()
            table[row] += [None] * (CANDIDATES + 1 - len(table[row]))  # vocabularies below CANDIDATES
        for row, token in enumerate(retrieved([*committed, root])):
            table[row][CANDIDATES] = token
    return committed[len(prompt) : len(prompt) + new]


def _accepted(tokens: Sequence[int], said: Sequence[int]) -> int:
    """How many tokens after the first are what the target said before them."""
    count = 0
    while count + 1 < len(tokens) and tokens[count + 1] == said[count]:
        count += 1
    return count
