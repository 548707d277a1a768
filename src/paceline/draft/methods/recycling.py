"""recycling: draft the tokens that the target last ranked highest after each token.

Luo et al. 2025, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling" (ACL 2025, arXiv 2408.08696). Row t of a matrix M [V, k] holds the k best successors of token t, as the
target ranked them after the last verified node with token t, accepted or not. A draft is a tree of fixed shape that
starts at the last token and takes each node's children from M. No training, no model, no corpus; 1 MB for 32,000
tokens.

Where we differ from the published method and why: docs/methods/recycling.md."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.core.options import Options, option
from paceline.draft.base import Drafter, DraftTree, Facts, Needs, Request, Round
from paceline.draft.shapes import compile_template, template_of
from paceline.draft.text.copying import BySalt

TREES = {
    80: "0 1 2 3 4 5 6 7 00 01 02 03 04 05 06 07 10 11 12 13 20 21 22 30 31 40 50 60 70 "
    "000 001 002 003 004 005 006 007 010 011 012 020 021 030 040 050 060 070 100 101 110 200 300 400 500 "
    "0000 0001 0002 0003 0004 0010 0011 0020 0030 0040 0100 0200 1000 2000 3000 "
    "00000 00001 00002 00010 00020 00100 01000 10000 000000 000001 000100",
    60: "0 1 2 3 4 5 6 00 01 02 03 04 05 10 11 12 13 14 20 21 22 30 31 40 41 50 60 "
    "000 001 002 010 011 020 021 030 040 100 101 102 110 111 120 130 200 210 300 400 500 "
    "0000 0001 0010 0100 1000 1001 1100 2000 00000 00001 00100 10000",
    32: "0 1 2 3 4 5 6 7 00 01 02 03 05 10 20 30 000 001 002 010 020 100 0000 0001 0010 0100 1000 "
    "00000 00001 00010 00100 000000",
    16: "0 1 2 3 5 00 01 10 000 001 010 100 0000 0010 00000 000000",
    8: "0 1 00 01 000 0000 00000 000000",
}
"""Paths by number of drafted nodes. 80: the paper's ("2.2.2"). 60: SAM-Decoding's (arXiv 2411.10666) for its second
drafter. 32, 16, 8: the paths of the 80 that were accepted most often (`benchmarks/drafters.py shapes`)."""


@dataclass(frozen=True)
class RecyclingConfig(Options):
    tree: Literal[80, 60, 32, 16, 8] | str = option(80, "drafted nodes, or a file of paths, as 0 1 00 01; paper: 80")
    k: int = option(8, "successors kept for each token; trees lose their nodes of higher rank; paper: 8", least=1)
    scope: Literal["shared", "row"] = option(
        "shared", "one matrix for all requests of a client, or one for each; paper: shared"
    )


class Recycling(Drafter):
    """Drafts a tree of what the target last ranked highest after each token (Token Recycling)."""

    name = "recycling"
    lossless = "yes"
    paper = "Luo et al. 2025, Token Recycling, arXiv 2408.08696"
    Config = RecyclingConfig

    def __init__(self, config: RecyclingConfig = RecyclingConfig()):
        self.config = config
        if config.tree in TREES:
            paths = [tuple(map(int, word)) for word in TREES[int(config.tree)].split()]
            self.template = compile_template([path for path in paths if max(path) < config.k], config.k)
        else:
            self.template = template_of(str(config.tree), config.k, "recycling", ", ".join(map(str, TREES)))
        self.shared: BySalt[NDArray[np.int32]] | None = None
        self._matrices: dict[int, NDArray[np.int32]] = {}

    def bind(self, target: Facts) -> None:
        """Compile, and make the matrix, or keep what it has learnt."""
        super().bind(target)
        matrix, one = np.full((1, 1), -1, np.int32), np.zeros(1, np.int64)
        _grow(matrix, 0, one, one, 1, one)
        _update(matrix, one, one, one, np.zeros((1, 1), np.int64))
        self.needs = Needs(top_k=min(self.config.k, target.vocab_size))
        self._size = target.vocab_size, self.config.k
        self.shared = self.shared or BySalt(self._empty)

    def _empty(self) -> NDArray[np.int32]:
        return np.full(self._size, -1, np.int32)

    def start(self, row: Request) -> None:
        if self.config.scope == "row":
            self._matrices[row.id] = self._empty()

    def matrix(self, row: Request) -> NDArray[np.int32]:
        """The matrix by which a row drafts and learns."""
        assert self.shared is not None
        return self._matrices[row.id] if row.id in self._matrices else self.shared.of(row.params.cache_salt)

    def observe(self, round: Round) -> None:
        """Learn from every verified node, whichever drafter made it."""
        for i, (row, tree) in enumerate(zip(round.rows, round.trees, strict=True)):
            successors = round.top_k(i).cpu().numpy()
            if len(successors):
                # Copies always have the same type, so that only one version is compiled.
                nodes = np.array(tree.tokens), np.array(tree.depth), np.array(round.accepted[i].path)
                _update(self.matrix(row), *nodes, successors)

    def drop(self, row: Request) -> None:
        self._matrices.pop(row.id, None)

    def draft(self, row: Request, most: int) -> DraftTree:
        template = self.template
        size = template.within(most)
        ends = np.array([*row.ends], np.int64)
        tokens, above = _grow(self.matrix(row), row.last_token, template.parent, template.rank, size, ends)
        return DraftTree(tokens, above, source=self.name)


@njit(cache=True)
def _grow(matrix, root, parent, rank, size, ends):  # type: ignore[no-untyped-def]
    """Fill the template's first `size` nodes from the matrix. Returns the filled nodes' tokens and parents, int64 [n].

    Tokens in `ends` and missing tokens (-1) have no children."""
    tokens, above = np.empty(size, np.int64), np.empty(size, np.int64)
    where = np.full(size, -1, np.int64)
    tokens[0], above[0], where[0] = root, -1, 0
    n = 1
    for node in range(1, size):
        under = where[parent[node]]
        if under < 0:
            continue
        token = np.int64(matrix[tokens[under], rank[node]])
        if token < 0:
            continue
        tokens[n], above[n] = token, under
        where[node] = n
        for end in ends:
            if token == end:
                where[node] = -1
        n += 1
    return tokens[:n], above[:n]


@njit(cache=True)
def _update(matrix, tokens, depth, path, successors):  # type: ignore[no-untyped-def]
    """Write successors[i] into row tokens[i] for each node i. Among nodes with the same token, the first on `path`
    wins, or else the shallowest, and of equally deep nodes the first."""
    for level in range(depth.max(), -1, -1):
        for node in range(len(tokens) - 1, -1, -1):
            if depth[node] == level:
                _write(matrix, tokens[node], successors[node])
    for i in range(len(path) - 1, -1, -1):
        _write(matrix, tokens[path[i]], successors[path[i]])


@njit
def _write(matrix, token, successors):  # type: ignore[no-untyped-def]
    for rank in range(min(matrix.shape[1], len(successors))):
        matrix[token, rank] = successors[rank]
