"""Stop rules: when a drafter that has a model stops drafting. Any rule works with any such drafter.

    rule = RULES["svip"](cap=40)
    signals = rule.signals(logits)                 # one number for each row's next-token distribution
    rule.stop(row.id, 3, signals[0])               # whether the third drafted token is the last

A rule sees the distribution that a token was drawn from, never the token: if the token could end the draft, drafts
would not be distributed as q, and the output would not be the target's. A rule may also use the outcomes and the times
of earlier rounds. The token at which a rule stops stays in the draft, so at least one is drafted (SVIP, section 3;
Kangaroo). Every rule stops on NaN."""

from bisect import bisect_right
from collections.abc import Sequence
from math import sqrt
from statistics import fmean
from typing import Literal, NamedTuple

import torch

from paceline.core.logits import certainty_of_row
from paceline.core.sampling import is_compiled
from paceline.draft.cost import DraftTimes, Rate, RoundTimes
from paceline.errors import MethodError

Name = Literal["fixed", "confidence", "svip", "heuristic", "adaptive"]


class Outcome(NamedTuple):
    """The result of a row's draft: the number of drafted tokens (of a tree: its depth), and of accepted ones."""

    row: int
    drafted: int
    accepted: int


class StopRule:
    """The interface. A round calls `begin`; for every drafted token `signals`, `stop` for every row, and `stepped`; at
    its end `learn`.

    cap     most tokens in a draft. threshold: see the rule.
    bounds  smallest and largest threshold; two equal numbers: the rule has none."""

    cap = 5
    threshold = 0.0
    bounds = (0.0, 0.0)

    def __init__(self, cap: int | None = None, threshold: float | None = None):
        self.cap = type(self).cap if cap is None else cap
        low, high = self.bounds
        if threshold is not None and low == high:
            raise MethodError(f"the stop rule {type(self).__name__.lower()} has no threshold; leave it out")
        if threshold is not None and not low <= threshold <= high:
            raise MethodError(f"threshold is {threshold:g}; for this stop rule it is between {low:g} and {high:g}")
        self.threshold = type(self).threshold if threshold is None else threshold

    def begin(self, rows: Sequence[int]) -> None:
        """A round begins, in which these rows may get drafts."""

    def most(self, row: int) -> int:
        """Most tokens to draft for a row now; 0: none."""
        return self.cap

    def signals(self, logits: torch.Tensor) -> list[float]:
        """The number by which `stop` decides, for each row still drafting: logits [R, K] to R numbers."""
        return [0.0] * len(logits)

    def stop(self, row: int, drafted: int, signal: float) -> bool:
        """Whether the `drafted`th token (from 1), whose distribution had `signal`, is the last."""
        return False

    def stepped(self, seconds: float) -> None:
        """A token was drafted for each row still drafting; together they took `seconds`."""

    def learn(self, outcomes: Sequence[Outcome], seconds: float | None) -> None:
        """Learn from the round. seconds: its time without drafting; None if the round did other work too."""

    def drop(self, row: int) -> None:
        """A row has ended."""


class Fixed(StopRule):
    """Drafts `cap` tokens; 5 is the papers' baseline."""


class Confidence(StopRule):
    """Stops if the best token's probability is below `threshold` (Kangaroo, Liu et al. 2024, 3.2: 0.6, at most 6)."""

    cap, threshold, bounds = 6, 0.6, (0.0, 1.0)

    def signals(self, logits: torch.Tensor) -> list[float]:
        return best_probabilities(logits)

    def stop(self, row: int, drafted: int, signal: float) -> bool:
        return not signal >= self.threshold


class Svip(StopRule):
    """Stops after a token if sqrt(0.15 H) is above `threshold`, H the entropy in nats at temperature 1 (SVIP, Zhang et
    al. 2025, section 3: 0.3, that is 0.6 nats, at most 40 tokens).

    sqrt(0.15 H) estimates the distance between draft and target, which bounds 1 - acceptance."""

    cap, threshold, bounds = 40, 0.3, (0.0, 10.0)
    SLOPE = 0.15

    def signals(self, logits: torch.Tensor) -> list[float]:
        return [sqrt(self.SLOPE * entropy) for entropy in entropies(logits)]

    def stop(self, row: int, drafted: int, signal: float) -> bool:
        return not signal <= self.threshold


