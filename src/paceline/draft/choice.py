"""Choice: several drafters in one engine, and each request says which it wants (`SamplingParams.draft`).

The first is everybody's who says nothing. Every part meets every row, so each may learn from all of them. Knows
drafters only by their interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.draft.base import Drafter, stamp
from paceline.draft.fallback import Fallback
from paceline.engine.request import Request
from paceline.engine.tree import DraftTree


class Choice(Fallback):
    """Asks, for each row, the drafter that its request names."""

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
