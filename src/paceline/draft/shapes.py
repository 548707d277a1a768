"""Fixed shapes of trees whose tokens depend on depth and rank alone: candidates of the slots after the root.

A path is the ranks to take at each step down from the root: (2, 0) is candidate 0 of the second slot, below candidate 2
of the first. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path

from paceline.errors import MethodError
from paceline.records import loads

RankPath = tuple[int, ...]

SLOTS_FILE = "slots.json"
"""Where training writes how often the candidates of each slot are right."""

_CHILDREN = {
    "": 10,
    "0": 10, "1": 7, "2": 3, "3": 2, "4": 1, "5": 1, "6": 1, "7": 1, "8": 1, "9": 1,
    "00": 10, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1, "10": 2, "20": 1,
    "000": 2,
}  # fmt: skip


def published() -> list[RankPath]:
    """The tree of 63 nodes that Medusa (Cai et al. 2024, arXiv 2401.10774) built for Vicuna-7B, and others took over.
    10, 28, 23 and 2 nodes are 1, 2, 3 and 4 deep."""
    return [(*map(int, above), rank) for above, count in _CHILDREN.items() for rank in range(count)]


def chain(length: int) -> list[RankPath]:
    """The best candidate of each slot, one after another."""
    return [(0,) * depth for depth in range(1, length + 1)]


def best_paths(accuracies: Sequence[Sequence[float]], count: int) -> list[RankPath]:
    """The `count` paths most likely to be right, fewer where there are no more; parents before their children.

    accuracies[d][r]: how often candidate r of slot d is right, ranks in falling order. Slots count as independent, so a
    path's value is the product along it (Cai et al. 2024, section 2.3.3)."""
    best: list[RankPath] = []
    waiting: list[tuple[float, RankPath]] = []

    def consider(path: RankPath, above: float) -> None:
        slot = len(path) - 1
        if slot < len(accuracies) and path[-1] < len(accuracies[slot]):
            heappush(waiting, (-above * accuracies[slot][path[-1]], path))

    value: dict[RankPath, float] = {(): 1.0}
    consider((0,), 1.0)
    while waiting and len(best) < count:
        negative, path = heappop(waiting)
        value[path] = -negative
        best.append(path)
        consider((*path[:-1], path[-1] + 1), value[path[:-1]])
        consider((*path, 0), value[path])
    return best


def read_accuracies(folder: str) -> list[list[float]]:
    """What training measured: entry [d][r] as in `best_paths`. MethodError if it is not there or not of that form."""
    file = Path(folder) / SLOTS_FILE
    try:
        table = loads(file.read_text("utf-8"))["accuracies"]
        if not table or not all(row and all(0 <= float(share) <= 1 for share in row) for row in table):
            raise ValueError
    except OSError as error:
        raise MethodError(f"{file} cannot be read ({error.strerror}); `paceline train noise` writes one.") from None
    except (ValueError, TypeError, KeyError):
        raise MethodError(f"{file} is broken: it must have shares from 0 to 1 by slot and rank.") from None
    return [[float(share) for share in row] for row in table]
