"""How often the candidates of each depth are right: measured on held-out text, for trees of fixed shape.

    slots = Slots(depth=4, ranks=10)
    slots.add(k, candidates, said)            # of head k, for any number of positions
    write_slots(out, slots.accuracies, slots.counts)

`draft/shapes.py` builds trees from the file. Every depth is divided by its own number of positions: the deepest one has
fewer, and one number for all would rate it too low.

Doesn't know: heads, models.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.draft.shapes import SLOTS_FILE, best_paths
from paceline.jsonl import write_whole

RANKS = 10
"""Candidates of each depth that are counted."""
SHOWN = (8, 16, 32, 63)
"""Nodes of the trees that the file shows, for reading."""


class Slots:
    """Counts by depth and rank. right [depth, ranks]; counts [depth]: positions that were looked at."""

    def __init__(self, depth: int, ranks: int = RANKS) -> None:
        self.right = torch.zeros(depth, ranks, dtype=torch.float64)
        self.counts = torch.zeros(depth, dtype=torch.float64)

    def add(self, k: int, candidates: Tensor, said: Tensor) -> None:
        """At N positions: candidates [N, ranks] of depth k, best first, and what the target says there, [N]."""
        self.right[k, : candidates.shape[1]] += (candidates == said[:, None]).sum(0).double().cpu()
        self.counts[k] += len(said)

    @property
    def accuracies(self) -> list[list[float]]:
        """Entry [k][r]: how often candidate r of depth k is what the target says."""
        shares: list[list[float]] = (self.right / self.counts.clamp_min(1)[:, None]).tolist()
        return [[round(share, 4) for share in row] for row in shares]


def write_slots(out: Path, accuracies: Sequence[Sequence[float]], counts: Sequence[int] = ()) -> None:
    """slots.json: the accuracies, the number of positions by depth, and the trees that follow, for reading."""
    trees = {count: ["-".join(map(str, path)) for path in best_paths(accuracies, count)] for count in SHOWN}
    facts = {"accuracies": accuracies, **({"positions": list(counts)} if counts else {}), "trees": trees}
    write_whole(out / SLOTS_FILE, json.dumps(facts, indent=1) + "\n")


def slot_lines(accuracies: Sequence[Sequence[float]]) -> list[str]:
    """The accuracies, for a reader."""
    return [
        f"slot {slot}  right {shares[0]:6.1%}  among {len(shares)} candidates {sum(shares):6.1%}"
        for slot, shares in enumerate(accuracies, 1)
    ]
