"""jacobi: draft what the target itself predicts after rejected guesses. No draft model.

Wang et al. 2024, "Make Some Noise: Unlocking Language Model Parallel Inference Capability through Noisy Training"
(EMNLP 2024, arXiv 2406.17404), which calls the tree form TR-Jacobi; the linear form is Santilli et al. 2023 (arXiv
2305.10427). Rejected nodes below the last accepted one serve as slots. The first slot has the next root's position, so
its logits propose what follows that root; the slot below it proposes the token after that, and so on. The best
`candidates` of each slot fill a table with a row for each depth; rows without a slot hold random tokens of the text. A
tree of fixed shape takes its tokens from the table, by depth and rank. A copied chain is merged with it.

    draft     root ── a ── b ── c ── d        the target predicts x after root: the whole draft is rejected
    slots             a    b    c    d        the logits at a propose the token after x, those at b the next one
    next      x ── ? ── ? ── ? ── ?

An ordinary model believes the rejected tokens that it reads, so its slots are of little use. A model fine-tuned with
noise (`paceline train jacobi`) has learnt to look past them.

Where we differ from the authors' code and why: docs/methods/jacobi.md."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.core.options import Options, option
from paceline.draft import shapes
from paceline.draft.base import Drafter, DraftTree, Facts, IntArray, Request, Round
from paceline.draft.likeliest import ranked
from paceline.draft.text.copying import continuation


@dataclass(frozen=True)
class JacobiConfig(Options):
    checkpoint: str | None = option(None, "a folder of `paceline train jacobi`, whose accuracies shape the tree")
    tree: int = option(63, "nodes of the tree without the copied chain; 0: a chain of `window`; paper: 63", least=0)
    window: int = option(5, "guesses in the chain with tree=0 (linear Jacobi)", least=1)
    candidates: int = option(10, "candidates kept for each depth; paper: 10", least=1)
    depth: int = option(5, "depths that have candidates, and most tokens of the copied chain; paper: 5", least=1)
    retrieve: Literal["ngram", "none"] = option("ngram", "whether a chain is copied after a match; paper: ngram")
    ngram: int = option(3, "most tokens that must match for retrieve=ngram; paper: 3", least=1)
    match: Literal["earliest", "recent"] = option("earliest", "which of the longest matches is copied; paper: earliest")
    seed: int = option(0, "seed of the random tokens that fill places without a candidate", least=0)


class Jacobi(Drafter):
    """Drafts what the target says after rejected guesses (Jacobi); training with noise helps, and changes the model."""

    name = "jacobi"
    lossless = "yes"
    paper = "Wang et al. 2024, Make Some Noise, arXiv 2406.17404"
    Config = JacobiConfig

    def __init__(self, config: JacobiConfig = JacobiConfig()):
        self.config = config
        self.depth = config.depth if config.tree else config.window
        self.paths = _paths(config)
        self._candidates = config.candidates if config.tree else 1
        self._shape: list[tuple[int, int, int]] = []  # parent, slot and rank of each drafted node
        self._tables: dict[int, list[list[int]]] = {}
        self._random: dict[int, np.random.Generator] = {}

    def bind(self, target: Facts) -> None:
        super().bind(target)
        self._candidates = min(self._candidates, target.vocab_size)
        within = [path for path in self.paths if len(path) <= self.depth and max(path) < self._candidates]
        shape = shapes.compile_template(within, self._candidates)
        columns = (column[1:].tolist() for column in (shape.parent, shape.depth - 1, shape.rank))
        self._shape = list(zip(*columns, strict=True))

    def start(self, row: Request) -> None:
        self._tables[row.id] = []
        self._random[row.id] = np.random.default_rng(self.config.seed)

    def drop(self, row: Request) -> None:
        self._tables.pop(row.id, None)
        self._random.pop(row.id, None)

    def draft(self, row: Request, most: int) -> DraftTree:
        """Draft the copied chain, then the shape with the table's tokens. Siblings have different tokens."""
        # Missing rows of the table get random tokens of the text, without its last one.
        table = self._tables[row.id]
        missing = self.depth - len(table), self._candidates
        table = [*table, *self._random[row.id].choice(row.tokens[: max(len(row) - 1, 1)], missing).tolist()]
        tokens, parent = [row.last_token], [-1]
        nodes_by: dict[tuple[int, int], int] = {}

        def add(above: int, token: int) -> int:
            """Return the child `token` of node `above`; add it if it is missing."""
            node = nodes_by.setdefault((above, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parent.append(above)
            return node

        node = 0
        if self.config.retrieve == "ngram":
            copied = after_match(row.tokens, self.config.ngram, self.depth, self.config.match == "recent")
            for token in copied[:most].tolist():
                node = add(node, token)
        nodes = [0]
        for above, slot, rank in self._shape:
            if slot == most:
                break  # Shallow nodes come first, so all others are too deep.
            nodes.append(add(nodes[above], table[slot][rank]))
        return DraftTree(np.array(tokens), np.array(parent), source=self.name)

    def observe(self, round: Round) -> None:
        """Fill the tables from the slots of the round's trees, whichever drafter made them."""
        decided = [i for i in round.drafts() if round.accepted[i].tokens]
        nodes = [slots(round.trees[i], round.accepted[i].path[-1])[: self.depth] for i in decided]
        for i, at in zip(decided, nodes, strict=True):
            row = round.rows[i]
            places = range(row.num_new, row.num_new + len(at))
            found = ranked(row, places, round.logits(i)[at], self._candidates) if at else np.empty((0, 0), np.int64)
            self._tables[row.id] = found.tolist()


def _paths(config: JacobiConfig) -> list[shapes.RankPath]:
    """The paths of the tree that the options describe."""
    if not config.tree:
        return shapes.chain(config.window)
    if config.checkpoint is not None:
        return shapes.best_paths(shapes.read_accuracies(config.checkpoint, "paceline train jacobi"), config.tree)
    paths = shapes.published()
    return paths if config.tree == len(paths) else shapes.best_paths(shapes.SLOTS, config.tree)


def slots(tree: DraftTree, last: int) -> list[int]:
    """The nodes of the longest path below `last`, the last accepted node; of equally long paths the first."""
    parent = tree.parent.tolist()
    height, below = [0] * len(parent), [0] * len(parent)
    for node in range(len(parent) - 1, 0, -1):  # Children come after their parents.
        if height[node] + 1 >= height[parent[node]]:
            height[parent[node]], below[parent[node]] = height[node] + 1, node
    path = []
    while height[last]:
        last = below[last]
        path.append(last)
    return path


def after_match(text: IntArray, ngram: int, count: int, recent: bool) -> IntArray:
    """Find the longest earlier match, up to `ngram` tokens, of the end of `text`. Returns the `count` tokens after it,
    or none. recent: the last of equally long matches, not the first."""
    places = np.flatnonzero(text[:-1] == text[-1]) + 1
    for back in range(2, min(ngram, len(text)) + 1):
        longer = places[places >= back]
        longer = longer[text[longer - back] == text[-back]]
        if not len(longer):
            break
        places = longer
    return continuation(text, int(places[-1 if recent else 0]), count) if len(places) else text[:0]
