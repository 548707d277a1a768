"""Several drafters in one: `Fallback` is what "a+b" names, `Choice` lets each request name its drafter."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from operator import or_

import torch

from paceline.draft.base import Drafter, DraftTree, Facts, Request, Round, stamp
from paceline.errors import MethodError
from paceline.target.base import Needs


class Fallback(Drafter):
    """Asks the first of `parts`, then the next one for the rows for which nothing was proposed, and so on.

    Every part observes every row, so each is ready when its turn comes."""

    def __init__(self, parts: Sequence[Drafter]):
        self.parts = tuple(parts)
        self.name = "+".join(part.name for part in parts)
        self.needs = reduce(or_, (part.needs for part in parts), Needs())
        self.acceptance = next((part.acceptance for part in parts if part.acceptance is not None), None)

    def bind(self, target: Facts) -> None:
        """Bind every part; MethodError if two of them want to interrupt the forward at different layers."""
        for part in self.parts:
            part.bind(target)
        for need in ("resume_layer", "callback_layer"):
            layers = {getattr(part.needs, need) for part in self.parts} - {None}
            if len(layers) > 1:
                why = f"its parts want layers {sorted(layers)} as {need}, and a forward has only one"
                raise MethodError(f"{self.name}: {why}. Use one of them at a time.")
        # Some parts know their needs only after `bind`.
        self.needs = reduce(or_, (part.needs for part in self.parts), Needs())
        self.times_rounds = any(part.times_rounds for part in self.parts)
        self.notes = [note for part in self.parts for note in part.notes]

    def start(self, row: Request) -> None:
        for part in self.parts:
            part.start(row)

    def begin_round(self, prefill_tokens: int) -> None:
        super().begin_round(prefill_tokens)
        for part in self.parts:
            part.begin_round(prefill_tokens)

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        trees = [DraftTree.root(row.last_token) for row in rows]
        waiting = list(range(len(rows)))
        for part in self.parts:
            if not waiting:
                break
            proposed = stamp(part.propose([rows[i] for i in waiting]), part)
            for i, tree in zip(waiting, proposed, strict=True):
                trees[i] = tree
            waiting = [i for i in waiting if trees[i].num_drafted == 0]
        return trees

    def observe(self, round: Round) -> None:
        for part in self.parts:
            part.observe(round)

    def on_layer(self, layer: int, hidden: torch.Tensor, round: Round) -> None:
        for part in self.parts:
            if part.needs.callback_layer == layer:
                part.on_layer(layer, hidden, round)

    def restart(self, row: Request) -> None:
        for part in self.parts:
            part.restart(row)

    def drop(self, row: Request) -> None:
        with ExitStack() as dropping:  # if one part fails, the others forget the row all the same
            for part in reversed(self.parts):
                dropping.callback(part.drop, row)


class Choice(Fallback):
    """Asks, for each row, the part that its request names (`SamplingParams.draft`), the first one if it names none.

    Every part observes every row, so each may learn from all of them."""

    def __init__(self, parts: Mapping[str, Drafter]):
        super().__init__(list(parts.values()))
        self.by_name = dict(parts)
        self.name = next(iter(parts))

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        trees: dict[int, DraftTree] = {}
        for name, part in self.by_name.items():
            own = [row for row in rows if (row.params.draft or self.name) == name]
            if own:
                made = stamp(part.propose(own), part)
                trees |= {row.id: tree for row, tree in zip(own, made, strict=True)}
        return [trees.get(row.id) or DraftTree.root(row.last_token) for row in rows]