class Heuristic(StopRule):
    """Drafts 5 tokens, then two more after a draft that was accepted whole, else one less (transformers' schedule)."""

    cap = 40
    FIRST, MORE, LESS = 5, 2, 1

    def __init__(self, cap: int | None = None, threshold: float | None = None):
        super().__init__(cap, threshold)
        self._length: dict[int, int] = {}

    def most(self, row: int) -> int:
        return min(self._length.get(row, self.FIRST), self.cap)

    def learn(self, outcomes: Sequence[Outcome], seconds: float | None) -> None:
        for row, drafted, accepted in outcomes:
            length = self._length.get(row, self.FIRST)
            if drafted:
                more, less = min(length + self.MORE, self.cap), max(length - self.LESS, 1)
                self._length[row] = more if accepted == drafted else less

    def drop(self, row: int) -> None:
        self._length.pop(row, None)


class Adaptive(StopRule):
    """Stops where one more token would bring less than it costs; drafts nothing while plain decoding is faster.

    After token j another is drafted while

        P(tokens 1..j are accepted) * P(the next one is too)  >=  rate * (step / rows drafting + node)

    The left side is the expected number of tokens that another one brings; the right side, the number of tokens that
    decoding brings in the time of drafting and verifying it. That is optimal if acceptance probabilities only fall (the
    monotone case of optimal stopping). They are learned from earlier rounds, for each range of the best token's
    probability, with a Beta prior. The rate is tokens over time of the rounds so far, so that rule and rate converge
    together (Dinkelbach 1967). `draft.cost` learns the times. Some rounds try the other: plain decoding, or a draft."""

    cap = 40
    FIRST = 5
    """Tokens in a draft while no costs are known."""
    EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)
    MIDDLES = (0.05, 0.15, 0.28, 0.42, 0.58, 0.72, 0.85, 0.93, 0.97, 0.99, 1.0)
    """Between the edges: ranges of the best token's probability. Middles: the prior of acceptance in each range."""
    WAIT, PATIENCE, LOOK = 4, 128, 4
    """Rounds before the first trial of the alternative; most rounds between two; rounds of a trial of drafting."""
    BETTER = 1.02
    """The alternative becomes the choice if it is this many times as fast: clocks are noisy."""

    def __init__(self, cap: int | None = None, threshold: float | None = None):
        super().__init__(cap, threshold)
        self._accepted = [Share(middle) for middle in self.MIDDLES]
        self._next = [Share(0.7) for _ in self.MIDDLES]
        self._first = Share(0.7)
        self._times, self._step = RoundTimes(), DraftTimes()
        self._drafting, self._plain = Rate(), Rate()
        self._bins: dict[int, list[int]] = {}
        self._chance: dict[int, float] = {}
        self._rows = self._active = 0
        self._steps: list[tuple[int, float]] = []  # of this round: rows that drafted a token, and its seconds
        self._drafts, self._wait, self._left = True, self.WAIT, self.WAIT

    def begin(self, rows: Sequence[int]) -> None:
        self._bins = {row: [] for row in rows}
        self._chance = dict.fromkeys(rows, 1.0)
        self._rows, self._active, self._steps = len(rows), len(rows), []

    def most(self, row: int) -> int:
        tries = self._left <= 0  # whether this round tries the alternative
        return self.cap if self._drafts != tries else 0

    def signals(self, logits: torch.Tensor) -> list[float]:
        self._active = len(logits)
        return best_probabilities(logits)

    def stop(self, row: int, drafted: int, signal: float) -> bool:
        if not signal >= 0:
            return True
        bin = bisect_right(self.EDGES, signal)
        self._bins[row].append(bin)
        self._chance[row] *= self._accepted[bin].value
        if not self._drafting.value:
            return drafted >= self.FIRST
        self._next[bin].prior = self._first.value
        gain = self._chance[row] * self._next[bin].value
        rate = max(self._drafting.value, self._plain.value)
        node = self._times.slope(self._rows, self._rows + self._active * drafted) + self._times.pad
        return gain < rate * self._rows * (self._step.seconds(self._active) / self._active + node)

    def stepped(self, seconds: float) -> None:
        self._steps.append((self._active, seconds))

    def learn(self, outcomes: Sequence[Outcome], seconds: float | None) -> None:
        for row, drafted, accepted in outcomes:
            self._note(self._bins.get(row, ()), drafted, accepted)
        if seconds is not None and outcomes:
            sizes = [1 + outcome.drafted for outcome in outcomes]
            shape = len(outcomes), sum(sizes), max(sizes), 0
            self._times.note(*shape, seconds)
            for active, of_step in self._steps:
                self._step.note(active, 1, of_step)
            drafting = sum(self._step.seconds(active) for active, _ in self._steps)
            rate = self._drafting if self._steps else self._plain
            tokens = 1 + fmean(outcome.accepted for outcome in outcomes)
            rate.note(tokens, self._times.usual(*shape, seconds) + drafting)
            self._choose()

    def _note(self, bins: Sequence[int], drafted: int, accepted: int) -> None:
        """Count a draft's tokens up to the first rejected one; those after it were not decided."""
        if drafted:
            self._first.note(accepted > 0)
        for before, bin in enumerate(bins[: min(accepted + 1, drafted)]):
            is_accepted = accepted > before
            self._accepted[bin].note(is_accepted)
            if is_accepted and drafted > before + 1:
                self._next[bin].note(accepted > before + 1)

    def _choose(self) -> None:
        """After a round, choose whether to draft. After a trial that changes nothing, wait twice as long."""
        self._left -= 1
        tried = self._left < (0 if self._drafts else -self.LOOK + 1)
        rates = self._drafting.value, self._plain.value
        current, other = rates if self._drafts else reversed(rates)
        if other > current * self.BETTER:
            self._drafts, self._wait = not self._drafts, self.WAIT
        elif tried:
            self._wait = min(2 * self._wait, self.PATIENCE)
        else:
            return
        self._left = self._wait


