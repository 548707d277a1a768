"""DraftModel: what a drafter with a model is made of, beside a proposer: how it runs, and what it keeps of a row.

Drafted tokens lie after the row's committed ones in its cache, and `commit` keeps those that were accepted, so nothing
is rolled back. Committed tokens that it has not run come first in a draft: usually one, two after a draft that was
accepted whole, more where another drafter drafted in between. Knows no proposer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.request import Request
from paceline.core.round import Round
from paceline.draft.models.drafts import Draft
from paceline.target.base import Needs


class DraftModel:
    """A model that drafts, bound to a target.

    vocab_size    of the tokens that it drafts: the target's, but where it drafts text (`tokenizers.py`).
    columns       tokens int64 [K] of the columns of its logits; None: all tokens.
    needs         what it needs of the target's forward.
    weight_bytes  bytes of weights that a forward of it reads.
    notes         lines that a user should read."""

    vocab_size: int
    columns: torch.Tensor | None = None
    needs = Needs()
    weight_bytes = 0
    notes: Sequence[str] = ()

    def start(self, row: Request) -> None:
        """A row joins, of which nothing has been run."""
        raise NotImplementedError

    def drop(self, row: Request) -> None:
        """Forget a row, if it was started."""
        raise NotImplementedError

    def length(self, row: Request) -> int:
        """The number of the row's tokens that have been run and kept."""
        raise NotImplementedError

    def room(self, row: Request) -> int:
        """Most tokens that can be drafted after a row now; 0: none, and nothing is run for it."""
        return row.max_draft

    def catch_up(self, row: Request) -> None:
        """Run what waits of a row's text, such as a prompt, in chunks, but for its last tokens."""

    def begin(self, row: Request, ends: frozenset[int]) -> Draft:
        """An empty draft of a row. ends: tokens after which nothing can be accepted."""
        return Draft.chain(row, row.tokens[self.length(row) :].tolist(), ends)

    def extend(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        """Run each draft's nodes from `num_run` on; logits [sum(num_logits), K] after its last `num_logits[i]`."""
        raise NotImplementedError

    def commit(self, draft: Draft, nodes: Sequence[int]) -> None:
        """Keep `nodes` (ascending, from 0), of those of `draft` that were run, and forget the others."""
        raise NotImplementedError

    def feed(self, round: Round) -> None:
        """Take the target's states of what a round has committed, whoever drafted it. Drafts are committed before."""
