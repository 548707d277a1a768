"""auto: for each row the drafter that pays most.

In each round, drafters that copy are asked first, then those that run a model. Each is asked for the rows that have no
draft yet, or whose draft is worth less than the drafter's average. The budget (`paceline.engine.budget`) estimates what
drafts are worth, decides whether asking pays, and cuts the drafts. Without a budget, the first draft is taken.
Details: docs/methods/auto.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from paceline.core.options import Options, option
from paceline.draft.base import Ask, Drafter, DraftTree, Facts
from paceline.draft.cost import Table
from paceline.draft.fallback import Fallback
from paceline.draft.registry import create
from paceline.draft.spec import cut, exchanged
from paceline.errors import MethodError

TRIALS, TURN = 12, 16
"""To be measured, each drafter is asked first in TRIALS rounds at the beginning, and later in turn every TURN
rounds."""
FADE = 32
"""Rounds over which a mean fades."""


@dataclass(frozen=True)
class AutoConfig(Options):
    checkpoint: str = option(
        "sam|suffix",
        "drafters to choose from, joined by |; write ; for , in their options, and ? behind one that is left out if it "
        "does not fit the model",
    )
    table: str | None = option(
        None, "file of `paceline tune` with measured times; none: times are measured as rounds run"
    )


class Auto(Fallback):
    """Chooses among drafters by row and round: the one whose draft pays most.

    specs  specs of the drafters, as the user wrote them."""

    name = "auto"
    lossless = "yes"
    paper = "Liu et al. 2024, SmartSpec, arXiv 2406.14066"
    Config = AutoConfig

    def __init__(self, config: AutoConfig = AutoConfig()):
        self.config = config
        listed = _specs(config.checkpoint)
        self.specs = [spec.removesuffix("?") for spec in listed]
        super().__init__([create(spec) for spec in self.specs])
        self._perhaps = [part for spec, part in zip(listed, self.parts, strict=True) if spec.endswith("?")]
        self.name = "auto"
        self._brought: dict[Drafter, float] = {}  # mean gain for rows without a draft
        self._turns: dict[Drafter, int] = {}
        self._rounds = 0

    def bind(self, target: Facts) -> None:
        """Bind every part and read the table. MethodError from a part, or if the table does not fit."""
        listed = self.parts
        super().bind(target)
        self.specs = [spec for spec, part in zip(self.specs, listed, strict=True) if part in self.parts]
        self.times_rounds = self.config.table is None
        if self.config.table is not None:
            self.price_table = Table.read(self.config.table, target.weights_fingerprint)
            for spec, part in zip(self.specs, self.parts, strict=True):
                if spec not in self.price_table.drafting:
                    lacks = f"has no times of {spec}; it has {', '.join(self.price_table.drafting)}"
                    mend = f"Run `paceline tune` with --draft '{spec}'."
                    raise MethodError(f"the table {self.config.table} {lacks}. {mend}")
                self.price_table.drafters[part] = spec

    def _joins(self, part: Drafter, target: Facts) -> bool:
        try:
            return super()._joins(part, target)
        except MethodError:
            if part in self._perhaps:
                return False
            raise

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = [DraftTree.root(row.last_token) for row, _ in asks]
        values = [0.0] * len(asks)
        for part in self._order():
            asked = [
                i
                for i, (ask, tree, value) in enumerate(zip(asks, trees, values, strict=True))
                if not tree.num_drafted or self.budget.gain(part, ask) > value
            ]
            if not asked:
                continue
            brought = []
            for i, tree in zip(asked, self.budget.ask(part, [asks[i] for i in asked]), strict=True):
                value = self.budget.value(tree, asks[i].row) if tree.num_drafted else 0.0
                brought.append(value)
                if tree.num_drafted and (not trees[i].num_drafted or value > values[i]):
                    trees[i], values[i] = tree, value
            if len(asked) == len(asks) and isfinite(mean := fmean(brought)):
                before = self._brought.get(part, mean)
                self._brought[part] = before + (mean - before) / FADE
        return trees

    def _order(self) -> list[Drafter]:
        """The order in which drafters are asked: first those that copy, best average first, then those that run a
        model. In rounds that measure, the drafter whose turn it is comes first."""
        copying = [part for part in self.parts if not _is_late(part)]
        first = min(copying, key=lambda part: self._turns.get(part, 0), default=None)
        copying.sort(key=lambda part: -self._brought.get(part, 0.0))
        self._rounds += 1
        if first is not None and (self._turns.get(first, 0) < TRIALS or self._rounds % TURN == 0):
            copying.remove(first)
            copying.insert(0, first)
        if copying:
            self._turns[copying[0]] = self._turns.get(copying[0], 0) + 1
        return [*copying, *(part for part in self.parts if _is_late(part))]


def _is_late(drafter: Drafter) -> bool:
    """Whether the drafter runs a model, and so is asked after the others."""
    return drafter.weight_bytes > 0 or drafter.needs.resume_layer is not None


def _specs(listed: str) -> list[str]:
    """Specs of the drafters that the checkpoint of `auto` lists."""
    specs = [exchanged(spec.strip(), ";", ",") for spec in cut(listed, r"\|")]
    if not all(specs):
        raise MethodError(f"auto:{listed} names nothing between two |; write auto:sam|suffix.")
    if len(set(specs)) < len(specs):
        raise MethodError(f"auto:{listed} names a drafter twice.")
    if any(spec.partition(":")[0].partition(",")[0] == "auto" for spec in specs):
        raise MethodError(f"auto:{listed} names auto itself; list the drafters it may choose from.")
    return specs
