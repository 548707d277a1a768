"""auto: for each row the drafter that pays most.

In every round, drafters that copy are asked first, then those that run a model: each for the rows that have no draft
yet, or one that is worth less than what it brings on average. What that is, and whether asking pays at all, says the
budget (`paceline.engine.budget`), which also cuts the drafts; without one, the first drafter that has a draft is taken.
More: docs/methods/auto.md.

It is lossless. A draft that was drawn (`DraftTree.draft_probs`) is never exchanged: whether its drafter is asked for a
row is decided before, and then nobody else is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.draft.base import Drafter, DraftTree, Facts, Request
from paceline.draft.cost import Table
from paceline.draft.fallback import Fallback
from paceline.draft.registry import create
from paceline.draft.spec import Options, cut, exchanged, option
from paceline.errors import MethodError


@dataclass(frozen=True)
class AutoConfig(Options):
    checkpoint: str = option("sam|suffix", "drafters to choose from, joined by |; write ; for , in their options")
    table: str | None = option(None, "times from this file of `paceline tune`; none: measured as rounds run")


class Auto(Fallback):
    """Chooses among drafters by row and round: the one whose draft pays most.

    specs  of the drafters, as the user named them."""

    name = "auto"
    lossless = "yes"
    paper = "Liu et al. 2024, SmartSpec, arXiv 2406.14066"
    Config = AutoConfig

    def __init__(self, config: AutoConfig = AutoConfig()):
        self.config = config
        self.specs = _specs(config.checkpoint)
        super().__init__([create(spec) for spec in self.specs])
        self.name = "auto"

    def bind(self, target: Facts) -> None:
        """Bind every part and read the table; MethodError as theirs, and for a table that does not fit."""
        super().bind(target)
        self.times_rounds = self.config.table is None
        if self.config.table is not None:
            self.table = Table.read(self.config.table, target.weights_fingerprint)
            for spec, part in zip(self.specs, self.parts, strict=True):
                if spec not in self.table.drafting:
                    lacks = f"has no times of {spec}; it has {', '.join(self.table.drafting)}"
                    mend = f"Run `paceline tune` with --draft '{spec}'."
                    raise MethodError(f"the table {self.config.table} {lacks}. {mend}")
                self.table.drafters[part] = spec

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        gains = {part: [self.budget.gain(part, row) for row in rows] for part in self.parts}
        trees = [DraftTree.root(row.last_token) for row in rows]
        values = [0.0] * len(rows)
        for part in sorted(self.parts, key=lambda part: (_is_late(part), -fmean(gains[part]))):
            asked = [
                i
                for i, (tree, value, gain) in enumerate(zip(trees, values, gains[part], strict=True))
                if not tree.num_drafted or (tree.may_be_cut and gain > value)
            ]
            if not asked:
                continue
            for i, tree in zip(asked, self.budget.ask(part, [rows[i] for i in asked]), strict=True):
                value = self.budget.value(tree, rows[i]) if tree.num_drafted else 0.0
                # What must stay whole is taken whatever it is worth: its drafter may have drawn it.
                if tree.num_drafted and (not trees[i].num_drafted or not tree.may_be_cut or value > values[i]):
                    trees[i], values[i] = tree, value
        return trees


def _is_late(drafter: Drafter) -> bool:
    """Whether it runs a model, and is asked after the others."""
    return drafter.weight_bytes > 0 or drafter.needs.resume_layer is not None


def _specs(listed: str) -> list[str]:
    """The drafters that the checkpoint of `auto` lists."""
    specs = [exchanged(spec.strip(), ";", ",") for spec in cut(listed, r"\|")]
    if not all(specs):
        raise MethodError(f"auto:{listed} names nothing between two |; write auto:sam|suffix.")
    if len(set(specs)) < len(specs):
        raise MethodError(f"auto:{listed} names a drafter twice.")
    if any(spec.partition(":")[0].partition(",")[0] == "auto" for spec in specs):
        raise MethodError(f"auto:{listed} names auto itself; list the drafters it may choose from.")
    return specs
