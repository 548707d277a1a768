"""suffix: the most frequent continuation of a suffix of the text.

Oliaro et al. 2025, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (NeurIPS 2025, arXiv
2411.04975), by the rule of Arctic Inference, which vLLM's `method: suffix` runs, too. Suffix trees count each run of up
to `depth` tokens: a tree for each request, two for finished requests (`past`). Each suffix of the text that occurs in a
tree gives a draft, its most frequent continuation. After a suffix of m tokens it has up to `factor` * m + `offset`.

    prob    probability of a node: the product of count(child) / count(node) on its path. Below `min_prob` the node is
            left out
    score   score of a draft: the sum of its nodes' probs, an estimate of the tokens that will be accepted

The draft with the highest score over all trees is proposed; of equal scores, the draft of the longer match.

Where we differ from the published method and why: docs/methods/suffix.md."""

from dataclasses import dataclass
from typing import Literal

from paceline.core.options import Options, option
from paceline.draft.base import Drafter, DraftTree, Facts, Request
from paceline.draft.text.copying import BySalt, TwoHalves
from paceline.draft.text.store import open_for
from paceline.draft.text.suffix_array import SuffixArray
from paceline.draft.text.suffix_tree import Speculator, SuffixTree, warm_up
from paceline.errors import MethodError


@dataclass(frozen=True)
class SuffixConfig(Options):
    depth: int = option(
        24, "tokens of the longest run that is counted, match and draft together; vLLM: 24, Arctic: 64", least=2
    )
    draft: int = option(24, "most tokens a draft holds; vLLM: its depth", least=1)
    factor: float = option(1.0, "tokens drafted for each token matched; paper: 1", least=0)
    offset: float = option(0.0, "tokens drafted in addition to those of factor; paper: 0", least=0)
    min_prob: float = option(0.1, "least probability of a drafted token; paper: 0.1", least=0, most=1)
    shape: Literal["path", "tree"] = option(
        "path", "shape of a draft: the most frequent path, or a tree of the likeliest nodes; vLLM: path"
    )
    past: int = option(0, "tokens of finished requests to learn from, the oldest forgotten first; 0: off", least=0)
    corpus: str | None = option(None, "corpus to learn from, made by `paceline corpus build`")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor + self.offset == 0 or self.min_prob == 0:
            given = f"factor is {self.factor}, offset {self.offset}, min_prob {self.min_prob}"
            raise MethodError(f"suffix: {given}; factor or offset must be above 0, and so must min_prob.")


class Suffix(Drafter):
    """Follows the most frequent continuation of the text's end, as long as it is likely (suffix trees)."""

    name = "suffix"
    lossless = "yes"
    paper = "Oliaro et al. 2025, SuffixDecoding, arXiv 2411.04975"
    Config = SuffixConfig

    def __init__(self, config: SuffixConfig = SuffixConfig()):
        self.config = config
        self._trees: dict[int, SuffixTree] = {}
        self._past = BySalt(lambda: TwoHalves(config.past, lambda tokens: SuffixTree(config.depth)))
        self._corpus: list[Speculator] = []

    def bind(self, target: Facts) -> None:
        """Open the corpus, and compile. Raises StoreError if the corpus is not for this model."""
        super().bind(target)
        warm_up()
        if self.config.corpus is not None:
            array = SuffixArray.of(open_for(target, self.config.corpus))
            array.speculate([0], 1)
            self._corpus.append(array)

    def start(self, row: Request) -> None:
        self._trees[row.id] = SuffixTree(self.config.depth, len(row))

    def drop(self, row: Request) -> None:
        if self._trees.pop(row.id, None) is not None:
            self._past.of(row.params.cache_salt).learn(row)

    def draft(self, row: Request, most: int) -> DraftTree:
        tree = self._trees[row.id]
        tree.append(row.tokens[len(tree) :])
        config, context = self.config, row.tokens[1 - self.config.depth :]
        sizes = min(config.draft, most), config.factor, config.offset, config.min_prob, config.shape == "tree"
        best = tree.speculate(context, *sizes)
        given = [row.params.corpus] if row.params.corpus is not None else []
        for text in (*self._past.of(row.params.cache_salt).halves, *self._corpus, *given):
            best = max(best, text.speculate(context, *sizes), key=lambda draft: draft.score)
        return self.tree_after(row, best.tokens, best.parent)
