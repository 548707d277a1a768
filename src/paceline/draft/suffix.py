"""suffix: the likeliest continuation of any suffix of the text, by how often it has been seen.

Oliaro et al. 2025, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (NeurIPS 2025, arXiv
2411.04975), by the rule of Arctic Inference, which vLLM's `method: suffix` runs too. Suffix trees count every run of up
to `depth` tokens: one tree for each request, one for all finished ones (`past`). Behind each suffix of the text that
occurs, m tokens long, the most frequent continuation is followed for `factor` * m + `offset` tokens:

    prob    of a node: the product of count(child) / count(node) on the way to it; followed down to `min_prob`
    score   of a draft: the sum of its nodes' probs, the tokens it expects to be accepted

and the draft of the highest score is taken, of equals that of the longer match, over all trees.

Lossless: the drafts are point masses, so acceptance keeps the target's distribution exactly.

Where we differ from the code (github.com/snowflakedb/ArcticInference), and why:
* past requests are remembered with their prompts, and as many as fit into `past` tokens, not a number of requests:
  the memory is known beforehand; it is off unless asked for;
* a corpus (`corpus`) is a third source by the same rule. Its counts are read off a suffix array, mapped from disk:
  a tree of it would take 180 bytes a token and be built again at every start;
* the end of the text is no place where its own last tokens were seen: the code counts it, though nothing follows it
  yet, so a request's own tree is underrated beside the others;
* of two continuations seen equally often the latest is followed;
* nothing is drafted behind a token that ends the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paceline.draft.base import Drafter
from paceline.draft.text.copying import end_tokens
from paceline.draft.text.store import open_store
from paceline.draft.text.suffix_array import SuffixArray
from paceline.draft.text.suffix_tree import Speculation, SuffixTree, warm_up
from paceline.errors import MethodError
from paceline.row import Request
from paceline.target.base import Facts
from paceline.tree import DraftTree, IntArray


@dataclass(frozen=True)
class SuffixConfig:
    """Options of suffix."""

    depth: int = field(
        default=24, metadata={"help": "longest run counted, match and draft together, tokens; vLLM: 24, Arctic: 64"}
    )
    draft: int = field(default=24, metadata={"help": "most tokens a draft holds; vLLM: its depth"})
    factor: float = field(default=1.0, metadata={"help": "tokens drafted for each token matched; paper: 1"})
    offset: float = field(default=0.0, metadata={"help": "tokens drafted beside those; paper: 0"})
    min_prob: float = field(default=0.1, metadata={"help": "least probability of a drafted token; paper: 0.1"})
    shape: Literal["path", "tree"] = field(
        default="path", metadata={"help": "the heaviest path, or the likeliest nodes of all; vLLM: path"}
    )
    past: int = field(
        default=0, metadata={"help": "tokens of finished requests to learn from, the oldest forgotten first; 0: off"}
    )
    corpus: str | None = field(
        default=None, metadata={"help": "a corpus store to learn from, made by `paceline corpus build`"}
    )

    def __post_init__(self) -> None:
        if self.depth < 2 or self.draft < 1 or self.past < 0:
            raise MethodError(
                f"suffix: depth is {self.depth}, draft {self.draft}, past {self.past}; "
                "depth must be 2 or more, draft 1 or more, past 0 or more."
            )
        if not (self.factor >= 0 and self.offset >= 0 and self.factor + self.offset > 0 and 0 < self.min_prob <= 1):
            raise MethodError(
                f"suffix: factor is {self.factor}, offset {self.offset}, min_prob {self.min_prob}; factor and offset "
                "must be 0 or more and not both 0, min_prob above 0 and at most 1."
            )


class Suffix(Drafter):
    """Follows the most frequent continuation of the text's end, as long as it is likely (suffix trees)."""

    name = "suffix"
    lossless = "yes"
    paper = "Oliaro et al. 2025, SuffixDecoding, arXiv 2411.04975"
    Config = SuffixConfig

    def __init__(self, config: SuffixConfig = SuffixConfig()):
        self.config = config
        self._trees: dict[int, SuffixTree] = {}
        self._past = SuffixTree(config.depth)
        self._shared: list[SuffixTree | SuffixArray] = [self._past] if config.past else []
        self._eos: Sequence[int] = ()

    def bind(self, target: Facts) -> None:
        """Compile; take the end tokens; open the corpus. Raises StoreError if it is not one for this model."""
        self._eos = target.eos_token_ids
        warm_up()
        if self.config.corpus is not None:
            fingerprint = target.tokenizer.fingerprint if target.tokenizer else None
            array = SuffixArray.of(open_store(self.config.corpus, kind="corpus", tokenizer=fingerprint))
            array.speculate([0], 1)
            self._shared.append(array)

    def start(self, row: Request) -> None:
        self._trees[row.id] = SuffixTree(self.config.depth, len(row))

    def drop(self, row: Request) -> None:
        tree = self._trees.pop(row.id, None)
        if tree is not None and self.config.past and row.is_complete:
            self._learn(row.tokens[-self.config.past :])

    def _learn(self, tokens: IntArray) -> None:
        """Put a finished request into the tree of past ones, in place of the oldest."""
        while len(self._past) + len(tokens) > self.config.past:
            self._past.remove()
        self._past.append(tokens)
        self._past.close()

    def draft(self, row: Request) -> DraftTree:
        tree = self._trees[row.id]
        tree.append(row.tokens[len(tree) :])
        most = min(self.config.draft, row.max_draft)
        if most < 1:
            return DraftTree.root(row.last_token)
        best = max((self._speculate(source, row, most) for source in (tree, *self._shared)), key=lambda s: s.score)
        tokens, parent = up_to_ends(best.tokens, best.parent, end_tokens(row, self._eos))
        if not len(tokens):
            return DraftTree.root(row.last_token)
        return DraftTree(np.append(row.last_token, tokens), np.append(-1, parent), source=self.name)

    def _speculate(self, source: SuffixTree | SuffixArray, row: Request, most: int) -> Speculation:
        return source.speculate(
            row.tokens[1 - self.config.depth :],
            most,
            self.config.factor,
            self.config.offset,
            self.config.min_prob,
            self.config.shape == "tree",
        )


def up_to_ends(tokens: IntArray, parent: IntArray, ends: frozenset[int]) -> tuple[IntArray, IntArray]:
    """Tokens and parents int64 [n] (0 is the root, 1 the first token) without what stands behind a token of `ends`."""
    if ends.isdisjoint(tokens.tolist()):
        return tokens, parent
    kept: list[int] = []
    number = {0: 0}
    for i, (token, above) in enumerate(zip(tokens.tolist(), parent.tolist(), strict=True)):
        if above in number:
            kept.append(i)
            if token not in ends:
                number[i + 1] = len(kept)
    return tokens[kept], np.array([number[above] for above in parent[kept].tolist()], np.int64)
