"""Drafter: the interface every method fills in. Knows the rows and what the target said, never the engine.

A new drafter is one file with one class:

    class LastTokenAgain(Drafter):
        name = "again"
        def propose(self, rows):
            return [DraftTree.chain(row.last_token, [row.last_token] * min(4, row.max_draft)) for row in rows]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.accept import Accepted
from paceline.row import Row
from paceline.target.base import Needs, Target, Verdict
from paceline.tree import DraftTree


class Drafter:
    """Proposes tokens for rows and watches what became of them.

    name   as in the registry; reports show it.
    needs  what it asks of the target's forward.
    weight_bytes  bytes of weights that one forward of its model reads; 0: it has none.

    The engine calls `bind` once, then `start(row)`; each round `propose(rows)` and `observe(...)`; at the end
    `drop(row)`. Rows come and go between rounds; `row.id` is unique for the engine's life.
    """

    name: str = ""
    needs: Needs = Needs()
    weight_bytes: int = 0

    def bind(self, target: Target) -> None:
        """Meet the target, once, before the first row. Raise MethodError if it does not fit."""

    def start(self, row: Row) -> None:
        """A row joins; `row.tokens` is its prompt."""

    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """One tree a row, rooted at `row.last_token`, no deeper than `row.max_draft` (deeper nodes are cut off).

        `DraftTree.root(row.last_token)` is "nothing to propose": the row decodes plainly this round, and behind a
        `+` the next drafter is asked."""
        return [DraftTree.root(row.last_token) for row in rows]

    def observe(
        self,
        rows: Sequence[Row],
        trees: Sequence[DraftTree],
        verdict: Verdict,
        accepted: Sequence[Accepted],
    ) -> None:
        """After a round. Index i of every argument belongs together, and so does segment i of the verdict;
        `row.tokens` already ends with `accepted[i].tokens` (cut where the row ended). A row whose prompt was run
        this round comes with the tree of its last prompt token alone."""

    def on_layer(self, layer: int, hidden: torch.Tensor) -> None:
        """Called in the middle of the forward if `needs.callback_layer` is set: hidden [N, H]."""

    def drop(self, row: Row) -> None:
        """A row has ended or was aborted; forget it."""
