"""sam: copy what followed the longest suffix of the text that occurred before, here or in a corpus.

Hu et al. 2025, "SAM Decoding: Speculative Decoding via Suffix Automaton" (ACL 2025, arXiv 2411.10666). A suffix
automaton gives the longest match in O(1) a token. The length of the match sets the length of the draft: a short match
proposes little or nothing, and in `sam+b` drafter b is asked then.

    dynamic   over prompt and answer (`automaton.py`), always
    static    over a corpus (`frozen.py`): copied when more than `bias` tokens longer than the dynamic match
    past      over requests that this engine has finished: copied when longer than the row's own match

Where we differ from the published method and why: docs/methods/sam.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from paceline.draft.base import Drafter, DraftTree, Facts, IntArray, Request
from paceline.draft.spec import Options, option
from paceline.draft.text.automaton import SuffixAutomaton, warm_up
from paceline.draft.text.copying import Generations, continuation, up_to_end
from paceline.draft.text.store import open_for

if TYPE_CHECKING:
    from paceline.draft.text.frozen import FrozenAutomaton

TAIL = 64  # last tokens of a row that are looked up in another text: longer matches count as this long


@dataclass(frozen=True)
class SamConfig(Options):
    draft: int = option(40, "most tokens a draft holds; paper: 40, and 16 for code", least=1)
    min_match: int = option(1, "tokens of the shortest match copied; paper: 1 alone, 5 in front", least=1, in_front=5)
    source: Literal["recent", "earliest"] = option("recent", "which occurrence is copied; paper: earliest")
    grow: float = option(6.0, "tokens drafted for each one matched, up to `draft`; 0 (paper): always `draft`", least=0)
    corpus: str | None = option(None, "folder of a corpus to copy from too, made by `paceline corpus build`")
    bias: int = option(0, "tokens that a corpus match counts less; paper: 0 alone, 5 in front", least=0, in_front=5)
    shape: Literal["chain", "tree"] = option("tree", "from the corpus: a copy, or what was most frequent; paper: tree")
    width: int = option(8, "most nodes at a level of such a tree, at most 8; the paper's code: 8", least=1, most=8)
    past: int = option(0, "tokens of finished requests to remember and copy from; 0: none", least=0)


class Sam(Drafter):
    """Copies what followed the longest suffix of the text that occurred before (suffix automaton)."""

    name = "sam"
    lossless = "yes"
    paper = "Hu et al. 2025, SAM Decoding, arXiv 2411.10666"
    Config = SamConfig

    def __init__(self, config: SamConfig = SamConfig()):
        self.config = config
        self._recent = config.source == "recent"
        self._automata: dict[int, SuffixAutomaton] = {}
        self._cursors: dict[int, _Cursor] = {}
        self._past = Generations(config.past, _Past) if config.past > 1 else None
        self._corpus: FrozenAutomaton | None = None
        self._borders: frozenset[int] = frozenset()

    def bind(self, target: Facts) -> None:
        """Open the corpus; compile. Raises StoreError if the corpus is not one for this model."""
        super().bind(target)
        self._borders = frozenset(self.eos_token_ids)
        warm_up()
        if self.config.corpus is not None:
            store = open_for(target, self.config.corpus)
            from paceline.draft.text.frozen import from_parts

            self._corpus = from_parts(store.array)
            self._corpus.warm_up()
            self._borders |= {store.header["eos"]}

    def start(self, row: Request) -> None:
        # Room for an answer as long as the prompt before the arrays double.
        self._automata[row.id] = SuffixAutomaton(2 * len(row))
        self._cursors[row.id] = _Cursor(0, 0, max(0, len(row) - TAIL))

    def drop(self, row: Request) -> None:
        self._cursors.pop(row.id, None)
        if self._automata.pop(row.id, None) is not None and self._past is not None and row.is_complete:
            self._past.learn(np.append(row.tokens, self.eos_token_ids[:1]))

    def draft(self, row: Request) -> DraftTree:
        """From the longest match; among equal ones the row's own, then in the order of `_others`."""
        match = max([self._own(row), *self._others(row)], key=lambda match: match.length)
        size = self.config.draft
        if self.config.grow:
            size = min(size, int(self.config.grow * match.length))
        if match.length < self.config.min_match or size < 1:
            return DraftTree.root(row.last_token)
        return match.draft(row, size)

    def _own(self, row: Request) -> _Match:
        """Append the row's new tokens and match its own text. Only committed tokens go in, so none is taken back."""
        automaton = self._automata[row.id]
        automaton.extend(row.tokens[len(automaton) :])
        length, first, recent = automaton.match()
        start = recent if self._recent else first

        def copy(row: Request, size: int) -> DraftTree:
            drafted = continuation(row.tokens, start, min(size, row.max_draft))
            return self.chain_after(row, up_to_end(drafted, self.end_tokens(row), keep=True))

        return _Match(length, copy)

    def _others(self, row: Request) -> Iterator[_Match]:
        """The matches in other texts: the corpus, then finished requests, the newer first."""
        if self._corpus is not None:
            cursor = self._cursors[row.id]
            state, length = self._corpus.transfer(cursor.state, cursor.length, row.tokens[cursor.read :])
            self._cursors[row.id] = _Cursor(state, length, len(row))
            draft = self._copy if self.config.shape == "chain" else self._branch
            yield _Match(length - self.config.bias, partial(draft, self._corpus, state))
        for past in self._past.halves if self._past is not None else ():
            state, length = past.automaton.transfer(0, 0, row.tokens[-TAIL:])
            yield _Match(length, partial(self._copy, past, state))

    def _copy(self, text: FrozenAutomaton | _Past, state: int, row: Request, size: int) -> DraftTree:
        """What followed the match in another text, up to the end of the document."""
        drafted = text.chain(state, min(size, row.max_draft), recent=self._recent)
        return self.chain_after(row, up_to_end(drafted, self.end_tokens(row) | self._borders, keep=True))

    def _branch(self, corpus: FrozenAutomaton, state: int, row: Request, size: int) -> DraftTree:
        """What followed the match most often in the corpus."""
        ends = self.end_tokens(row) | self._borders
        tokens, parents, _ = corpus.tree(state, size, width=self.config.width, depth=row.max_draft, ends=tuple(ends))
        return self.tree_after(row, tokens, parents)


class _Cursor(NamedTuple):
    """A row's place in the corpus; read: tokens of the row that led there."""

    state: int
    length: int
    read: int


class _Match(NamedTuple):
    """A match: its length, less the corpus's bias, and a function that drafts that many tokens from it."""

    length: int
    draft: Callable[[Request, int], DraftTree]


class _Past:
    """Finished requests, at most `capacity` tokens. No cursor is kept in it: appending a text may split its state."""

    def __init__(self, capacity: int):
        self.automaton = SuffixAutomaton()
        self._text = np.empty(capacity, np.int32)

    def __len__(self) -> int:
        return len(self.automaton)

    def learn(self, text: IntArray) -> None:
        """One more request."""
        begin = len(self.automaton)
        self._text[begin : begin + len(text)] = text
        self.automaton.extend(text)

    def chain(self, state: int, size: int, *, recent: bool) -> IntArray:
        """As FrozenAutomaton.chain."""
        start = self.automaton.ends(state)[recent]
        return self._text[start : min(start + size, len(self.automaton))].astype(np.int64)
