"""sam: copy the tokens after an earlier occurrence of the text's longest suffix, in the text or in a corpus.

Hu et al. 2025, "SAM Decoding: Speculative Decoding via Suffix Automaton" (ACL 2025, arXiv 2411.10666). A suffix
automaton gives the longest match in O(1) a token. The length of the match sets the length of the draft: a short match
proposes little or nothing, and in `sam+b` drafter b is asked then.

    dynamic   over prompt and answer (`automaton.py`), always
    static    over a corpus: copied if longer than the dynamic match
    past      over requests that this engine has finished: copied if longer than the dynamic match

The static match is looked up in a suffix array, which finds it in O(log n), with counts, in a ninth of the memory.
Where we differ from the published method and why: docs/methods/sam.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.options import Options, option
from paceline.draft.base import Drafter, DraftTree, Facts, IntArray, Request
from paceline.draft.text.automaton import SuffixAutomaton, warm_up
from paceline.draft.text.copying import BySalt, TwoHalves, continuation, up_to_end
from paceline.draft.text.store import open_for

if TYPE_CHECKING:
    from paceline.draft.text.suffix_array import SuffixArray

TAIL = 64
"""How many last tokens of a row are looked up in other texts. Longer matches count as this long."""


@dataclass(frozen=True)
class SamConfig(Options):
    draft: int = option(40, "most tokens a draft holds; paper: 40, and 16 for code", least=1)
    min_match: int = option(1, "tokens of the shortest match copied; paper: 1 alone, 5 in front", least=1, in_front=5)
    grow: float = option(6.0, "tokens drafted for each one matched, up to `draft`; 0 (paper): always `draft`", least=0)
    corpus: str | None = option(None, "folder of a corpus to draft from too, made by `paceline corpus build`")
    past: int = option(0, "tokens of finished requests to remember and copy from; 0: none", least=0)


class Sam(Drafter):
    """Copies the tokens after the longest suffix of the text that occurred before (suffix automaton)."""

    name = "sam"
    lossless = "yes"
    paper = "Hu et al. 2025, SAM Decoding, arXiv 2411.10666"
    Config = SamConfig

    def __init__(self, config: SamConfig = SamConfig()):
        self.config = config
        self._automata: dict[int, SuffixAutomaton] = {}
        self._past = BySalt(lambda: TwoHalves(config.past, _Texts))
        self._corpus: SuffixArray | None = None

    def bind(self, target: Facts) -> None:
        """Open the corpus, and compile. Raises StoreError if the corpus is not for this model."""
        super().bind(target)
        warm_up()
        if self.config.corpus is not None:
            from paceline.draft.text.suffix_array import SuffixArray

            self._corpus = SuffixArray.of(open_for(target, self.config.corpus))
            self._corpus.warm_up()

    def start(self, row: Request) -> None:
        # This leaves room for an answer as long as the prompt.
        self._automata[row.id] = SuffixAutomaton(2 * len(row))

    def drop(self, row: Request) -> None:
        if self._automata.pop(row.id, None) is not None:
            self._past.of(row.params.cache_salt).learn(row, *self.eos_token_ids[:1])

    def draft(self, row: Request, most: int) -> DraftTree:
        """Copy after the longest match. Of equal matches the row's own is best, then the corpus's, then the newest
        request's."""
        longest, ends, automaton = min(self.config.draft, most), row.ends, self._automata[row.id]
        automaton.extend(row.tokens[len(automaton) :])
        length, start = automaton.match()
        copied, found = continuation(row.tokens, start, longest), None
        for corpus in (self._corpus, row.params.corpus):
            if corpus is not None and row.last_token != corpus.end_token:  # Nothing follows an end token.
                skip, lo, hi = corpus.longest(row.tokens, TAIL, least=1)
                if skip > length:
                    length, found = skip, (corpus, lo, hi)
        for past in self._past.of(row.params.cache_salt).halves:
            matched, place = past.automaton.after(row.tokens[-TAIL:])
            if matched > length:
                length, copied, found = matched, past.text[place : place + longest].astype(np.int64), None
                ends = ends.union(self.eos_token_ids)
        size = min(self.config.draft, int(self.config.grow * length)) if self.config.grow else self.config.draft
        if length < self.config.min_match or size < 1:
            return DraftTree.root(row.last_token)
        if found is not None:
            corpus, lo, hi = found
            tokens, parent, _ = corpus.heaviest(lo, hi, length, size, most, ends)
            return self.tree_after(row, tokens, parent)
        return self.chain_after(row, up_to_end(copied[:size], ends, keep=True))


class _Texts:
    """Finished requests, together at most `capacity` tokens. Each round matches them anew, because a new text may split
    the state of an earlier match."""

    def __init__(self, capacity: int):
        self.automaton = SuffixAutomaton()
        self._room = np.empty(capacity, np.int32)

    def __len__(self) -> int:
        return len(self.automaton)

    def learn(self, text: IntArray) -> None:
        """Add a finished request."""
        begin = len(self.automaton)
        self._room[begin : begin + len(text)] = text
        self.automaton.extend(text)

    @property
    def text(self) -> NDArray[np.int32]:
        """The requests' tokens, one request after another."""
        return self._room[: len(self.automaton)]
