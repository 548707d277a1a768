"""Times: seconds of a round by its rows and nodes, and of a drafter's work, learned as rounds run or read from a file.

    times = Times()                              # learns
    times.took(rows=8, nodes=20, widest=5, seconds=3e-3)
    times.of(8)[20]                              # seconds of a round of 8 rows and 20 nodes, padding left out

A round takes

    fixed + row * rows + sum of slope_j * max(0, tokens - KNOTS_j) + prompt * (tokens of prompts)
    + rows * (pad * widest + uneven, if any row has a draft)

with no term below 0; tokens are the nodes of all rows and the tokens of prompts that are run beside them. Products over
few tokens cost what reading the weights costs, over many what computing does; attention pads the rows of a batch to the
widest, and is simpler where all have one node. The terms are fitted by least squares of relative errors, drawn to a
guess as long as rounds say little (a batch that has never drafted does not say what a node costs). A table read from a
file is fixed: with it, and a seed, every choice is the same again. The length of the context is not a term: what is
learned follows it, and a table holds for about the context it was measured with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import MethodError
from paceline.jsonl import loads

Floats = NDArray[np.float64]

KNOTS = (0, 6, 12, 48)
"""Nodes at which a node's price may change. Kernels for few rows work in blocks: 6 tokens may cost what one does."""
NAMES = (
    "round",
    "row",
    *(f"token_after_{knot}" for knot in KNOTS),
    "row_times_widest",
    "row_if_uneven",
    "prompt_token",
)
"""The terms, as they are called in files."""
GUESS = 0.02
"""Of a round: the price of a node while nothing is known. Low, so that drafts are tried."""
DOUBT = 0.05
"""Of a round: how far a price is from the guess, in the mean; and GUESS and DOUBT count as much as one round."""
JUMP = 1.0
"""The same of what the first drafted node costs beside its price: a product over one row may have a kernel of its own,
and one over two take twice as long."""
EVERY = 32
"""Rounds between two fits; the first ones come sooner."""
FADE = 0.9
"""What a fit leaves of the weight of earlier rounds."""
SPIKE = 2.0
"""A round that takes SPIKE x its prediction counts as that: another process ran, or a kernel was compiled."""
MOST = 4096
"""Nodes up to which a curve is worked out."""


class Times:
    """See the module. fade: what a fit leaves of the weight of earlier rounds. is_fixed: nothing is learned any more.
    drafting: a drafter's times, by its name."""

    def __init__(self, fade: float = FADE) -> None:
        self.fade, self.is_fixed = fade, False
        self.drafting: dict[str, Drafting] = {}
        self._terms = np.zeros(len(NAMES))
        self._products = np.zeros((len(self._terms), len(self._terms)))
        self._targets = np.zeros(len(self._terms))
        self._new: list[tuple[int, int, int, int, float]] = []
        self._rounds = 0
        self._curves: dict[int, Floats] = {}

    @property
    def known(self) -> bool:
        """Whether any round was timed."""
        return bool(self._terms.any())

    @property
    def pad(self) -> float:
        """Seconds for each row and each node of the widest row."""
        return float(self._terms[-3])

    @property
    def uneven(self) -> float:
        """Seconds for each row as soon as one of them has a draft."""
        return float(self._terms[-2])

    def of(self, rows: int) -> Floats:
        """Seconds of rounds of `rows` rows by their tokens, 0 to MOST, without `pad` and `uneven`."""
        curve = self._curves.get(rows)
        if curve is None:
            tokens = np.arange(MOST + 1)
            curve = self._terms[0] + self._terms[1] * rows + np.zeros(MOST + 1)
            for knot, slope in zip(KNOTS, self._terms[2:-3], strict=True):
                curve += slope * np.maximum(tokens - knot, 0)
            self._curves[rows] = curve
        return curve

    def slope(self, rows: int, tokens: int) -> float:
        """Seconds of one node more, without `pad`."""
        curve, at = self.of(rows), min(tokens, MOST - 1)
        return float(curve[at + 1] - curve[at])

    def seconds(self, rows: int, nodes: int, widest: int, prompt: int = 0) -> float:
        """Seconds of one round; widest: nodes of its largest row, prompt: tokens of prompts beside them."""
        tokens = min(nodes + prompt, MOST)
        padded = rows * (self.pad * widest + (self.uneven if widest > 1 else 0.0))
        return float(self.of(rows)[tokens]) + padded + float(self._terms[-1]) * prompt

    def took(self, rows: int, nodes: int, widest: int, prompt: int, seconds: float) -> None:
        """A round of this shape took so long."""
        if self.is_fixed:
            return
        self._new.append((rows, nodes, widest, prompt, seconds))
        if len(self._new) >= min(EVERY, max(self._rounds, 4)):
            self.fit()

    def fit(self) -> None:
        """Work the rounds since the last fit into the terms."""
        if not self._new:
            return
        rounds = np.array(self._new, float)
        self._new.clear()
        seconds = rounds[:, -1]
        features = _features(*rounds.T[:-1])
        usual = features @ self._terms if self.known else np.full(len(rounds), np.median(seconds))
        seconds = np.minimum(seconds, SPIKE * usual)
        relative = features / seconds[:, None]
        self._products = self.fade * self._products + relative.T @ relative
        self._targets = self.fade * self._targets + relative.sum(0)
        self._rounds += len(rounds)
        self._terms = self._solve(float(np.median(seconds)))
        self._curves.clear()

    def _solve(self, usual: float) -> Floats:
        """The terms of least squares, none below 0, by coordinate descent."""
        nodes = 2  # the first price of a node
        guess, doubt = GUESS * usual, DOUBT * usual
        products, targets = self._products.copy(), self._targets.copy()
        for term in range(1, len(targets)):  # the fixed part is free
            products[term, term] += 1 / (JUMP * usual if NAMES[term] == "row_if_uneven" else doubt) ** 2
        targets[nodes] += guess / doubt**2
        terms = self._terms.copy() if self.known else np.zeros(len(targets))
        return _nonnegative(products, targets, terms)

    # Files ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The terms in milliseconds, and the drafters' times in microseconds."""
        return {
            "forward_ms": {name: round(1e3 * float(term), 6) for name, term in zip(NAMES, self._terms, strict=True)},
            "drafting_us": {name: drafting.to_json() for name, drafting in self.drafting.items()},
        }

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Times:
        """What `to_json` wrote, fixed. Raises KeyError, TypeError or ValueError for anything else."""
        times = cls()
        times._terms = np.array([1e-3 * float(table["forward_ms"][name]) for name in NAMES])
        if not (times._terms >= 0).all() or not times._terms.any():
            raise ValueError("a time in forward_ms is below 0")
        times.drafting = {name: Drafting.from_json(cost) for name, cost in table["drafting_us"].items()}
        times.is_fixed = True
        return times


