"""What a round takes on this machine.

`Prices` are learnt as rounds run, or read from a `Table` of `paceline tune`; the engine's budget and `auto` go by them.
`time_forwards` measures forwards beforehand, for `tree=auto`: `best_size` and `best_sizes` say how large such a tree
should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import accumulate, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.segment import Segment
from paceline.core.tree import DraftTree
from paceline.errors import MethodError
from paceline.jsonl import NotJSON, loads
from paceline.target.base import Facts, Target

Floats = NDArray[np.float64]

BREAKPOINTS = (0, 6, 12, 48)  # nodes at which a node's price may change: 6 tokens may cost as much as 1
NODE_PRICE = 0.02  # Prior of a node's price, as a share of a round. Low, so that drafts are tried.
DEVIATION = 0.05  # standard deviation of a term's prior, as a share of a round
FIRST_NODE_DEVIATION = 1.0
"""The same for the first drafted node: one row may have a kernel of its own, and two rows take twice as long."""
LEAST_NOISE = 1e-3  # least variance of a round's time, relative to it
FIT_EVERY = 32  # rounds between two fits; the first ones come sooner
FADE = 0.95  # factor on the weight of earlier rounds at every fit
INSTANT = 1e-9  # seconds that a round takes at least
SPIKE = 2.0  # a round counts as at most SPIKE times its prediction: another process ran, or a kernel was compiled
MOST = 4096  # nodes up to which curves are computed
SIZES = (1, 2, 4, 8, 16, 32, 64)  # nodes of the trees that `time_forwards` runs, the root included
REPEATS = 4
CONTEXT = 32  # tokens of the row below which those trees are verified
DEFAULT_SIZE = 16  # drafted nodes a row if forwards cannot be timed: the target runs in another engine, or not at all


class RoundTimes:
    """Seconds of a round by its rows and nodes, learned as rounds run for stop=adaptive, or given. A round takes

        fixed + row * rows + sum of slope_j * max(0, tokens - breakpoint_j) + prompt_token * (prompt tokens)
        + rows * (pad * widest + uneven, if any row has a draft)

    seconds; tokens are the nodes of all rows and the prompt tokens of the same forward. The terms, none below 0, are
    fitted by least squares of relative errors, with a prior because a batch that never drafted shows no cost of nodes.

    fade      factor on the weight of earlier rounds at every fit.
    is_fixed  nothing is learned any more."""

    def __init__(self, fade: float = FADE, breakpoints: Sequence[int] = BREAKPOINTS) -> None:
        self.fade, self.is_fixed = fade, False
        self._breakpoints = breakpoints
        self._terms = np.zeros(2 + len(breakpoints) + 3)
        self._products = np.zeros((len(self._terms), len(self._terms)))
        self._targets = np.zeros(len(self._terms))
        self._new: list[tuple[int, int, int, int, float]] = []
        self._rounds = 0
        self._weight = 0.0  # of all rounds that were fitted
        self._curves: dict[int, Floats] = {}

    @classmethod
    def of_forwards(cls, seconds: Mapping[int, float]) -> RoundTimes:
        """Fixed times, linear between `seconds`, a forward's by its number of nodes; constant before the first, and
        after the last with the slope of the last two, if it rises."""
        sizes = sorted(seconds)
        times = cls(breakpoints=sizes)
        slopes = [(seconds[b] - seconds[a]) / (b - a) for a, b in pairwise(sizes)]
        slopes.append(max(slopes[-1], 0.0) if slopes else 0.0)
        times._terms[0] = seconds[sizes[0]]
        times._terms[2 : 2 + len(sizes)] = np.diff(slopes, prepend=0.0)
        times.is_fixed = True
        return times

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
            for term, factor in zip(self._terms[2:-3], self._by_tokens(tokens), strict=True):
                curve += term * factor
            self._curves[rows] = curve
        return curve

    def _by_tokens(self, tokens: NDArray[Any]) -> list[Floats]:
        """The factors of the terms that hang on the number of tokens."""
        return [np.maximum(tokens - breakpoint, 0) for breakpoint in self._breakpoints]

    def slope(self, rows: int, tokens: int) -> float:
        """Seconds of one more node, without `pad`."""
        curve, at = self.of(rows), min(tokens, MOST - 1)
        return float(curve[at + 1] - curve[at])

    def seconds(self, rows: int, nodes: int, widest: int, prompt: int = 0) -> float:
        """Seconds of one round. widest: nodes of its largest row; prompt: prompt tokens of the same forward."""
        tokens = min(nodes + prompt, MOST)
        padded = rows * (self.pad * widest + (self.uneven if widest > 1 else 0.0))
        return float(self.of(rows)[tokens]) + padded + float(self._terms[-1]) * prompt

    def usual(self, rows: int, nodes: int, widest: int, prompt: int, seconds: float) -> float:
        """`seconds`, but at most SPIKE times the expected time of a round of this shape."""
        return min(seconds, SPIKE * self.seconds(rows, nodes, widest, prompt)) if self.known else seconds

    def note(self, rows: int, nodes: int, widest: int, prompt: int, seconds: float) -> None:
        """Learn from a round of this shape, which took `seconds`."""
        if self.is_fixed:
            return
        self._new.append((rows, nodes, widest, prompt, seconds))
        if len(self._new) >= min(FIT_EVERY, max(self._rounds, 4)):
            self.fit()

    def fit(self) -> None:
        """Work the rounds since the last fit into the terms."""
        if not self._new:
            return
        rounds = np.array(self._new, float)
        self._new.clear()
        seconds = rounds[:, -1]
        features = self._features(*rounds.T[:-1])
        usual = features @ self._terms if self.known else np.full(len(rounds), np.median(seconds))
        seconds = np.minimum(seconds, SPIKE * usual)
        relative = features / seconds[:, None]
        self._products = self.fade * self._products + relative.T @ relative
        self._targets = self.fade * self._targets + relative.sum(0)
        self._rounds += len(rounds)
        self._weight = self.fade * self._weight + len(rounds)
        self._terms = self._solve(float(np.median(seconds)))
        self._curves.clear()

    def _features(self, rows: Floats, nodes: Floats, widest: Floats, prompt: Floats) -> Floats:
        """The factors of the terms, [rounds, terms]."""
        by_tokens = self._by_tokens(nodes + prompt)
        return np.stack([np.ones(len(rows)), rows, *by_tokens, rows * widest, rows * (widest > 1), prompt], 1)

    def _solve(self, usual: float) -> Floats:
        """The terms by least squares with the priors, which weigh more if the last terms explain less."""
        products, targets, terms = self._products.copy(), self._targets.copy(), self._terms
        residual = (self._weight - 2 * targets @ terms + terms @ products @ terms) / self._weight
        noise = float(np.clip(residual, LEAST_NOISE, 1.0))
        deviations = np.full(len(targets), DEVIATION * usual / noise**0.5)
        deviations[-2] *= FIRST_NODE_DEVIATION / DEVIATION
        products[np.diag_indices(len(targets))] += np.append(0, deviations[1:] ** -2.0)  # the fixed part is free
        targets[2] += NODE_PRICE * usual / deviations[2] ** 2
        return _nonnegative(products, targets)


class Prices:
    """Seconds of a round, learnt as rounds run:

        fixed + row * rows + draft, if any row has one, + node * drafted nodes + context * thousands of cached tokens

    The terms, none below 0, are fitted by least squares of relative errors. Earlier rounds fade, because machines drift
    and neighbours come and go; terms of which the last rounds say nothing stay what they were, as shares of a round.
    `draft` is a term because one token may have a kernel of its own, and two take twice as long.

    given    the terms, in seconds by name; then nothing is learnt. None: they are learnt.
    fade     factor on the weight of earlier rounds at every fit.
    largest  drafted nodes of the largest round so far: beyond twice as many, the terms are a guess."""

    NAMES = ("fixed", "row", "draft", "node", "context")
    PRIOR = np.array([1.0, 0.0, 0.0, 0.02, 0.0])
    """Of the terms before any is known, as shares of a round: low, so that drafts are tried."""
    DEVIATIONS = np.array([10.0, 0.1, 0.5, 0.05, 0.05])
    """Of a term from what was known of it, as shares of a round."""
    NOISE = 0.1  # of a round's time, relative
    FIT_EVERY = 8  # rounds between two fits; the first ones come sooner
    SPIKE = 2.0  # a round counts as at most SPIKE times its prediction: another process ran

    def __init__(self, given: Mapping[str, float] | None = None, fade: float = FADE) -> None:
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
        """Whether rounds were timed."""
        return any(self._list)

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by name."""
        return dict(zip(self.NAMES, self._list, strict=True))

    def seconds(self, rows: int, nodes: int, context: int = 0) -> float:
        """Seconds of a round of `rows` rows with `nodes` drafted nodes, and `context` tokens in their caches."""
        return sum(term * factor for term, factor in zip(self._list, _factors(rows, nodes, context), strict=True))

    def note(self, rows: int, nodes: int, context: int, seconds: float) -> None:
        """A round of this shape took `seconds`. The first of a shape does not count: it may have compiled something."""
        shape = rows, nodes.bit_length()
        if self.is_fixed or shape not in self._shapes:
            self._shapes.add(shape)
            return
        self.largest = max(self.largest, nodes)
        self._count += 1
        self._new.append((_factors(rows, nodes, context), seconds))
        if self.known:
            enough = min(self._count // 4, self.FIT_EVERY)
        else:  # two rounds that tell drafting from plain decoding, or more
            enough = 2 if len({factors[3] > 0 for factors, _ in self._new}) == 2 else self.FIT_EVERY
        if len(self._new) >= enough:
            self.fit()

    def fit(self) -> None:
        """Work the rounds since the last fit into the terms."""
        if not self._new:
            return
        factors, seconds = np.array([of for of, _ in self._new]), np.array([took for _, took in self._new])
        self._new.clear()
        seconds, plain = np.maximum(seconds, INSTANT), factors[:, 3] == 0
        if self.known and plain.any():  # the machine is so much slower by now; drafts will be, too
            drift = float(np.median(seconds[plain] / np.maximum(factors[plain] @ self._terms, INSTANT)))
            drift = min(max(drift, 1 / self.SPIKE), self.SPIKE)
            self._terms, self._targets, self._products = (
                self._terms * drift, self._targets / drift, self._products / drift**2
            )  # fmt: skip
        usual = np.maximum(factors @ self._terms, INSTANT) if self.known else np.full(len(seconds), np.median(seconds))
        seconds = np.minimum(seconds, self.SPIKE * usual * max(float(np.median(seconds / usual)), 1.0))
        relative = factors / seconds[:, None]
        self._products = self.fade * self._products + relative.T @ relative
        self._targets = self.fade * self._targets + relative.sum(0)
        round = float(usual.mean())
        before = self._terms if self.known else self.PRIOR * round
        weights = (self.NOISE / (self.DEVIATIONS * round)) ** 2
        self._terms = _nonnegative(self._products + np.diag(weights), self._targets + weights * before)
        self._list = self._terms.tolist()


def _factors(rows: int, nodes: int, context: int) -> list[float]:
    return [1.0, float(rows), float(nodes > 0), float(nodes), 1e-3 * context]


def _nonnegative(products: Floats, targets: Floats) -> Floats:
    """The x >= 0 with the least x'Px/2 - t'x, by active sets: solves over the terms above 0, drops those that become
    negative and adds the one that helps most, until none does."""
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
    """Seconds of a call of `propose`: steps * (call + row * rows). Steps are forwards of its model; 1 without one."""

    MEMORY = 64

    def __init__(self, call: float = 0.0, row: float = 0.0) -> None:
        self.call, self.row = call, row
        self._count = 0

    def seconds(self, rows: int, steps: int = 1) -> float:
        """Seconds to draft for `rows` rows in `steps` steps."""
        return steps * (self.call + self.row * rows)

    def note(self, rows: int, steps: int, seconds: float) -> None:
        """Move both terms towards values that would have predicted a call, the larger one more (normalised LMS)."""
        self._count += 1
        each, predicted = seconds / steps, self.call + self.row * rows
        if self._count > 8:
            each = min(each, 3 * predicted)
        # Half as long: the calls before were held up by another process.
        pace = max(1 / self._count, 1 / self.MEMORY) if each > predicted / 2 else 1 / 2
        share = 0.5 if predicted <= 0 else self.call / predicted
        gap = pace * (each - predicted)
        self.call, self.row = max(self.call + gap * share, 0.0), max(self.row + gap * (1 - share) / rows, 0.0)

    def to_json(self) -> dict[str, float]:
        """In microseconds."""
        return {"step": round(1e6 * self.call, 3), "row": round(1e6 * self.row, 3)}

    @classmethod
    def from_json(cls, cost: Mapping[str, Any]) -> DraftTimes:
        """What `to_json` wrote."""
        call, row = 1e-6 * float(cost["step"]), 1e-6 * float(cost["row"])
        if not (call >= 0 and row >= 0):
            raise ValueError("a time in drafting_us is below 0")
        return cls(call, row)


class Rate:
    """Tokens a second, over about the last MEMORY rounds."""

    MEMORY = 64

    def __init__(self, tokens: float = 0.0, seconds: float = 0.0) -> None:
        self._tokens, self._seconds = tokens, seconds

    def note(self, tokens: float, seconds: float) -> None:
        """A round that brought `tokens` in `seconds`."""
        self._tokens += tokens - self._tokens / self.MEMORY
        self._seconds += seconds - self._seconds / self.MEMORY

    @property
    def value(self) -> float:
        """Tokens a second; 0 if there was no round."""
        return self._tokens / self._seconds if self._seconds else 0.0


@dataclass(frozen=True)
class Table:
    """What `paceline tune` measured.

    drafting    times of drafters, by spec.
    acceptance  by spec; entry d - 1: of the drafts that reached depth d, the share that survived it.
    drafters    specs of the drafters that were made of them."""

    prices: Prices
    drafting: Mapping[str, DraftTimes]
    acceptance: Mapping[str, Sequence[float]] = field(default_factory=dict)
    drafters: dict[Any, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Terms of a round in milliseconds, times of drafters in microseconds."""
        return {
            "forward_ms": {name: round(1e3 * seconds, 6) for name, seconds in self.prices.terms.items()},
            "drafting_us": {spec: times.to_json() for spec, times in self.drafting.items()},
            "acceptance": {spec: list(shares) for spec, shares in self.acceptance.items()},
        }

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Table:
        """What `to_json` wrote. Raises KeyError, TypeError, AttributeError or ValueError for anything else."""
        prices = Prices({name: 1e-3 * float(table["forward_ms"][name]) for name in Prices.NAMES})
        if not prices.known or min(prices.terms.values()) < 0:
            raise ValueError("a time in forward_ms is below 0, or all are 0")
        drafting = {spec: DraftTimes.from_json(cost) for spec, cost in table["drafting_us"].items()}
        return cls(prices, drafting, dict(table.get("acceptance", {})))

    @classmethod
    def read(cls, path: str, fingerprint: str) -> Table:
        """The table in a file. MethodError if it is no such file, or of another model.

        fingerprint  of the target's weights; "" on either side: unknown, not compared."""
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


# The nodes that pay --------------------------------------------------------------------------------------------------


def best_size(gains: Sequence[float], times: RoundTimes, drafting: float = 0.0, rows: int = 1, fixed: int = 0) -> int:
    """The number of drafted nodes that gives the most tokens a second; 0: drafting does not pay.

    gains     gains[n]: accepted tokens that n drafted nodes bring, gains[0] = 0.
    times     of rounds; if they are unknown, the size is DEFAULT_SIZE nodes a row, at most len(gains) - 1.
    drafting  seconds of drafting.
    rows      rows that share the nodes, each with a root. fixed: other nodes of the same forward."""
    if not times.known:
        return min(DEFAULT_SIZE * rows, len(gains) - 1)
    drafted = np.arange(len(gains))
    cost = times.of(rows)[np.minimum(drafted + rows + fixed, MOST)] + np.where(drafted > 0, drafting, 0.0)
    return int(np.argmax((rows + np.asarray(gains)) / cost))


def best_sizes(probabilities: Sequence[Sequence[float]], times: RoundTimes, fixed: int = 0) -> list[int]:
    """For rows that are verified together, how many of the likeliest candidates of each give the most tokens a second,
    fewer than SIZES[-1]. probabilities: of acceptance, for the candidates of each row."""
    likeliest = [(p, r) for r, of_row in enumerate(probabilities) for p in nlargest(SIZES[-1] - 1, of_row)]
    likeliest.sort(key=lambda one: -one[0])
    gains = [0.0, *accumulate(p for p, _ in likeliest)]
    taken = Counter(r for _, r in likeliest[: best_size(gains, times, rows=len(probabilities), fixed=fixed)])
    return [taken[r] for r in range(len(probabilities))]


def time_forwards(target: Facts) -> RoundTimes:
    """Times of forwards of one row, the least of REPEATS at each size; unknown if the target cannot be run here."""
    if not isinstance(target, Target):
        return RoundTimes()
    slot = target.add_row(CONTEXT + 2 * SIZES[-1])
    try:
        prompt = np.arange(CONTEXT) % target.vocab_size
        target.verify([Segment.chunk(slot, prompt, last=True)])
        target.commit(slot, range(CONTEXT))
        sizes = [size for size in SIZES if CONTEXT + size <= target.max_context]
        return RoundTimes.of_forwards({size: min(_timed(target, slot, size) for _ in range(REPEATS)) for size in sizes})
    finally:
        target.drop_row(slot)


def _timed(target: Target, slot: int, size: int) -> float:
    """Seconds of a forward over a bushy tree of `size` nodes; nothing is committed."""
    tokens = np.arange(size) % target.vocab_size
    tree = DraftTree(tokens, np.array([-1, *((node - 1) // 2 for node in range(1, size))]))
    # Reading a number waits for an accelerator.
    return seconds_of(lambda: target.verify([Segment.tree(slot, tree)]).logits[0, 0].item())


def seconds_of(act: Callable[[], object]) -> float:
    """How long a call takes."""
    began = perf_counter()
    act()
    return perf_counter() - began
