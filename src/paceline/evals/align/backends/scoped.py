"""Scoped: a drafter that remembers within a scope (an item, or a scenario for a judge) and forgets across scopes.

Rows of one scope share a drafter of their own, so that what one request of an item wrote is drafted in the next one,
and 300 judge calls of a scenario feed one memory, without the texts of all other items in between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from paceline.draft.base import Drafter
from paceline.engine.request import Request
from paceline.engine.round import Round
from paceline.engine.tree import DraftTree
from paceline.target.base import Facts, Needs

MOST_SCOPES = 128
"""Scopes kept, the least recently used forgotten first; more than are ever under way at once."""


class Scoped(Drafter):
    """make: a new drafter, one for each scope. `assign` a row before it joins."""

    def __init__(self, make: Callable[[], Drafter]):
        self._make = make
        self._first = make()
        self.name, self.needs = self._first.name, self._first.needs
        self._scopes: OrderedDict[str, Drafter] = OrderedDict()
        self._of: dict[int, Drafter] = {}
        self._target: Facts | None = None

    def bind(self, target: Facts) -> None:
        self._target = target
        self._first.bind(target)

    def assign(self, row: Request, scope: str) -> None:
        """From now on `row` belongs to `scope`."""
        drafter = self._scopes.pop(scope, None)
        if drafter is None:
            assert self._target is not None
            drafter = self._make()
            drafter.bind(self._target)
        self._scopes[scope] = drafter
        self._of[row.id] = drafter
        while len(self._scopes) > MOST_SCOPES:
            self._scopes.popitem(last=False)

    def start(self, row: Request) -> None:
        self._of.setdefault(row.id, self._first).start(row)

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        trees: dict[int, DraftTree] = {}
        for drafter, numbers in self._groups(rows):
            mine = drafter.propose([rows[i] for i in numbers])
            trees.update(zip(numbers, mine, strict=True))
        return [trees[i] for i in range(len(rows))]

    def observe(self, round: Round) -> None:
        """Nothing: drafters that ask nothing of the forward learn from `row.tokens` (see `fits`)."""

    def drop(self, row: Request) -> None:
        drafter = self._of.pop(row.id, None)
        if drafter is not None:
            drafter.drop(row)

    def _groups(self, rows: Sequence[Request]) -> list[tuple[Drafter, list[int]]]:
        """Drafters, each with the places of its rows."""
        groups: dict[int, tuple[Drafter, list[int]]] = {}
        for i, row in enumerate(rows):
            drafter = self._of[row.id]
            groups.setdefault(id(drafter), (drafter, []))[1].append(i)
        return list(groups.values())


def fits(drafter: Drafter) -> bool:
    """Whether a drafter can be had once a scope: it has no model, asks nothing of the forward, and learns from rows
    alone."""
    return drafter.weight_bytes == 0 and drafter.needs == Needs() and type(drafter).observe is Drafter.observe
