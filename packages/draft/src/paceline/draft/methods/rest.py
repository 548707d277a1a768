"""rest: draft a tree of the tokens that most often follow the end of the text in a corpus.

He et al. 2024, "REST: Retrieval-Based Speculative Decoding" (NAACL 2024, arXiv 2311.08252). A suffix array finds the
longest suffix of the text, 16 to 2 tokens, that occurs in a corpus. The continuations of all its places form a trie, in
which a node weighs as many places as go through it. The 64 heaviest nodes, which are a tree, are drafted.

The trie is not built: a suffix array is sorted, so a node's places are a range, and its children's are parts of it.

Where we differ from the published method and why: docs/methods/rest.md."""

from dataclasses import dataclass

from paceline.core.options import Options, option
from paceline.draft.base import Drafter, DraftTree, Facts, Request
from paceline.draft.text.store import open_for
from paceline.draft.text.suffix_array import HITS, SuffixArray
from paceline.errors import MethodError


@dataclass(frozen=True)
class RestConfig(Options):
    checkpoint: str = option(help="the corpus store, made by `paceline corpus build`")
    nodes: int = option(64, "most nodes of the tree; paper: 64", least=1)
    longest: int = option(16, "tokens of the longest suffix looked up; paper: 16", least=1)
    shortest: int = option(2, "tokens of the shortest suffix looked up; paper: 2", least=1)
    hits: int = option(HITS, "most places in the corpus that are read; paper: 5000", least=1)
    length: int = option(10, "tokens of the longest continuation; paper: 10", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest < self.shortest:
            raise MethodError(f"rest: shortest is {self.shortest}; it must be at most longest, {self.longest}.")


class Rest(Drafter):
    """Drafts the most frequent continuations of the text's end in a corpus, as a tree (suffix array)."""

    name = "rest"
    lossless = "yes"
    paper = "He et al. 2024, REST, arXiv 2311.08252"
    Config = RestConfig

    def __init__(self, config: RestConfig):
        self.config = config

    def bind(self, target: Facts) -> None:
        """Open the corpus, and compile. Raises StoreError if the corpus is not for this model."""
        super().bind(target)
        self._array = SuffixArray.of(open_for(target, self.config.checkpoint))
        self._array.warm_up()

    def draft(self, row: Request, most: int) -> DraftTree:
        # After an end token, the corpus goes on with another document.
        if row.last_token in row.ends or row.last_token == self._array.end_token:
            return DraftTree.root(row.last_token)
        config = self.config
        skip, lo, hi = self._array.longest(row.tokens, config.longest, config.shortest)
        depth = min(config.length, most)
        tokens, parent, _ = self._array.heaviest(lo, hi, skip, config.nodes, depth, row.ends, config.hits)
        return self.tree_after(row, tokens, parent)
