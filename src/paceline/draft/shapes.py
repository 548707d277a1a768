"""Trees of fixed shape: paths of ranks, which drafters fill with tokens.

The path (2, 0) is the best candidate of the second step, below candidate 2 of the first. A set of paths is a tree if it
has every prefix of its paths; `compile_template` makes a `Template` of it. Paths come from a published table, from a
file, or from the accuracies of each depth's candidates."""

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from paceline.core.tree import IntArray
from paceline.errors import MethodError
from paceline.jsonl import loads

RankPath = tuple[int, ...]  # rank of the candidate at each step from the root; 0 is the best

_HEADS = ((0.56, 0.78), (0.32, 0.56), (0.20, 0.42), (0.15, 0.34), (0.12, 0.30))
SLOTS = [[best] + [(five - best) * 8 / 15 / 2**rank for rank in range(9)] for best, five in _HEADS]
"""How often each slot's candidates are right, if nothing was measured. The training logs of Medusa's heads for
Vicuna-7B give the accuracy of the best candidate and of the best five; we assume that, after the best, each candidate
is right half as often as the candidate before it."""

SLOTS_FILE = "slots.json"
"""The file to which training writes how often each slot's candidates are right."""

_CHILDREN = {
    "": 10,
    "0": 10, "1": 7, "2": 3, "3": 2, "4": 1, "5": 1, "6": 1, "7": 1, "8": 1, "9": 1,
    "00": 10, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1, "10": 2, "20": 1,
    "000": 2,
}  # fmt: skip


def published() -> list[RankPath]:
    """The tree that Medusa (Cai et al. 2024, arXiv 2401.10774) built for Vicuna-7B, and others adopted. It has 63
    nodes: 10, 28, 23 and 2 of depth 1, 2, 3 and 4."""
    return [(*map(int, above), rank) for above, count in _CHILDREN.items() for rank in range(count)]


def chain(length: int) -> list[RankPath]:
    """The path of the best candidates of `length` slots, with its prefixes."""
    return [(0,) * depth for depth in range(1, length + 1)]


class Template(NamedTuple):
    """The shape of a tree: node 0 is the root, and shallow nodes and better ranks come first.

    parent, rank, depth  int64 [n]; rank and parent of the root are -1.
    levels               levels[d]: number of nodes of depth d or less."""

    parent: IntArray
    rank: IntArray
    depth: IntArray
    levels: tuple[int, ...]

    def within(self, depth: int) -> int:
        """How many nodes, the first ones, have depth `depth` or less."""
        return self.levels[min(max(depth, 0), len(self.levels) - 1)]

    def first(self, size: int) -> Self:
        """The template of the first `size` nodes, 1 or more, which must be whole levels."""
        depth = int(self.depth[size - 1])
        return type(self)(self.parent[:size], self.rank[:size], self.depth[:size], self.levels[: depth + 1])


def compile_template(paths: Iterable[RankPath], ranks: int) -> Template:
    """Make the template of `paths`, in any order.

    Raises ValueError for no path, a path that is there twice or lacks its prefix, or a rank that is not below `ranks`.
    """
    index: dict[RankPath, int] = {(): 0}
    parent, rank, levels = [-1], [-1], [1]
    for path in sorted(paths, key=lambda path: (len(path), path)):
        if path in index:
            raise ValueError(f"path {format_path(path)} is there twice")
        if not 0 <= path[-1] < ranks:
            raise ValueError(f"path {format_path(path)} takes rank {path[-1]}, and ranks are 0 to {ranks - 1}")
        if path[:-1] not in index:
            raise ValueError(f"path {format_path(path)} needs path {format_path(path[:-1])}, which is missing")
        parent.append(index[path[:-1]])
        rank.append(path[-1])
        levels += levels[-1:] if len(path) == len(levels) else []
        levels[-1] += 1
        index[path] = len(index)
    if len(index) == 1:
        raise ValueError("it has no path")
    return Template(np.array(parent), np.array(rank), np.array([len(path) for path in index]), tuple(levels))


