"""Draft: a row's draft while it grows. DraftModel: the interface of models that draft. TextModel: a model that reads
the rows' text into a cache of its own.

Drafted tokens lie after the row's committed tokens in the model's cache. `commit` keeps the accepted ones, so nothing
is rolled back. A draft begins with the committed tokens that the model has not run: usually one; two after a draft that
was accepted whole; more if another drafter drafted in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from paceline.core.request import Request
from paceline.core.round import Round
from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.target.base import Needs, Target
from paceline.target.cache import CachedTarget

ANY = 1 << 30
"""A number of tokens that stands for "no bound"."""


@dataclass
class Draft:
    """Nodes of a row's draft, in the order in which the model runs them.

    tokens, parent  nodes and their parents. The first `num_committed` nodes are committed tokens that the model has not
                    run; the last of them is the tree's root. The others are drafted.
    most            largest number of tokens to draft; of a tree, its depth."""

    row: Request
    num_committed: int
    tokens: list[int]
    parent: list[int]
    most: int = 0

    @classmethod
    def chain(cls, row: Request, committed: list[int], most: int = 0) -> Draft:
        """An empty draft after the tokens `committed`, which the model has not run."""
        return cls(row, len(committed), committed, list(range(-1, len(committed) - 1)), most)

    @property
    def drafted(self) -> list[int]:
        """Tokens drafted so far."""
        return self.tokens[self.num_committed :]

    @property
    def position(self) -> int:
        """Output position of the next token to draft."""
        return self.row.num_new + len(self.tokens) - self.num_committed

    @property
    def context(self) -> IntArray:
        """All tokens before the next token to draft, int64 [n]."""
        return np.concatenate([self.row.tokens, np.array(self.drafted, np.int64)])

    def add(self, token: int, parent: int | None = None) -> None:
        """Add a node after the last one, or after node `parent`."""
        self.parent.append(len(self.tokens) - 1 if parent is None else parent)
        self.tokens.append(token)


class DraftModel:
    """A model that drafts, bound to a target.

    vocab_size    number of tokens of its vocabulary: the target's, unless it has another tokenizer (`tokenizers.py`).
    columns       tokens int64 [K] of the columns of its logits; None: all tokens.
    needs         outputs and hooks of the target's forward that it needs.
    weight_bytes  bytes of weights that its forward reads.
    notes         lines that a user should read."""

    vocab_size: int
    columns: torch.Tensor | None = None
    needs = Needs()
    weight_bytes = 0
    notes: Sequence[str] = ()

    @cached_property
    def ran(self) -> dict[int, int]:
        """How many nodes of each row's draft were run, by row id. The proposer counts them."""
        return {}

    def start(self, row: Request) -> None:
        """Add a row. Nothing is run yet."""
        raise NotImplementedError

    def drop(self, row: Request) -> None:
        """Forget a row, if it was started."""
        raise NotImplementedError

    def slot(self, row: Request) -> int:
        """A row's slot in the model's cache."""
        raise NotImplementedError

    def length(self, row: Request) -> int:
        """How many of the row's tokens have been run and kept."""
        raise NotImplementedError

    def room(self, row: Request) -> int:
        """The largest number of tokens that can be drafted after the row now. For 0, nothing is run."""
        return ANY

    def catch_up(self, row: Request) -> None:
        """Run the row's unread text, such as a prompt, in chunks. Its last tokens stay for the draft."""

    def begin(self, row: Request, most: int = 0) -> Draft:
        """Begin a draft of a row, of at most `most` tokens."""
        self.ran[row.id] = 0
        return Draft.chain(row, row.tokens[self.length(row) :].tolist(), most)

    def extend(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        """Run the nodes of each draft that have not been run. Returns logits [sum(num_logits), K]: for each draft i,
        those after its last `num_logits[i]` nodes."""
        raise NotImplementedError

    def segments(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> list[Segment]:
        """Make a segment of each draft's nodes that have not been run."""
        return [
            Segment(self.slot(d.row), np.array(d.tokens), np.array(d.parent), self.ran[d.row.id], count)
            for d, count in zip(drafts, num_logits, strict=True)
        ]

    def commit(self, draft: Draft, nodes: Sequence[int]) -> None:
        """Keep `nodes` of a draft, ascending from 0, and forget its other nodes that were run."""
        raise NotImplementedError

    def feed(self, round: Round) -> None:
        """Take the target's states of the tokens that a round committed, whichever drafter made them. The round's
        drafts are committed before this call."""


CHUNK = 512
"""Largest number of a prompt's tokens in one forward of the draft model."""
MAX_UNREAD = 16
"""Recurrent models catch up when this many tokens are unread: each node of a draft stores as much as 100 KV entries."""

Run = Callable[[Sequence[Draft], Sequence[Segment]], torch.Tensor]
"""run(drafts, segments): logits [M, K] after each segment's last `num_logits` nodes. Draft i has segment i."""


class TextModel(DraftModel):
    """A model that runs like a target.

    With a `context`, the cache may lack the beginning of a row's text: it begins with token `first(row)`.

    network      a target, or an object with a target's slots, lengths and `commit`.
    run          function that runs nodes; None: the target's `verify`.
    context      how many tokens it reads at once, the last ones of a longer text; None: all."""

    def __init__(
        self, network: Any, vocab_size: int, columns: torch.Tensor | None = None, *, run: Run | None = None,
        context: int | None = None,
    ):  # fmt: skip
        self.network, self.vocab_size, self.columns = network, vocab_size, columns
        self.context = context
        self.weight_bytes = network.weight_bytes
        self._run = run or (lambda drafts, segments: cast(Target, network).verify(segments).logits)
        self._slots: dict[int, int] = {}
        self._first: dict[int, int] = {}

    def start(self, row: Request) -> None:
        self._open(row, 0)

    def drop(self, row: Request) -> None:
        if row.id in self._slots:  # Without memory to start it, it has no slot.
            self.network.drop_row(self._slots.pop(row.id))
        self._first.pop(row.id, None)
        self.ran.pop(row.id, None)

    def _open(self, row: Request, first: int) -> None:
        """Give the row a slot that holds its tokens from number `first` on."""
        self._first[row.id] = first
        expected = max(0, min(row.expected_length - first, self.network.max_context))
        self._slots[row.id] = self.network.add_row(expected)

    def slot(self, row: Request) -> int:
        return self._slots[row.id]

    def first(self, row: Request) -> int:
        """The number of the first token of the row that the cache holds."""
        return self._first[row.id]

    def length(self, row: Request) -> int:
        return self._first[row.id] + int(self.network.length(self._slots[row.id]))

    def room(self, row: Request) -> int:
        if self.network.vocab_size < self.vocab_size and row.tokens.max() >= self.network.vocab_size:
            return 0  # The text has one of the target's padding tokens. The draft model lacks it.
        # The last drafted token is not run.
        unread = self.network.max_context - (len(row) - self._begins(row))
        return int(unread + 1)

    def _begins(self, row: Request) -> int:
        """The number of the first token that the draft model sees in this round. It moves, to `context` tokens before
        the end, when more tokens than that are unread or the model's own context is full."""
        first, length = self._first[row.id], len(row)
        if self.context is None:
            return first
        full = not 0 < length - first <= self.network.max_context
        return max(0, length - self.context) if full or length - self.length(row) > self.context else first

    def catch_up(self, row: Request) -> None:
        first, most = self._begins(row), MAX_UNREAD if self.network.recurrent else CHUNK
        if first != self._first[row.id]:
            self.drop(row)
            self._open(row, first)
        while (unread := len(row) - (begin := self.length(row))) > most:
            self._read(row, row.tokens[begin : begin + min(CHUNK, unread - 1)])

    def _read(self, row: Request, tokens: IntArray) -> None:
        """Run and commit the row's next tokens, at most CHUNK."""
        chunk = Draft.chain(row, tokens.tolist())
        self._run([chunk], [Segment.chunk(self._slots[row.id], tokens.copy(), last=False)])
        self.commit(chunk, range(len(tokens)))

    def extend(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        return self._run(drafts, self.segments(drafts, num_logits))[:, : self.vocab_size]

    def commit(self, draft: Draft, nodes: Sequence[int]) -> None:
        self.network.commit(self._slots[draft.row.id], nodes)

    def truncate(self, row: Request, count: int) -> None:
        """Cut the row's cache back to its first `count` tokens."""
        cast(CachedTarget, self.network).truncate(self._slots[row.id], count)

    def arrange(self, row: Request, nodes: Sequence[int]) -> None:
        """Move the keys and values of `nodes`, run but not committed, to the places right after the row, in this order.
        The draft's other nodes are forgotten.

        nodes  the place of each after the row's last committed token, from 0."""
        cast(CachedTarget, self.network).cache.arrange(self._slots[row.id], nodes)
        self.ran[row.id] = len(nodes)
