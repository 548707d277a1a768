"""The time of a round on this machine, and the drafted nodes that pay: for auto, tree=auto and tune.

`RoundTimes` learns times as rounds run, `time_forwards` measures some beforehand; `choose` cuts the drafts of a batch,
`best_size` and `best_sizes` say how large drafts should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
FADE = 0.9  # factor on the weight of earlier rounds at every fit
SPIKE = 2.0  # a round counts as at most SPIKE times its prediction: another process ran, or a kernel was compiled
MOST = 4096  # nodes up to which curves are computed
SIZES = (1, 2, 4, 8, 16, 32, 64)  # nodes of the trees that `time_forwards` runs, the root included
REPEATS = 4
CONTEXT = 32  # tokens of the row below which those trees are verified
DEFAULT_SIZE = 16  # drafted nodes a row if forwards cannot be timed: the target runs in another engine, or not at all


class RoundTimes:
    """Seconds of a round by its rows and nodes, learned as rounds run, or given. A round takes

        fixed + row * rows + sum of slope_j * max(0, tokens - breakpoint_j) + prompt_token * (prompt tokens)
        + rows * (pad * widest + uneven, if any row has a draft) + experts * touched

    seconds; tokens are the nodes of all rows and the prompt tokens of the same forward. Products over few tokens take
    the time of reading the weights, over many that of computing; attention pads the rows of a batch to the widest, and
    is simpler where all rows have one node. A mixture of experts reads those that its tokens choose, of which more and
    more were chosen before: touched is (1 - (1 - expert_share) ** tokens) / expert_share, 1 for one token. The terms,
    none below 0, are fitted by least squares of relative errors, with a prior because a batch that never drafted shows
    no cost of nodes. The length of the context is not a term: learned times follow it, and a table is right for about
    the context it was measured with.

    fade          factor on the weight of earlier rounds at every fit.
    expert_share  of the experts, those that one token chooses; 0.0: there are none, and no such term.
    is_fixed      nothing is learned any more. With a table and a seed, every choice of `auto` repeats.
    drafting      times of drafters, by name.
    names         of the terms in files."""

    def __init__(self, fade: float = FADE, breakpoints: Sequence[int] = BREAKPOINTS, expert_share: float = 0.0) -> None:
        self.fade, self.expert_share, self.is_fixed = fade, expert_share, False
        self.drafting: dict[str, DraftTimes] = {}
        self._breakpoints = breakpoints
        slopes = [f"token_after_{breakpoint}" for breakpoint in breakpoints]
        experts = ["experts"] if expert_share else []
        self.names = ("round", "row", *slopes, *experts, "row_times_widest", "row_if_uneven", "prompt_token")
        self._terms = np.zeros(len(self.names))
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
        hinges = [np.maximum(tokens - breakpoint, 0) for breakpoint in self._breakpoints]
        share = self.expert_share
        return [*hinges, (1 - (1 - share) ** tokens) / share] if share else hinges

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

    def to_json(self) -> dict[str, Any]:
        """The terms in milliseconds, and the drafters' times in microseconds."""
        terms = zip(self.names, self._terms.tolist(), strict=True)
        return {
            "forward_ms": {name: round(1e3 * term, 6) for name, term in terms},
            "drafting_us": {name: drafting.to_json() for name, drafting in self.drafting.items()},
            **({"expert_share": self.expert_share} if self.expert_share else {}),
        }

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> RoundTimes:
        """What `to_json` wrote, fixed. Raises KeyError, TypeError or ValueError for anything else."""
        times = cls(expert_share=float(table.get("expert_share", 0.0)))
        times._terms = np.array([1e-3 * float(table["forward_ms"][name]) for name in times.names])
        if not (times._terms >= 0).all() or not times._terms.any():
            raise ValueError("a time in forward_ms is below 0")
        times.drafting = {name: DraftTimes.from_json(cost) for name, cost in table["drafting_us"].items()}
        times.is_fixed = True
        return times


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
        pace = max(1 / self._count, 1 / self.MEMORY)
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


def read_table(path: str, fingerprint: str) -> tuple[RoundTimes, dict[str, Any]]:
    """The times in a file of `paceline tune`, and its JSON. MethodError if it is no such file, or of another model.

    fingerprint  of the target's weights; "" on either side: unknown, not compared."""
    try:
        table = loads(Path(path).read_bytes())
        times, of = RoundTimes.from_json(table), str(table["model"]["fingerprint"])
    except OSError as error:
        raise MethodError(f"the table {path} cannot be read: {error.strerror}; `paceline tune` writes one.") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"it is {error}" if isinstance(error, NotJSON) else "a part of it is missing or of another kind"
        raise MethodError(f"{path} is not a table of `paceline tune` ({why}); write it anew.") from None
    if of and fingerprint and of != fingerprint:
        name = table["model"].get("name", "another model")
        raise MethodError(f"{path} was measured with {name}, other weights than this model's; run `paceline tune`.")
    return times, table


# The nodes that pay --------------------------------------------------------------------------------------------------


def choose(
    drafts: Sequence[Floats], rows: int, times: RoundTimes, rate: float, fixed: int = 0, widest: int = 1
) -> tuple[float, float]:
    """(threshold, price) in a round of `rows` rows: nodes of at least this probability pay; price: tokens that one more
    would have to bring. drafts: for each row, the acceptance probabilities of its nodes.

    Verifying the k likeliest nodes of all rows brings the sum of their probabilities, in tokens, and lengthens the
    round by a time that is worth `rate` tokens a second, the batch's mean rate (Dinkelbach 1967: always choosing so
    gives the largest rate). A node is at most as likely as its parent, so the k likeliest nodes are trees.

    fixed   tokens that run in any case, without roots; widest: nodes of the widest row among those."""
    likely = np.concatenate([np.sort(draft)[::-1] for draft in drafts])
    places = np.concatenate([np.arange(1, len(draft) + 1) for draft in drafts])
    order = np.argsort(-likely, kind="stable")
    likely, places = likely[order], np.maximum.accumulate(places[order])
    begin = min(rows + fixed, MOST)
    likely = likely[: MOST - begin]
    count = len(likely)
    longer = times.of(rows)[begin : begin + count + 1]
    extra = longer[1:] - longer[0]
    if times.pad:
        extra = extra + times.pad * rows * np.maximum(places[:count] + 1 - widest, 0)
    if widest <= 1:
        extra = extra + times.uneven * rows
    gains = likely.cumsum() - rate * extra
    best = int(gains.argmax()) if count else -1
    taken = best + 1 if best >= 0 and gains[best] > 0 else 0
    price = rate * (times.slope(rows, begin + taken) + times.pad)
    return float(likely[best]) if taken else 2.0, price


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
