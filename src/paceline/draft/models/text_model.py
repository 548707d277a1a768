"""TextModel: a draft model that reads the text of its rows in a cache of its own. Knows no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from paceline.core.request import Request
from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.draft.models.draft_model import Draft, DraftModel, segments
from paceline.target.base import Target
from paceline.target.cache import CachedTarget

CHUNK = 512  # most tokens of a prompt in one forward of the draft model
MAX_UNREAD = 16
"""Most tokens that wait for a draft, where one that is not committed leaves as much as a hundred keys and values."""

Run = Callable[[Sequence[Draft], Sequence[Segment]], torch.Tensor]
"""run(drafts, segments): logits [M, K] after the segments' last `num_logits` nodes, a segment for each draft."""


class TextModel(DraftModel):
    """A model that runs like a target.

    With a `context`, its cache may hold only the end of a row's text, from token `first(row)` on.

    network      a target, or an object with a target's slots, lengths and `commit`.
    run          function that runs nodes; None: `verify` of the target.
    context      largest number of tokens that it reads at once, the last ones of a longer text; None: all.
    num_streams  number of streams beside every token that it runs (`streams.py`)."""

    def __init__(
        self, network: Any, vocab_size: int, columns: torch.Tensor | None = None, *, run: Run | None = None,
        context: int | None = None, num_streams: int = 0,
    ):  # fmt: skip
        self.network, self.vocab_size, self.columns = network, vocab_size, columns
        self.context, self.num_streams = context, num_streams
        self.weight_bytes = network.weight_bytes
        self._run = run or (lambda drafts, segments: cast(Target, network).verify(segments).logits)
        self._slots: dict[int, int] = {}
        self._first: dict[int, int] = {}

    def start(self, row: Request) -> None:
        self._open(row, 0)

    def drop(self, row: Request) -> None:
        if row.id in self._slots:  # it is not if there was no memory to start it
            self.network.drop_row(self._slots.pop(row.id))
        self._first.pop(row.id, None)

    def _open(self, row: Request, first: int) -> None:
        """Give a row a slot, for its tokens from `first` on."""
        self._first[row.id] = first
        expected = max(0, min(row.expected_length - first, self.network.max_context))
        self._slots[row.id] = self.network.add_row(expected)

    def slot(self, row: Request) -> int:
        return self._slots[row.id]

    def first(self, row: Request) -> int:
        """The number of the row's first token in the cache."""
        return self._first[row.id]

    def length(self, row: Request) -> int:
        return self._first[row.id] + int(self.network.length(self._slots[row.id]))

    def room(self, row: Request) -> int:
        if self.network.vocab_size < self.vocab_size and row.tokens.max() >= self.network.vocab_size:
            return 0  # the text has a token of the target's padding, which the draft model lacks
        # The last drafted token is not run; streams come after the one before it.
        unread = self.network.max_context - (len(row) - self._begins(row))
        return int(min(row.max_draft, unread + 1 - self.num_streams))

    def _begins(self, row: Request) -> int:
        """The number of the first token that the draft model sees in this round: `context` tokens back if more than
        those are unread, or if its own context is full; else as before."""
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
        """Run a row's next tokens, at most CHUNK, and commit them."""
        chunk = Draft.chain(row, tokens.tolist())
        self._run([chunk], [Segment.chunk(self._slots[row.id], tokens.copy(), last=False)])
        self.commit(chunk, range(len(tokens)))

    def extend(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        return self._run(drafts, segments(drafts, num_logits, self.slot))[..., : self.vocab_size]

    def commit(self, draft: Draft, nodes: Sequence[int]) -> None:
        self.network.commit(self._slots[draft.row.id], nodes)

    def truncate(self, row: Request, count: int) -> None:
        """Keep the first `count` tokens of the cache alone."""
        cast(CachedTarget, self.network).truncate(self._slots[row.id], count)

    def arrange(self, row: Request, nodes: Sequence[int]) -> None:
        """Move the keys and values of `nodes`, run but not committed, to the places after the row, in that order.

        nodes: how far after the row's last committed token each lies, from 0."""
        cast(CachedTarget, self.network).cache.arrange(self._slots[row.id], nodes)
