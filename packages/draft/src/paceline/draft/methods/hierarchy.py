"""hierarchy: ask three stores of n-grams, the most local first, and verify their sequences as one tree.

Cho et al. 2025, "Lossless Acceleration of Large Language Models with Hierarchical Drafting based on Temporal Locality
in Speculative Decoding" (Findings of NAACL 2025, arXiv 2502.05609). The stores, in this order:

* W, the context (D_c): sequences after the same last token in this request, newest first;
* S, the model (D_m): the most frequent sequences in the model's past answers (`past`) and recorded ones (`model`);
* L, the statistics (D_s): the most frequent sequences in a corpus after the last 2 tokens, then the last 1 (`corpus`).

Where we differ from the published method and why: docs/methods/hierarchy.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.core.options import Options, option
from paceline.draft.base import Drafter, DraftTree, Facts, Request
from paceline.draft.text.copying import BySalt, TwoHalves
from paceline.draft.text.ngrams import FrequentNgrams, Gram, PastNgrams, RecentNgrams, warm_up
from paceline.draft.text.store import open_for
from paceline.draft.text.suffix_array import SuffixArray
from paceline.errors import MethodError

KEY = 2
"""Number of tokens that L looks up first; the published setting."""
SAMPLE = 128
"""Largest number of places that L reads for a key. The authors' code reads 5,000."""


@dataclass(frozen=True)
class HierarchyConfig(Options):
    corpus: str | None = option(None, "corpus for L, and for S if `model` is not given; none: L finds nothing")
    model: str | None = option(None, "corpus of the model's own recorded answers, for S")
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
        self._contexts: dict[int, RecentNgrams] = {}
        self._past = BySalt(lambda: TwoHalves(config.past, lambda tokens: PastNgrams(config.n, config.k)))
        self._frequent: FrequentNgrams | None = None
        self._array: SuffixArray | None = None

    def bind(self, target: Facts) -> None:
        """Open the stores, and compile.

        Raises StoreError for a store that is missing, broken, of another tokenizer, or without the part asked for."""
        super().bind(target)
        warm_up()
        _tree(0, np.zeros((1, 1), np.int64), 1, 1, np.zeros(1, np.int64))
        model, corpus = self.config.model or self.config.corpus, self.config.corpus
        if model is not None and "S" in self.config.order:
            self._frequent = FrequentNgrams.of(open_for(target, model))
        if corpus is not None and "L" in self.config.order:
            self._array = SuffixArray.of(open_for(target, corpus))
            self._array.find([0])

    def start(self, row: Request) -> None:
        self._contexts[row.id] = RecentNgrams(self.config.n, self.config.k)

    def drop(self, row: Request) -> None:
        if self._contexts.pop(row.id, None) is not None:
            self._past.of(row.params.cache_salt).learn(row)

    def collect(self, row: Request) -> list[Gram]:
        """Collect up to k sequences of n - 1 tokens that the stores propose after the row, in the stores' order.

        Of two sequences, the longer replaces the other if it begins with it."""
        sequences: list[Gram] = []
        for gram in chain.from_iterable(self._stores[letter](row) for letter in self.config.order):
            for at, other in enumerate(sequences):
                if gram[: len(other)] == other[: len(gram)]:
                    sequences[at] = max(gram, other, key=len)
                    break
            else:
                sequences.append(gram)
            if len(sequences) == self.config.k:
                break
        return sequences

    def _context(self, row: Request) -> Iterator[Gram]:
        """Add the row's new tokens to W, then ask it."""
        self._contexts[row.id].update(row.tokens)
        yield from self._contexts[row.id].after(row.last_token)

    def _model(self, row: Request) -> Iterator[Gram]:
        """Ask S: finished requests, then recorded answers, cut to n tokens."""
        for past in self._past.of(row.params.cache_salt).halves:
            yield from past.after(row.last_token)
        if self._frequent is not None:
            yield from (gram[: self.config.n - 1] for gram in self._frequent.after(row.last_token))

    def _statistics(self, row: Request) -> Iterator[Gram]:
        """Ask L for continuations of the last 2 tokens, then of the last 1."""
        if self._array is not None:
            for length in range(min(KEY, len(row)), 0, -1):
                low, high = self._array.find(row.tokens[-length:])
                lines = self._array.continuations(low, high, SAMPLE, self.config.n - 1, skip=length)
                yield from frequent_paths(lines, self.config.k * (self.config.n - 1))

    def draft(self, row: Request, most: int) -> DraftTree:
        long, nodes = self.config.n - 1, self.config.nodes or self.config.k * self.config.n
        sequences = [gram if len(gram) == long else gram + (-1,) * (long - len(gram)) for gram in self.collect(row)]
        grams, ends = np.array(sequences, np.int64).reshape(-1, long), np.array([*row.ends], np.int64)
        tokens, parent = _tree(row.last_token, grams, min(long, most), nodes, ends)
        return DraftTree(tokens, parent, source=self.name if len(tokens) > 1 else "")


@njit(cache=True)
def _tree(root, grams, deepest, most, ends):  # type: ignore[no-untyped-def]
    """Merge `grams` [m, n - 1], padded with -1, into a tree of at most `deepest` levels and `most` drafted nodes.

    Level by level, because nodes near the root are likelier. Returns tokens and parents."""
    tokens, parents = np.empty(grams.size + 1, np.int64), np.empty(grams.size + 1, np.int64)
    tokens[0], parents[0], size = root, -1, 1
    nodes = np.zeros(len(grams), np.int64)  # node of each sequence so far; -1: it has ended
    for depth in range(deepest):
        above = nodes.copy()
        for i in range(len(grams)):
            token, j = grams[i, depth], 0
            if above[i] < 0 or token < 0 or (above[i] > 0 and (ends == tokens[above[i]]).any()):
                nodes[i] = -1
                continue
            while nodes[j] < 0 or above[j] != above[i] or grams[j, depth] != token:
                j += 1
            if j < i:
                nodes[i] = nodes[j]
                continue
            if size > most:
                return tokens[:size], parents[:size]
            tokens[size], parents[size], nodes[i] = token, above[i], size
            size += 1
    return tokens[:size], parents[:size]


def frequent_paths(lines: NDArray[np.int32], most: int) -> list[Gram]:
    """The `most` most frequent beginnings of `lines`, most frequent first, without beginnings of other results.

    lines  [m, length]: continuations of a key, padded with -1, sorted. Of equally frequent beginnings the earlier comes
           first."""
    # begins[line, depth]: no earlier line has the same first depth + 1 tokens.
    begins = np.ones(lines.shape, np.bool_)
    begins[1:] = np.logical_or.accumulate(lines[1:] != lines[:-1], axis=1)
    count = np.zeros(lines.shape, np.int64)
    for depth in range(lines.shape[1]):
        first = np.flatnonzero(begins[:, depth])
        count[first, depth] = np.diff(first, append=len(lines))
    line, depths = np.nonzero(begins & (lines >= 0))
    best = np.argsort(-count[line, depths], kind="stable")[:most]
    ends = zip(line[best].tolist(), depths[best].tolist(), strict=True)
    paths = [tuple(lines[at, : depth + 1].tolist()) for at, depth in ends]
    inner = {path[:-1] for path in paths}
    return [path for path in paths if path not in inner]