def read_paths(file: str | Path) -> list[RankPath]:
    """Read paths from a file: a JSON list of lists of ranks, or words in which each digit is a rank. OSError or
    ValueError for any other file."""
    text = Path(file).read_text("utf-8")
    if not text.lstrip().startswith("["):
        return [tuple(map(int, word)) for word in text.split()]
    paths = loads(text)
    if not all(isinstance(path, list) and all(type(rank) is int for rank in path) for path in paths):
        raise ValueError("in JSON a path is a list of whole numbers")
    return [tuple(path) for path in paths]


def template_of(file: str | Path, ranks: int, who: str, instead: str) -> Template:
    """Make the template of a file's paths. MethodError names the drafter, `who`, and the alternatives, `instead`."""
    try:
        return compile_template(read_paths(file), ranks)
    except OSError as error:
        raise MethodError(
            f"{who}: tree is {str(file)!r}; it must be {instead}, or a file of paths ({error.strerror})."
        ) from None
    except ValueError as error:
        raise MethodError(f"{who}: the tree {file} is not a list of paths: {error}.") from None


def format_path(path: RankPath) -> str:
    """Write a path for messages, such as "2-0"."""
    return "-".join(map(str, path)) if path else "()"


def path_values(accuracies: Sequence[Sequence[float]], paths: Sequence[RankPath]) -> list[float]:
    """The probability that each whole path is right: the product along it."""
    return [float(np.prod([accuracies[slot][rank] for slot, rank in enumerate(path)])) for path in paths]


def best_paths(accuracies: Sequence[Sequence[float]], count: int) -> list[RankPath]:
    """The `count` paths that are likeliest right, or all if there are fewer; parents come before their children.

    accuracies[d][r]: how often candidate r of slot d is right, falling with r. Slots count as independent, so a path's
    probability is the product along it (Cai et al. 2024, section 2.3.3)."""
    return list(best_first(lambda above: accuracies[len(above)] if len(above) < len(accuracies) else (), count))


def best_first(below: Callable[[RankPath], Sequence[float]], count: int) -> dict[RankPath, float]:
    """The `count` paths of largest value, in falling order, with their values. A path's value is the product of the
    shares along it, so no child is worth more than its parent, and a heap finds the best set (Ringel and Romano 2026,
    arXiv 2604.12989).

    below  function that returns the shares of the candidates below a path, falling with the rank; none: it ends."""
    shares: dict[RankPath, Sequence[float]] = {(): below(())}
    value: dict[RankPath, float] = {(): 1.0}
    waiting: list[tuple[float, RankPath]] = []

    def consider(path: RankPath) -> None:
        above = path[:-1]
        if path[-1] < len(shares[above]):
            heappush(waiting, (-value[above] * shares[above][path[-1]], path))

    consider((0,))
    while waiting and len(value) <= count:
        negative, path = heappop(waiting)
        value[path], shares[path] = -negative, below(path)
        consider((*path[:-1], path[-1] + 1))
        consider((*path, 0))
    del value[()]
    return value


def read_accuracies(folder: str, writer: str = "paceline train tools tree") -> list[list[float]]:
    """Read the accuracies that training measured, for `best_paths`. MethodError for a missing or broken file names
    `writer`, the command that writes it."""
    file = Path(folder) / SLOTS_FILE
    try:
        table = loads(file.read_text("utf-8"))["accuracies"]
        if not table or not all(row and all(0 <= float(share) <= 1 for share in row) for row in table):
            raise ValueError
    except OSError as error:
        raise MethodError(f"{file} cannot be read ({error.strerror}); `{writer}` writes one.") from None
    except (ValueError, TypeError, KeyError):
        raise MethodError(f"{file} is broken: it must have shares from 0 to 1 by slot and rank.") from None
    return [[float(share) for share in row] for row in table]