class Share:
    """A probability, learned from recent trials: the mean of a Beta distribution that begins at `prior`."""

    STRENGTH, MEMORY = 8.0, 400.0

    def __init__(self, prior: float):
        self.prior = prior
        self._hits = self._trials = 0.0

    def note(self, hit: bool) -> None:
        """Count a trial; old ones count less."""
        if self._trials >= self.MEMORY:
            self._hits, self._trials = self._hits / 2, self._trials / 2
        self._hits, self._trials = self._hits + hit, self._trials + 1

    @property
    def value(self) -> float:
        """The mean."""
        return (self._hits + self.STRENGTH * self.prior) / (self._trials + self.STRENGTH)


RULES: dict[str, type[StopRule]] = {
    rule.__name__.lower(): rule for rule in (Fixed, Confidence, Svip, Heuristic, Adaptive)
}


def best_probabilities(logits: torch.Tensor) -> list[float]:
    """Probability of the best token at temperature 1: logits [R, K] to R numbers; NaN where logits are."""
    if is_compiled(logits):
        return [certainty_of_row(logits, r)[1] for r in range(len(logits))]
    best: list[float] = logits.float().softmax(-1).amax(-1).tolist()
    return best


def entropies(logits: torch.Tensor) -> list[float]:
    """Entropy in nats at temperature 1: logits [R, K] to R numbers, never negative; NaN where logits are."""
    if is_compiled(logits):
        return [certainty_of_row(logits, r)[0] for r in range(len(logits))]
    entropy: list[float] = torch.special.entr(logits.float().softmax(-1)).sum(-1).tolist()
    return entropy
