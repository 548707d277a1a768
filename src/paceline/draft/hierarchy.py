"""hierarchy: ask three stores of n-grams, the most local first, and verify their sequences as one tree.

Cho et al. 2025, "Lossless Acceleration of Large Language Models with Hierarchical Drafting based on Temporal Locality
in Speculative Decoding" (Findings of NAACL 2025, arXiv 2502.05609). The stores, in this order:

* W, the context (D_c): what followed the last token in this request, newest first;
* S, the model (D_m): what followed it most often in the model's own answers, recorded ones (`model`) and those of
  this engine's finished requests (`past`);
* L, the statistics (D_s): what followed the last 2 tokens, then the last 1, most often in a large corpus (`corpus`).

Asking ends when K = 7 sequences of n - 1 = 4 tokens are found, so the slow corpus is seldom asked.

Where we differ from the published method and why: docs/methods/hierarchy.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.draft.base import Drafter
from paceline.draft.spec import Options, option
from paceline.draft.text.copying import Generations
from paceline.draft.text.ngrams import ContextNgrams, FrequentNgrams, PastNgrams, put
from paceline.draft.text.store import open_for
from paceline.draft.text.suffix_array import SuffixArray
from paceline.engine.request import Request, Row
from paceline.engine.sampling import SamplingParams
from paceline.engine.tree import DraftTree
from paceline.errors import MethodError
from paceline.target.base import Facts

KEY = 2
"""Tokens that L looks up first; the published setting."""

SAMPLE = 128
"""Most places of a corpus that L reads for one key; the authors' code: 5,000."""