def _features(rows: Floats, nodes: Floats, widest: Floats, prompt: Floats) -> Floats:
    """The terms' factors of rounds, [rounds, terms], in the order of NAMES."""
    hinges = [np.maximum(nodes + prompt - knot, 0) for knot in KNOTS]
    return np.stack([np.ones(len(rows)), rows, *hinges, rows * widest, rows * (widest > 1), prompt], 1)


def _nonnegative(products: Floats, targets: Floats, terms: Floats) -> Floats:
    """x >= 0 that makes x'Px/2 - t'x least, from `terms` on."""
    size, rows, wanted, x = len(targets), products.tolist(), targets.tolist(), terms.tolist()
    for _ in range(60):
        moved = 0.0
        for i in range(size):
            row = rows[i]
            if row[i] <= 0:
                continue
            rest = wanted[i] - sum(row[j] * x[j] for j in range(size)) + row[i] * x[i]
            new = max(rest / row[i], 0.0)
            moved = max(moved, abs(new - x[i]) * row[i] ** 0.5)
            x[i] = new
        if moved < 1e-4:
            break
    return np.array(x)


class Drafting:
    """Seconds a drafter takes for one call of `propose`: steps * (call + row * rows). Steps are forwards of its model
    one after another; 1 where it has none."""

    MEMORY = 64

    def __init__(self, call: float = 0.0, row: float = 0.0) -> None:
        self.call, self.row = call, row
        self._count = 0

    def seconds(self, rows: int, steps: int = 1) -> float:
        """Seconds to draft for `rows` rows in `steps` steps."""
        return steps * (self.call + self.row * rows)

    def took(self, rows: int, steps: int, seconds: float) -> None:
        """A call for `rows` rows in `steps` steps took so long. Moves both terms to where they would have said so,
        the one that is larger more (normalised least mean squares)."""
        self._count += 1
        each, said = seconds / steps, self.call + self.row * rows
        if self._count > 8:
            each = min(each, 3 * said)
        pace = max(1 / self._count, 1 / self.MEMORY)
        share = 0.5 if said <= 0 else self.call / said
        gap = pace * (each - said)
        self.call, self.row = max(self.call + gap * share, 0.0), max(self.row + gap * (1 - share) / rows, 0.0)

    def to_json(self) -> dict[str, float]:
        """In microseconds."""
        return {"step": round(1e6 * self.call, 3), "row": round(1e6 * self.row, 3)}

    @classmethod
    def from_json(cls, cost: Mapping[str, Any]) -> Drafting:
        """What `to_json` wrote."""
        call, row = 1e-6 * float(cost["step"]), 1e-6 * float(cost["row"])
        if not (call >= 0 and row >= 0):
            raise ValueError("drafting takes less than no time")
        return cls(call, row)


def read_table(path: str, fingerprint: str) -> dict[str, Any]:
    """A file that `paceline tune` wrote: its JSON. MethodError in one line if it is not one, or of another model.

    fingerprint  of the target's weights; "" on either side: unknown, and not compared."""
    try:
        with open(path, "rb") as file:
            table = loads(file.read())
    except OSError as error:
        raise MethodError(f"the table {path} cannot be read: {error.strerror}; `paceline tune` writes one.") from None
    except ValueError:
        raise MethodError(f"{path} is not JSON; `paceline tune` writes a table.") from None
    try:
        Times.from_json(table)
        of = str(table["model"]["fingerprint"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MethodError(f"{path} is not a table of `paceline tune` ({error!r}); write it anew.") from None
    if of and fingerprint and of != fingerprint:
        name = table["model"].get("name", "another model")
        raise MethodError(f"{path} was measured with {name}, other weights than this model's; run `paceline tune`.")
    return dict(table)
