"""StatesModel: what models that read the target's states have in common."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.request import Request
from paceline.core.round import Round
from paceline.draft.models.draft_model import DraftModel
from paceline.draft.models.pending import Pending, RunHead
from paceline.target.base import Facts, Needs
from paceline.target.cache import RaggedCache


class StatesModel(DraftModel):
    """Base of models that read the target's states: they wait in `pending` until a draft begins."""

    def __init__(self, target: Facts, layers: Sequence[int], cache: RaggedCache, run_head: RunHead):
        self.vocab_size = target.vocab_size
        self.pending = Pending(target, layers, cache, run_head)
        self.needs = Needs(hidden_layers=tuple(sorted(layers)))

    def start(self, row: Request) -> None:
        self.pending.start(row)

    def drop(self, row: Request) -> None:
        self.pending.drop(row)

    def length(self, row: Request) -> int:
        return self.pending.cached(row)

    def feed(self, round: Round) -> None:
        self.pending.feed(round)
