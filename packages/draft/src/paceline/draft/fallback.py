"""Several drafters in one: "a+b" makes a `Fallback`; with a `Choice`, each request names its drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from paceline.core.segment import Needs
from paceline.draft.base import Allowance, Ask, Drafter, DraftTree, Facts, Plan, Request, Round
from paceline.errors import MethodError

if TYPE_CHECKING:
    import torch


class Fallback(Drafter):
    """Asks the first of `parts`, then the next for the rows that have no draft yet, and so on.

    Every part observes every row, so that it can draft when it is asked."""

    def __init__(self, parts: Sequence[Drafter]):
        self.parts = tuple(parts)
        self.name = "+".join(part.name for part in parts)
        self.needs = reduce(or_, (part.needs for part in parts), Needs())

    def bind(self, target: Facts) -> None:
        """Bind every part. MethodError if two parts interrupt the forward at different layers."""
        super().bind(target)
        self.parts = tuple(part for part in self.parts if self._joins(part, target))
        for need in ("resume_layer", "callback_layer"):
            layers = {getattr(part.needs, need) for part in self.parts} - {None}
            if len(layers) > 1:
                why = f"its parts want layers {sorted(layers)} as {need}, and a forward has only one"
                raise MethodError(f"{self.name}: {why}. Use one of them at a time.")
        # Some parts know their needs only after `bind`.
        self.needs = reduce(or_, (part.needs for part in self.parts), Needs())
        self.times_rounds = any(part.times_rounds for part in self.parts)
        self.notes = [note for part in self.parts for note in part.notes]
        self.price_table = next((part.price_table for part in self.parts if part.price_table is not None), None)

    def _joins(self, part: Drafter, target: Facts) -> bool:
        """Bind a part. Returns whether it takes part in drafting."""
        part.bind(target)
        return True

    def informed(self, row: Request) -> Sequence[Drafter]:
        """The parts that hear of a row."""
        return self.parts

    def start(self, row: Request) -> None:
        for part in self.informed(row):
            part.start(row)

    def begin_round(self, budget: Allowance) -> None:
        super().begin_round(budget)
        for part in self.parts:
            part.begin_round(budget)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = [DraftTree.root(row.last_token) for row, _ in asks]
        waiting = list(range(len(asks)))
        for part in self.parts:
            if not waiting:
                break
            proposed = self.budget.ask(part, [asks[i] for i in waiting])
            for i, tree in zip(waiting, proposed, strict=True):
                trees[i] = tree
            waiting = [i for i in waiting if trees[i].num_drafted == 0]
        return trees

    def observe(self, round: Round) -> None:
        for part in self.parts:
            part.observe(round)

    def on_layer(self, layer: int, hidden: torch.Tensor, round: Plan) -> None:
        for part in self.parts:
            if part.needs.callback_layer == layer:
                part.on_layer(layer, hidden, round)

    def restart(self, row: Request) -> None:
        for part in self.informed(row):
            part.restart(row)

    def drop(self, row: Request) -> None:
        with ExitStack() as dropping:  # If a part fails, the others still forget the row.
            for part in reversed(self.informed(row)):
                dropping.callback(part.drop, row)


class Choice(Fallback):
    """Asks, for each row, the part that its request names (`SamplingParams.draft`), by default the first.

    Parts that only read text observe every row, to learn from it. Parts that have a model or read the target's states
    hear only of their own rows, so that their needs and failures do not concern others."""

    def __init__(self, parts: Mapping[str, Drafter]):
        super().__init__(list(parts.values()))
        self.by_name = dict(parts)
        self.name = next(iter(parts))

    @property
    def choices(self) -> Sequence[Drafter]:
        return self.parts

    def of(self, row: Request) -> Drafter:
        return self.by_name.get(row.params.draft or self.name, self.parts[0])

    def bind(self, target: Facts) -> None:
        super().bind(target)
        self._readers = [part for part in self.parts if not _has_model(part)]

    def informed(self, row: Request) -> Sequence[Drafter]:
        own = self.of(row)
        return [part for part in self.parts if part is own or part in self._readers]

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees: dict[int, DraftTree] = {}
        for part in self.parts:
            if own := [ask for ask in asks if self.of(ask.row) is part]:
                made = self.budget.ask(part, own)
                trees |= {row.id: tree for (row, _), tree in zip(own, made, strict=True)}
        return [trees[row.id] for row, _ in asks]

    def observe(self, round: Round) -> None:
        for part in self.parts:
            own = [i for i, row in enumerate(round.rows) if part in self._readers or self.of(row) is part]
            if own:
                part.observe(round if len(own) == len(round) else round.only(own))


def _has_model(drafter: Drafter) -> bool:
    """Whether a drafter, or a part of it, has a model or reads the target's states."""
    return drafter.weight_bytes > 0 or drafter.needs.whole_prompt or any(map(_has_model, drafter.parts))
