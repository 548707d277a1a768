"""blend: one tree from several texts at once, the most probable nodes first.

Prediction by partial matching (Cleary and Witten 1984; escape method C of Moffat 1990) over several texts at once: the
row's own, finished requests, and a corpus. For every node, the longest context comes first and passes the mass of which
it is unsure to the next shorter one (the escape). The product along a path estimates the probability of the path, and
the tree grows best first to `nodes` nodes. It is our combination, not a published method.

    P(t | context) = sum over contexts, longest first, of  (mass left) * n(t) / (n + e * d)
    mass left      <- mass left * e * d / (n + e * d)

n: how often the context was seen, d: how many different tokens followed, e: doubt, by text and length of context."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.draft.base import Drafter, DraftTree, Facts, Request
from paceline.draft.spec import Options, option
from paceline.draft.text.copying import Generations
from paceline.draft.text.counts import COUNT, DISTINCT, HEAD, NEXT, TOKEN, TOTAL, ContextCounts, locate, mixed
from paceline.draft.text.frozen import FRONT, FrozenAutomaton, from_parts, transfer
from paceline.draft.text.store import open_for
from paceline.draft.text.suffix_tree import insert

OWN_DOUBT = (3.0, 5.0, 2.0, 1.5, 1.5, 1.0, 0.8, 0.5)
"""e by length of context, 1, 2, ... tokens, in the row's own text and in finished requests."""
CORPUS_DOUBT = (4.0, 3.5, 4.5, 4.2, 2.1, 3.0, 2.5, 2.0)
"""The same in the corpus. Both were tuned on recorded answers; docs/methods/blend.md says how."""
ENOUGH = 0.02  # shorter contexts are not asked if less mass than this is left


@dataclass(frozen=True)
class BlendConfig(Options):
    nodes: int = option(40, "most drafted tokens in a tree", least=1)
    longest: int = option(4, "tokens of the longest context in the row's text and past ones, up to 8", least=1, most=8)
    least: float = option(0.003, "least estimated probability of a drafted token", least=0, most=1)
    corpus: str | None = option(None, "folder of a corpus to read too, made by `paceline corpus build`")
    past: int = option(0, "tokens of finished requests to remember and read too; 0: none", least=0)