@dataclass(frozen=True)
class HierarchyConfig(Options):
    """Options of hierarchy."""

    corpus: str | None = option(
        None, "corpus store for L, and for S where `model` is not given; none: L finds nothing"
    )
    model: str | None = option(None, "corpus store of the model's own recorded answers, for S")
    order: str = option("WSL", "stores asked, most local first: W context, S model, L statistics; paper: WSL")
    k: int = option(7, "sequences verified at once, and kept in W for each token; paper: 7", least=1)
    n: int = option(5, "tokens of an n-gram; a draft is n - 1 deep; paper: 5", least=2)
    nodes: int | None = option(None, "most tokens drafted a round; none (paper): all of the k sequences", least=1)
    past: int = option(0, "tokens of finished requests to remember and learn from, for S; 0 (paper): off", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.order or not set(self.order) <= set("WSL") or len(set(self.order)) < len(self.order):
            raise MethodError(f"hierarchy: order is {self.order!r}; it must be one or more of W, S and L, each once.")


class Hierarchy(Drafter):
    """Looks the last token up in context, model and corpus stores, and verifies several continuations as a tree."""

    name = "hierarchy"
    lossless = "yes"
    paper = "Cho et al. 2025, Hierarchy Drafting, arXiv 2502.05609"
    Config = HierarchyConfig

    def __init__(self, config: HierarchyConfig = HierarchyConfig()):
        self.config = config
        self._stores = {"W": self._context, "S": self._model, "L": self._statistics}
        self._contexts: dict[int, ContextNgrams] = {}
        self._past = Generations(config.past, lambda tokens: PastNgrams(tokens, config.n, config.k))
        self._frequent: FrequentNgrams | None = None
        self._array: SuffixArray | None = None
        self._drafts = np.full((config.k, config.n - 1), -1, np.int32)

    def bind(self, target: Facts) -> None:
        """Open the stores; compile.

        Raises StoreError for a store that is missing, broken, of another tokenizer, or without the part asked for."""
        super().bind(target)
        model, corpus = self.config.model or self.config.corpus, self.config.corpus
        if model is not None and "S" in self.config.order:
            self._frequent = FrequentNgrams.of(open_for(target, model))
        if corpus is not None and "L" in self.config.order:
            self._array = SuffixArray.of(open_for(target, corpus))
        self._warm_up()

    def start(self, row: Request) -> None:
        self._contexts[row.id] = ContextNgrams(self.config.n, self.config.k)

    def drop(self, row: Request) -> None:
        self._contexts.pop(row.id, None)
        if self.config.past and row.is_complete:
            self._past.learn(row.tokens)

    def collect(self, row: Request) -> NDArray[np.int32]:
        """The sequences that the stores propose after the row, int32 [up to k, n - 1], padded with -1, in the order of
        the stores. The next call overwrites them."""
        size = 0
        for letter in self.config.order:
            if size < self.config.k:
                size = self._stores[letter](row, size)
        return self._drafts[:size]

    def _context(self, row: Request, size: int) -> int:
        """W, after taking in the row's new tokens."""
        context = self._contexts[row.id]
        context.update(row.tokens)
        return context.collect(row.last_token, self._drafts, size)

    def _model(self, row: Request, size: int) -> int:
        """S: finished requests, then recorded answers."""
        for past in self._past.halves:
            size = past.collect(row.last_token, self._drafts, size)
        return size if self._frequent is None else self._frequent.collect(row.last_token, self._drafts, size)

    def _statistics(self, row: Request, size: int) -> int:
        """L: after the last 2 tokens, then the last 1."""
        if self._array is None:
            return size
        for length in range(min(KEY, len(row)), 0, -1):
            low, high = self._array.find(row.tokens[-length:])
            if low < high and size < self.config.k:
                seen = self._array.continuations(low, high, SAMPLE, self.config.n - 1, skip=length)
                size = _collect_paths(seen, self._drafts, size)
        return size

    def draft(self, row: Request) -> DraftTree:
        drafts = self.collect(row)
        if not len(drafts) or row.max_draft < 1:
            return DraftTree.root(row.last_token)
        most = drafts.size if self.config.nodes is None else self.config.nodes
        ends = np.array([*self.end_tokens(row)], np.int64)
        tokens, parent = _tree(row.last_token, drafts, ends, row.max_draft, most)
        return DraftTree(tokens, parent, source=self.name)

    def _warm_up(self) -> None:
        """Compile, or load from the cache of earlier runs, so that no round has to."""
        rehearsal = Row(-1, [0, 1] * self.config.n, SamplingParams(), max_context=8 * self.config.n)
        self.start(rehearsal)
        for letter in self.config.order:
            self._stores[letter](rehearsal, 0)
        if self._array is not None:
            self._array.continuations(0, min(len(self._array.positions), 1), 1, 1, skip=0)
        _collect_paths(self._drafts, self._drafts, 0)
        self.draft(rehearsal)
        self._contexts.pop(rehearsal.id)
        past = PastNgrams(2 * len(rehearsal), self.config.n, self.config.k)
        past.learn(rehearsal.tokens)
        past.collect(0, self._drafts, 0)


@njit(cache=True)
def _tree(root, drafts, ends, deep, most):  # type: ignore[no-untyped-def]
    """Tokens and parents of the tree whose paths are `drafts` [k, length], padded with -1, no deeper than `deep`.

    Filled level by level, so that a budget of `most` drafted nodes goes to the likelier ones near the root. A path ends
    at the first token of `ends`."""
    tokens = np.empty(min(most, drafts.size) + 1, np.int64)
    parent = np.empty(len(tokens), np.int64)
    tokens[0], parent[0] = root, -1
    num = 1
    # The node that each draft has reached, -1 when it has ended: at the level above and at this one.
    above = np.zeros(len(drafts), np.int64)
    here = np.empty(len(drafts), np.int64)
    for depth in range(min(drafts.shape[1], deep)):
        for row in range(len(drafts)):
            here[row] = -1
            token = drafts[row, depth]
            if above[row] < 0 or token < 0:
                continue
            for other in range(row):
                if above[other] == above[row] and drafts[other, depth] == token:
                    here[row] = here[other]
                    break
            else:
                if num < len(tokens):
                    tokens[num], parent[num] = token, above[row]
                    here[row] = num
                    num += 1
        for row in range(len(drafts)):
            above[row] = here[row]
            if here[row] >= 0 and np.any(ends == drafts[row, depth]):
                above[row] = -1
    return tokens[:num].copy(), parent[:num].copy()


@njit(cache=True)
def _collect_paths(seen, drafts, size):  # type: ignore[no-untyped-def]
    """Add the most frequent paths through `seen` [m, length] to the first `size` drafts.

    seen  what follows a key in a corpus, padded with -1, in a suffix array's order: equal prefixes are adjacent.

    Keeps the most frequent prefixes, as many as the drafts have nodes, and adds those that are no prefix of another,
    the most frequent first; where counts are equal, the earlier one in `seen`."""
    length = seen.shape[1]
    tokens = np.empty(seen.size, np.int64)
    above = np.empty(seen.size, np.int64)
    count = np.zeros(seen.size, np.int64)
    path = np.empty(length, np.int64)
    num, deep = 0, 0
    for row in range(len(seen)):
        same = 0
        while same < deep and seen[row, same] == tokens[path[same]]:
            same += 1
        deep = same
        while deep < length and seen[row, deep] >= 0:
            tokens[num] = seen[row, deep]
            above[num] = path[deep - 1] if deep else -1
            path[deep] = num
            num += 1
            deep += 1
        for depth in range(deep):
            count[path[depth]] += 1
    # A prefix is at least as frequent as its extensions and stands before them, so it is kept if one of them is.
    frequent = np.argsort(-count[:num], kind="mergesort")[: drafts.size]
    inner = np.zeros(num + 1, np.bool_)
    inner[above[frequent]] = True
    for node in frequent:
        if inner[node]:
            continue
        if size == len(drafts):
            break
        deep = 0
        while node >= 0:
            path[deep] = node
            node = above[node]
            deep += 1
        line = np.empty(deep, np.int64)
        for depth in range(deep):
            line[depth] = tokens[path[deep - 1 - depth]]
        size = put(drafts, size, line, 0, deep)
    return size
