"""ngram-pool: draft n-grams of the text, and n-grams that the target generates on the side.

Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (ICML 2024, arXiv
2402.02057). The n-grams in the row's pool that begin with the last token are drafted, at most `guesses`, merged into
one trie. In the same forward a window of later tokens is iterated by Jacobi's method. It has `window` columns of
`level` - 1 tokens; each row is one iteration older than the row below it. The forward predicts one more row. Each
column, from its key down to the new token, is an n-gram of `level` tokens and goes into the pool. The oldest row is
dropped.

The window never becomes part of the answer: its nodes are probes (see `paceline.core.tree`). In the published mask a
token sees the oldest row to its left and the column above itself. That is a tree: the oldest row is a chain after the
root, and one column hangs from the root and from each token of the chain.

    root ── a0 ── a1 ── a2         oldest row; keys of the four columns: root, a0, a1, a2
     │      │     │     │
     b0     b1    b2    b3         one iteration later
     │      │     │     │
     c0     c1    c2    c3         after these the forward predicts d0 d1 d2 d3:
                                   "root b0 c0 d0", "a0 b1 c1 d1" ... are n-grams of 4 tokens

Where we differ from the published method and why: docs/methods/ngram-pool.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch

from paceline.core.options import Options, option
from paceline.core.sampling import on_accelerator
from paceline.core.tree import merge
from paceline.draft.base import Drafter, DraftTree, Facts, Request, Round
from paceline.draft.text.copying import BySalt, TwoHalves, up_to_end
from paceline.draft.text.ngrams import Gram, RecentNgrams, warm_up
from paceline.kernels.rows import best_token


@dataclass(frozen=True)
class NgramPoolConfig(Options):
    level: int = option(5, "tokens in an n-gram, the last token of the text included; paper: 5", least=2)
    window: int = option(
        7, "columns of the window beside the text, 0: none; paper: 7, on large GPUs 15", least=0, in_front=0
    )
    guesses: int = option(7, "n-grams kept and drafted for each token; paper: same as the window", least=1)
    prompt: bool = option(True, "also put the prompt's n-grams into the pool; paper: false")
    past: int = option(0, "tokens of finished requests whose n-grams are remembered; paper: 0", least=0)


class Window:
    """The tokens that are iterated on the side. rows[0] is the oldest iteration.

    tokens  the first row, window + level - 3 tokens. Until there are level - 1 rows, each step adds a row, and every
            row loses its first token, because the text has moved on."""

    def __init__(self, tokens: Sequence[int], level: int):
        self.level = level
        self.rows = [list(tokens)]
        self.leaves: list[int] = []

    @property
    def depth(self) -> int:
        """Depth of the window's deepest node."""
        return len(self.rows[0]) + len(self.rows) - 1

    def hang(self, draft: DraftTree) -> DraftTree:
        """Add the window's nodes below the root of `draft`, as probes."""
        tokens, parent = draft.tokens.tolist(), draft.parent.tolist()

        def add(token: int, above: int) -> int:
            tokens.append(token)
            parent.append(above)
            return len(tokens) - 1

        keys = [0]
        for token in self.rows[0]:
            keys.append(add(token, keys[-1]))
        self.leaves = []
        for column, node in enumerate(keys):
            for row in self.rows[1:]:
                node = add(row[column], node)
            self.leaves.append(node)
        probe = np.arange(len(tokens)) >= len(draft)
        return DraftTree(np.array(tokens), np.array(parent), probe=probe, source=draft.source)

    def step(self, root: int, predicted: list[int]) -> list[Gram]:
        """Add a row. Returns the n-grams that it completes. predicted: the forward's token for each column."""
        rows = [*self.rows, predicted]
        if len(rows) < self.level:
            self.rows = [row[1:] for row in rows]
            return []
        self.rows = [rows[1][1:], *rows[2:]]
        return list(zip([root, *rows[0]], *rows[1:], strict=True))


class NgramPool(Drafter):
    """Drafts n-grams that begin with the last token, made by the target on the side (lookahead decoding) or seen."""

    name = "ngram-pool"
    lossless = "yes"
    paper = "Fu et al. 2024, Lookahead Decoding, arXiv 2402.02057"
    Config = NgramPoolConfig

    def __init__(self, config: NgramPoolConfig = NgramPoolConfig()):
        self.config = config
        self._past = BySalt(lambda: TwoHalves(config.past, lambda tokens: RecentNgrams(config.level, config.guesses)))
        self._pools: dict[int, RecentNgrams] = {}
        self._windows: dict[int, Window] = {}

    def bind(self, target: Facts) -> None:
        super().bind(target)
        warm_up()

    def start(self, row: Request) -> None:
        read = 0 if self.config.prompt else row.prompt_length
        self._pools[row.id] = RecentNgrams(self.config.level, self.config.guesses, read=read)
        if self.config.window:
            # The window may begin with any tokens; those of the prompt are likelier.
            begin = np.random.default_rng(0).choice(row.tokens, self.config.window + self.config.level - 3)
            self._windows[row.id] = Window(begin.tolist(), self.config.level)

    def observe(self, round: Round) -> None:
        """Step the windows that were in the forward, and add their n-grams to the pools."""
        for i, (row, tree) in enumerate(zip(round.rows, round.trees, strict=True)):
            window = self._windows.get(row.id)
            if window is not None and tree.probe is not None and round.is_from(i, self):
                predicted = _best(round.logits(i), window.leaves)
                for gram in window.step(int(tree.tokens[0]), predicted):
                    self._pools[row.id].add(gram)

    def drop(self, row: Request) -> None:
        self._windows.pop(row.id, None)
        if self._pools.pop(row.id, None) is not None:
            self._past.of(row.params.cache_salt).learn(row)

    def draft(self, row: Request, most: int) -> DraftTree:
        pool = self._pools[row.id]
        pool.update(row.tokens)
        stores = (pool, *self._past.of(row.params.cache_salt).halves)
        known = islice(chain.from_iterable(one.after(row.last_token) for one in stores), self.config.guesses)
        guesses = [up_to_end(np.array(gram[:most]), row.ends, keep=True) for gram in known]
        draft = merge([DraftTree.root(row.last_token), *(self.chain_after(row, guess) for guess in guesses)])
        window = self._windows.get(row.id)
        return window.hang(draft) if window is not None and window.depth <= most else draft


def _best(logits: torch.Tensor, nodes: list[int]) -> list[int]:
    """The best token of each of `nodes` by logits [M, V]."""
    if on_accelerator(logits):
        return logits[nodes].argmax(-1).tolist()
    return [best_token(logits, node) for node in nodes]