class Blend(Drafter):
    """Grows one tree from the row's text, finished requests and a corpus, the most probable tokens first."""

    name = "blend"
    lossless = "yes"
    paper = "our own; prediction by partial matching, Cleary and Witten 1984"
    Config = BlendConfig

    def __init__(self, config: BlendConfig = BlendConfig()):
        self.config = config
        self._counts: dict[int, ContextCounts] = {}
        self._past = Generations(config.past, lambda tokens: ContextCounts(config.longest, 1))
        self._corpus: tuple[NDArray[Any], ...] = _NO_CORPUS
        self._borders: frozenset[int] = frozenset()

    def bind(self, target: Facts) -> None:
        """Open the corpus; compile. Raises StoreError if the corpus is not one for this model."""
        super().bind(target)
        self._borders = frozenset(self.eos_token_ids)
        if self.config.corpus is not None:
            store = open_for(target, self.config.corpus)
            self._corpus = from_parts(store.array).arrays
            self._borders |= {store.header["eos"]}
        counts = ContextCounts(self.config.longest, 1)
        counts.extend([0, 0])
        self._grow(counts, np.zeros(1, np.int64), np.zeros(0, np.int64), 1, 1)

    def start(self, row: Request) -> None:
        self._counts[row.id] = ContextCounts(self.config.longest, 2 * len(row))

    def drop(self, row: Request) -> None:
        if self._counts.pop(row.id, None) is not None and self.config.past and row.is_complete:
            self._past.learn(row.tokens)

    def draft(self, row: Request) -> DraftTree:
        counts = self._counts[row.id]
        counts.extend(row.tokens[len(counts) :])
        ends = np.array(sorted(self.end_tokens(row) | self._borders), np.int64)
        tokens, parents = self._grow(counts, row.tokens[-_TAIL:], ends, self.config.nodes, row.max_draft)
        return self.tree_after(row, tokens, parents)

    def _grow(
        self, counts: ContextCounts, tail: NDArray[np.int64], ends: NDArray[np.int64], nodes: int, depth: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        newer, older = self._past.halves
        return _tree(
            (counts.arrays, newer.arrays, older.arrays), self._corpus, np.array(tail), ends,
            nodes, depth, self.config.longest, self.config.least, _OWN, _CORPUS,
        )  # fmt: skip


_TAIL = 64  # tokens of a row that find its place in the corpus
_OWN, _CORPUS = np.array(OWN_DOUBT), np.array(CORPUS_DOUBT)
_NO_CORPUS = FrozenAutomaton.of(np.zeros(0, np.uint16)).arrays
_MOST = 256  # different tokens that one node's estimate keeps


@njit(cache=True)
def _tree(counted, corpus, tail, ends, nodes, depth, longest, least, own, other):  # type: ignore[no-untyped-def]
    """Best first: tokens [m] and parents [m] (0 is the row's last token, 1 the first node).

    counted     arrays of ContextCounts, the row's own first.
    own, other  the doubt by length of context, there and in the corpus.

    One list in order of probability is read from the front, and what may follow the node read is inserted."""
    entries, probs = np.empty((nodes, 3), np.int64), np.empty(nodes)  # token, parent, depth
    places = np.empty((nodes + 1, 2), np.int64)  # in the corpus: state, length
    text, states, targets, blocks, edges = corpus
    places[0, 0], places[0, 1] = transfer(text, states, targets, blocks, edges, 0, 0, tail)
    before = np.empty((nodes + 1, longest), np.int64)  # the tokens before a child of the node, the latest first
    known = np.zeros(nodes + 1, np.int64)  # number of these tokens
    known[0] = min(longest, len(tail))
    for i in range(known[0]):
        before[0, i] = tail[len(tail) - 1 - i]
    candidates, mass = np.empty(_MOST, np.int64), np.empty(_MOST)
    num, node, level, probability, is_end = 0, 0, 0, 1.0, False
    while True:
        if level < depth and not is_end:
            context = before[node, : known[node]]
            count = _predict(counted, corpus, context, places[node], candidates, mass, own, other)
            for i in range(count):
                share = probability * min(mass[i], 1.0)  # never above `probability`, however it is rounded
                if share >= least:
                    num = insert(entries, probs, num, (candidates[i], np.int64(node), np.int64(level + 1)), share)
        if node == num:
            break
        token, parent, level = entries[node, 0], entries[node, 1], entries[node, 2]
        probability, is_end = probs[node], (ends == token).any()
        node += 1
        state, length = places[parent, 0], places[parent, 1]
        state, length = transfer(text, states, targets, blocks, edges, state, length, entries[node - 1, :1])
        places[node, 0], places[node, 1] = state, length
        known[node] = min(longest, known[parent] + 1)
        before[node, 0] = token
        for i in range(1, known[node]):
            before[node, i] = before[parent, i - 1]
    return entries[:num, 0].copy(), entries[:num, 1].copy()


@njit
def _predict(counted, corpus, before, place, candidates, mass, own_doubt, corpus_doubt):  # type: ignore[no-untyped-def]
    """Fill candidates and mass with the tokens that may follow `before`, the longest context first; their number."""
    states = corpus[1]
    rows = np.empty((len(counted), len(before)), np.int64)
    key = np.int64(0)
    for i in range(len(before)):
        key = mixed(key, before[i])
        for t in range(len(counted)):
            rows[t, i] = locate(counted[t][0], counted[t][1], key)
    left, count = 1.0, 0
    state, length = place[0], place[1]
    for longer in range(len(before), 0, -1):
        doubt = own_doubt[longer - 1]
        for t in range(len(counted)):
            left, count = _add_counted(counted[t], rows[t, longer - 1], left, doubt, candidates, mass, count)
        while state > 0 and length >= longer:
            doubt = corpus_doubt[min(length, len(corpus_doubt)) - 1]
            left, count = _add_corpus(corpus, state, left, doubt, candidates, mass, count)
            state = np.int64(states[state, 1])
            length = np.int64(states[state, 0])
        if left < ENOUGH:
            break
    return count


@njit
def _add_counted(counts, row, left, doubt, candidates, mass, count):  # type: ignore[no-untyped-def]
    """Add the successors of one context of a counted text; returns the mass left and the number of candidates."""
    if row < 0:
        return left, count
    contexts, items = counts[2], counts[3]
    unsure = doubt * contexts[row, DISTINCT]
    share = left / (contexts[row, TOTAL] + unsure)
    item = contexts[row, HEAD]
    while item >= 0:
        count = _add(candidates, mass, count, items[item, TOKEN], share * items[item, COUNT])
        item = items[item, NEXT]
    return share * unsure, count


@njit
def _add_corpus(corpus, state, left, doubt, candidates, mass, count):  # type: ignore[no-untyped-def]
    """Add the most frequent successors of one context of the corpus; returns the same as `_add_counted`."""
    text, states, _, blocks, edges = corpus
    num_blocks = len(blocks) - 1
    if state >= num_blocks:  # one successor; its count, mostly 1, would take a long walk
        count = _add(candidates, mass, count, np.int64(text[states[state, 2]]), left / (1 + doubt))
        return left * doubt / (1 + doubt), count
    begin, end = np.int64(blocks[state, 0]), np.int64(blocks[state + 1, 0])
    total, unsure = blocks[state, 1], doubt * (end - begin)
    share = left / (total + unsure)
    for edge in range(begin, min(begin + FRONT, end)):
        count = _add(candidates, mass, count, np.int64(edges[edge, 0]), share * edges[edge, 2])
    return share * unsure, count


@njit
def _add(candidates, mass, count, token, probability):  # type: ignore[no-untyped-def]
    for i in range(count):
        if candidates[i] == token:
            mass[i] += probability
            return count
    if count == len(candidates):
        return count
    candidates[count], mass[count] = token, probability
    return count + 1
