"""Prices: how long rounds and drafting take on this machine.

`Prices` are learnt as rounds run, or read from a `Table` of `paceline tune`. The budget and `auto` decide by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.tree import Floats
from paceline.errors import MethodError
from paceline.jsonl import NotJSON, loads

INSTANT = 1e-9
"""Shortest time of a round, in seconds."""
MOST_RECORDED = 32
"""Up to so many nodes, every number of them may have a forward of its own (`kernels/program.py`)."""


class Prices:
    """Seconds of a round, learnt as rounds run:

        fixed + row * rows + draft, if any row has one, + node * drafted nodes + context * thousands of cached tokens

    The terms, none below 0, are fitted by least squares of relative errors. Earlier rounds fade, because machines drift
    and other processes come and go. Terms that the last rounds do not determine keep their share of a round. `draft` is
    a term because a library's kernel for one token may take half as long as its kernel for two.

    given    the terms, in seconds by name; None: they are learnt.
    fade     factor on the weight of earlier rounds after every FIT_EVERY rounds.
    largest  drafted nodes of the largest round so far; beyond twice as many, the terms are a guess."""

    NAMES = ("fixed", "row", "draft", "node", "context")
    PRIOR = np.array([1.0, 0.0, 0.0, 0.02, 0.0])
    """The terms before the first fit, as shares of a round. They are low, so that drafts are tried."""
    DEVIATIONS = np.array([10.0, 0.1, 0.5, 0.05, 0.05])
    """Standard deviations of the terms from their last fit, as shares of a round."""
    NOISE = 0.1  # relative standard deviation of a round's time
    FIT_EVERY, MOST = 8, 32  # rounds between fits: the default, and the most
    SPIKE = 2.0  # A round counts as at most SPIKE times its prediction.

    def __init__(self, given: Mapping[str, float] | None = None, fade: float = 0.95) -> None:
        self.fade = fade
        self.is_fixed, self.largest = given is not None, 0
        self._terms = np.array([(given or {}).get(name, 0.0) for name in self.NAMES])
        self._list: list[float] = self._terms.tolist()
        self._products = np.zeros((len(self.NAMES), len(self.NAMES)))
        self._targets = np.zeros(len(self.NAMES))
        self._new: list[tuple[list[float], float]] = []
        self._shapes: set[tuple[int, int]] = set()
        self._count = 0

    @property
    def known(self) -> bool:
        """Whether prices were given or learnt."""
        return any(self._list)

    @property
    def terms(self) -> dict[str, float]:
        """The terms, in seconds by name."""
        return dict(zip(self.NAMES, self._list, strict=True))

    def seconds(self, rows: int, nodes: int, context: int = 0) -> float:
        """Seconds of a round of `rows` rows with `nodes` drafted nodes, and `context` tokens in their caches."""
        return sum(term * factor for term, factor in zip(self._list, _factors(rows, nodes, context), strict=True))

    def note(self, rows: int, nodes: int, context: int, seconds: float) -> None:
        """Record a round's time. The first round of a shape is ignored: it may compile or record something."""
        shape = rows, nodes if rows + nodes <= MOST_RECORDED else -nodes.bit_length()
        if self.is_fixed or shape not in self._shapes:
            self._shapes.add(shape)
            return
        self.largest = max(self.largest, nodes)
        self._count += 1
        self._new.append((_factors(rows, nodes, context), seconds))
        if self.known:
            enough = min(self._count // 4, self.MOST)
        else:  # The first fit compares drafting with plain decoding.
            enough = 2 if len({factors[3] > 0 for factors, _ in self._new}) == 2 else self.FIT_EVERY
        if len(self._new) >= enough:
            self.fit()

    def fit(self) -> None:
        """Update the terms with the rounds since the last fit."""
        if not self._new:
            return
        factors, seconds = np.array([of for of, _ in self._new]), np.array([took for _, took in self._new])
        self._new.clear()
        seconds, plain = np.maximum(seconds, INSTANT), factors[:, 3] == 0
        if self.known and plain.any():  # Plain rounds tell how the machine's speed has changed.
            drift = float(np.median(seconds[plain] / np.maximum(factors[plain] @ self._terms, INSTANT)))
            drift = min(max(drift, 1 / self.SPIKE), self.SPIKE)
            self._terms, self._targets, self._products = (
                self._terms * drift, self._targets / drift, self._products / drift**2
            )  # fmt: skip
        usual = np.maximum(factors @ self._terms, INSTANT) if self.known else np.full(len(seconds), np.median(seconds))
        seconds = np.minimum(seconds, self.SPIKE * usual * max(float(np.median(seconds / usual)), 1.0))
        relative = factors / seconds[:, None]
        fade = self.fade ** (len(seconds) / self.FIT_EVERY)
        self._products = fade * self._products + relative.T @ relative
        self._targets = fade * self._targets + relative.sum(0)
        round = float(usual.mean())
        before = self._terms if self.known else self.PRIOR * round
        weights = (self.NOISE / (self.DEVIATIONS * round)) ** 2
        self._terms = _nonnegative(self._products + np.diag(weights), self._targets + weights * before)
        self._list = self._terms.tolist()


def _factors(rows: int, nodes: int, context: int) -> list[float]:
    return [1.0, float(rows), float(nodes > 0), float(nodes), 1e-3 * context]


def _nonnegative(products: Floats, targets: Floats) -> Floats:
    """Minimise x'Px/2 - t'x over x >= 0, by active sets: solve for the terms above 0, drop those that become negative,
    and add the term that helps most, until no term helps."""
    positive, x = np.ones(len(targets), np.bool_), np.zeros(len(targets))
    for _ in range(4 * len(targets)):
        x = np.zeros(len(targets))
        x[positive] = np.linalg.solve(products[np.ix_(positive, positive)], targets[positive])
        if (x < 0).any():
            positive &= x > 0
            continue
        gain = np.where(positive, 0.0, targets - products @ x)
        if gain.max() <= 1e-9 * abs(targets).max():
            break
        positive[gain.argmax()] = True
    return np.maximum(x, 0.0)


class DraftTimes:
    """Seconds of a call of `propose`: steps * (call + row * rows). Steps are forwards of the drafter's model; without a
    model there is 1."""

    MEMORY = 64

    def __init__(self, call: float = 0.0, row: float = 0.0) -> None:
        self.call, self.row = call, row
        self._count = 0

    def seconds(self, rows: int, steps: int = 1) -> float:
        """Seconds to draft for `rows` rows in `steps` steps."""
        return steps * (self.call + self.row * rows)

    def note(self, rows: int, steps: int, seconds: float) -> None:
        """Record a measured call: both terms move towards it, the larger term further (normalised LMS)."""
        self._count += 1
        each, predicted = seconds / steps, self.call + self.row * rows
        if self._count > 8:
            each = min(each, 3 * predicted)
        # If it took half as long, another process had held up the calls before.
        pace = max(1 / self._count, 1 / self.MEMORY) if each > predicted / 2 else 1 / 2
        share = 0.5 if predicted <= 0 else self.call / predicted
        gap = pace * (each - predicted)
        self.call, self.row = max(self.call + gap * share, 0.0), max(self.row + gap * (1 - share) / rows, 0.0)

    def to_json(self) -> dict[str, float]:
        """Both terms in microseconds, for JSON."""
        return {"step": round(1e6 * self.call, 3), "row": round(1e6 * self.row, 3)}

    @classmethod
    def from_json(cls, cost: Mapping[str, Any]) -> DraftTimes:
        """Read the output of `to_json`. ValueError for a time below 0."""
        call, row = 1e-6 * float(cost["step"]), 1e-6 * float(cost["row"])
        if not (call >= 0 and row >= 0):
            raise ValueError("a time in drafting_us is below 0")
        return cls(call, row)


@dataclass(frozen=True)
class Table:
    """The measurements of `paceline tune`.

    drafting    times of drafters, by spec.
    acceptance  acceptance by depth, by spec: entry d - 1 is the share of drafts that survived depth d among those that
                reached it.
    drafters    spec of each drafter that was made of one of these specs."""

    prices: Prices
    drafting: Mapping[str, DraftTimes]
    acceptance: Mapping[str, Sequence[float]] = field(default_factory=dict)
    drafters: dict[Any, str] = field(default_factory=dict)

    def of(self, drafter: object) -> tuple[DraftTimes | None, Sequence[float]]:
        """Return a drafter's times and acceptance; (None, ()) if it is not in `drafters`."""
        spec = self.drafters.get(drafter, "")
        return self.drafting.get(spec), self.acceptance.get(spec, ())

    def to_json(self) -> dict[str, Any]:
        """Terms of a round in milliseconds, times of drafters in microseconds."""
        return {
            "forward_ms": {name: round(1e3 * seconds, 6) for name, seconds in self.prices.terms.items()},
            "drafting_us": {spec: times.to_json() for spec, times in self.drafting.items()},
            "acceptance": {spec: list(shares) for spec, shares in self.acceptance.items()},
        }

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Table:
        """Read the output of `to_json`. KeyError, TypeError, AttributeError or ValueError for anything else."""
        prices = Prices({name: 1e-3 * float(table["forward_ms"][name]) for name in Prices.NAMES})
        if not prices.known or min(prices.terms.values()) < 0:
            raise ValueError("a time in forward_ms is below 0, or all are 0")
        drafting = {spec: DraftTimes.from_json(cost) for spec, cost in table["drafting_us"].items()}
        return cls(prices, drafting, dict(table.get("acceptance", {})))

    @classmethod
    def read(cls, path: str, fingerprint: str) -> Table:
        """Read the table in a file. MethodError if the file has no table, or another model's.

        fingerprint  fingerprint of the target's weights. "", here or in the file: any model's table is read."""
        try:
            json = loads(Path(path).read_bytes())
            table, of = cls.from_json(json), str(json["model"]["fingerprint"])
        except OSError as error:
            lacks = f"the table {path} cannot be read: {error.strerror}"
            raise MethodError(f"{lacks}; `paceline tune` writes one.") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"it is {error}" if isinstance(error, NotJSON) else "a part of it is missing or of another kind"
            raise MethodError(f"{path} is not a table of `paceline tune` ({why}); write it anew.") from None
        if of and fingerprint and of != fingerprint:
            name = json["model"].get("name", "another model")
            raise MethodError(f"{path} was measured with {name}, other weights than this model's; run `paceline tune`.")
        return table


MOST = 4096
"""Largest number of nodes for which `forward_times` computes a time."""


def forward_times(seconds: Mapping[int, float]) -> Floats:
    """Seconds of a forward by its number of nodes, float64 [MOST + 1].

    seconds  measured times by number of nodes. Between two of them times are linear; before the first they are
             constant; after the last they go on with the slope between the last two, if it is above 0."""
    sizes, nodes = sorted(seconds), np.arange(MOST + 1)
    last = sizes[-2:]
    slope = (seconds[last[-1]] - seconds[last[0]]) / max(last[-1] - last[0], 1)
    between = np.interp(nodes, sizes, [seconds[size] for size in sizes])
    return between + max(slope, 0.0) * np.maximum(nodes - sizes[-1], 0)
