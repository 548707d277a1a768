"""What counts prove: chi-square tests, their power, and how many samples a shift of a given size takes.

    p = tail(chi_square(counts, law), df)
    samples(df, shift=0.02, level=3.5e-4)     # so that a shift of 2 % of the probability is found with 95 %

A shift is a total variation: the share of the probability that lies on other outcomes than it should. By the
inequality of Cauchy and Schwarz, any shift of `d` between the outcomes counted gives the chi-square statistic of n
samples a noncentrality of at least 4 n d^2. So the power stated here holds for every shift of that size, whichever
outcomes it moves (up to the chi-square approximation, which counts of 5 or more an outcome make good).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, lgamma, log
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.certify.engines import UnderTest
from paceline.certify.reference import Model
from paceline.engine.sampling import SamplingParams, probabilities

POWER = 0.95
"""With this probability a shift of the stated size is found."""
ENOUGH = 5.0
"""Smallest expected count of an outcome."""

Floats = NDArray[np.float64]


def chi_square(counts: Floats, law: Floats) -> float:
    """Pearson's statistic of `counts` [B] against probabilities `law` [B]; infinite where the impossible happened."""
    expected = law * counts.sum()
    if counts[law == 0].any():
        return inf
    there = expected > 0
    return float((((counts - expected) ** 2)[there] / expected[there]).sum())


def chi_square_of_two(counts: Floats, others: Floats) -> float:
    """The statistic of two samples [B] of one law, whatever it is; its degrees of freedom are those of one sample."""
    total = counts + others
    there = total > 0
    n, m = counts.sum(), others.sum()
    return float((((counts * np.sqrt(m / n) - others * np.sqrt(n / m)) ** 2)[there] / total[there]).sum())


def tail(statistic: float, df: int) -> float:
    """The probability that chance alone gives a chi-square statistic this large: the p-value."""
    if statistic == inf:
        return 0.0
    if df == 0:
        return 1.0
    return float(torch.special.gammaincc(_double(df / 2), _double(statistic / 2)))


def tail_of_shifted(statistic: float, df: int, noncentrality: float) -> float:
    """The same of the noncentral chi-square distribution: a mixture of central ones by Poisson weights."""
    half = noncentrality / 2
    middle, width = int(half), int(10 * half**0.5 + 20)
    terms = range(max(0, middle - width), middle + width)
    weights = [exp(-half + j * log(half) - lgamma(j + 1)) if half > 0 else float(j == 0) for j in terms]
    return min(1.0, sum(w * tail(statistic, df + 2 * j) for j, w in zip(terms, weights, strict=True)))


def critical(df: int, level: float) -> float:
    """The statistic that chance exceeds with probability `level`."""
    return _solve(lambda x: tail(x, df) < level)


def power(count: int, df: int, shift: float, level: float, *, samples: int = 1) -> float:
    """The probability of finding a shift in `count` samples at `level`. samples: 2 where the law is known by another
    `count` samples alone, which halves the noncentrality."""
    return tail_of_shifted(critical(df, level), df, 4 * count * shift**2 / samples)


def samples(df: int, shift: float, level: float, *, samples: int = 1) -> int:
    """The number of samples that find `shift` with probability POWER."""
    bound = critical(df, level)
    needed = _solve(lambda x: tail_of_shifted(bound, df, x) >= POWER)
    return int(np.ceil(samples * needed / (4 * shift**2)))


def detectable(count: int, df: int, level: float, *, samples: int = 1) -> float:
    """The smallest shift that `count` samples find with probability POWER; 1 where they find none."""
    if count == 0:
        return 1.0
    bound = critical(df, level)
    needed = _solve(lambda x: tail_of_shifted(bound, df, x) >= POWER)
    return min(1.0, float(np.sqrt(samples * needed / (4 * count))))


def total_variation(counts: Floats, law: Floats) -> float:
    """Half the sum of differences between shares and probabilities."""
    return float(np.abs(counts / counts.sum() - law).sum() / 2) if counts.sum() else 0.0


def noise(law: Floats, count: int) -> float:
    """The total variation that chance alone gives `count` samples on average (each share is nearly normal)."""
    return float(np.sqrt(2 * law * (1 - law) / (np.pi * max(count, 1))).sum() / 2)


def pooled(law: Floats, least: float) -> NDArray[np.int64]:
    """The bin of every outcome [N]: the rarest are put together until each bin has a probability of `least`."""
    bins = np.zeros(len(law), np.int64)
    held, bin = 0.0, 0
    for i in np.argsort(law, kind="stable"):
        if held >= least:
            held, bin = 0.0, bin + 1
        bins[i] = bin
        held += law[i]
    if held < least and bin > 0:
        bins[bins == bin] = bin - 1
    return bins


def bins_of(law: Floats, bins: NDArray[np.int64]) -> Floats:
    """Sums of `law` [N], or of counts, by bin."""
    return np.bincount(bins, law).astype(np.float64)


def worst(p_values: Sequence[float]) -> float:
    """The smallest of several p-values, corrected for their number (Bonferroni)."""
    return min(1.0, min(p_values, default=1.0) * max(len(p_values), 1))


def _solve(reached: Callable[[float], bool]) -> float:
    """The least x above 0 for which `reached`, which stays true from there on."""
    high = 1.0
    while not reached(high):
        high *= 2
    low = 0.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _double(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


# The exact law of an answer's first tokens: outcomes with their probabilities, worked out from the model alone.

FOLLOWED, NAMED = 0.01, 0.002
"""Prefixes of at least this probability are followed to their next tokens; tokens of less have no outcome of their own.
Both as shares of all answers."""
FINE, LEAST = 0.01, 0.08
"""Least probability of a bin, and of a coarse one."""

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Law:
    """bin_of: each outcome's bin; probs: of each bin, float64 [B], summing to 1; coarse: each bin's coarse one, [B]."""

    bin_of: dict[Prefix, int]
    probs: Floats
    coarse: NDArray[np.int64]
    length: int

    @property
    def coarse_probs(self) -> Floats:
        """Probabilities of the coarse bins."""
        return bins_of(self.probs, self.coarse)

    @property
    def df(self) -> int:
        """Degrees of freedom of a test of the coarse bins."""
        return int(self.coarse.max())

    def count(self, answers: Sequence[Sequence[int]]) -> Floats:
        """How many answers fell into each bin, [B]."""
        counts = np.zeros(len(self.probs))
        for answer in answers:
            prefix = tuple(answer[: self.length])
            while prefix not in self.bin_of:
                prefix = prefix[:-1]
            counts[self.bin_of[prefix]] += 1
        return counts


def law_of(model: Model, prompt: Sequence[int], params: SamplingParams, length: int) -> Law:
    """The law of the first `length` tokens after `prompt`, sampled by `params` (which end no answer that soon)."""
    probability: dict[Prefix, float] = {(): 1.0}
    level: list[Prefix] = [()]
    for _ in range(length):
        below: list[Prefix] = []
        for prefix, law in zip(level, _next(model, prompt, level, params), strict=True):
            here = probability[prefix] * law
            named = np.flatnonzero(here >= NAMED)
            probability[prefix] = max(0.0, float(here.sum() - here[named].sum()))
            for token in named.tolist():
                probability[*prefix, token] = float(here[token])
                below.append((*prefix, token))
        level = [prefix for prefix in below if probability[prefix] >= FOLLOWED]
        if not level:
            break
    outcomes = list(probability)
    probs = np.array(list(probability.values()))
    probs /= probs.sum()
    probs[probs < 1e-12] = 0.0  # what rounding leaves of prefixes whose tokens all have outcomes of their own
    bins = pooled(probs, FINE)
    fine = bins_of(probs, bins)
    return Law(dict(zip(outcomes, bins.tolist(), strict=True)), fine, pooled(fine, LEAST), length)


def _next(model: Model, prompt: Sequence[int], prefixes: Sequence[Prefix], params: SamplingParams) -> Sequence[Floats]:
    """The law of the token after each prefix, float64 [V] each."""
    texts = [[*prompt, *prefix] for prefix in prefixes]
    logits = model.after(texts).double()
    laws = [probabilities(row.unsqueeze(0), params, [np.array(text)]) for row, text in zip(logits, texts, strict=True)]
    return [law[0].numpy() for law in laws]


# Sampled answers: the law of their first tokens against the model's own, by chi-square, over many short requests.

LEVEL = 1e-3
"""The share of certificates in which a lossless engine is accused all the same."""
LOOKS = ((1 / 16, 0.1), (1 / 4, 0.2), (1.0, 0.7))
"""(share of the requests, share of LEVEL)."""
ENOUGH_FINE = 10.0
"""Smallest expected count of a fine bin: with fewer, chance exceeds the small levels here more often than it should."""
AT_ONCE = 512
"""Requests handed over together."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Case:
    """A prompt, how it is sampled, and the law of its first tokens."""

    name: str
    prompt: list[int]
    wish: SamplingParams
    law: Law


@dataclass
class Sampled:
    """counts: of each case, [B]; p: the smallest p-value of a look, of the sum and of the worst case."""

    cases: list[Case]
    counts: list[Floats]
    planned: int
    lossless: bool = True
    p: float = 1.0
    p_worst: float = 1.0
    looks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return int(sum(counts.sum() for counts in self.counts))

    @property
    def df(self) -> int:
        return sum(case.law.df for case in self.cases)

    def facts(self) -> dict[str, Any]:
        """For the certificate."""
        cases = [_case(case, counts) for case, counts in zip(self.cases, self.counts, strict=True)]
        worst = max(cases, key=lambda one: one["tv"] / max(one["tv_by_chance"], 1e-9), default=None)
        return {
            "lossless": self.lossless,
            "requests": self.requests,
            "p": self.p,
            "p_of_worst_case": self.p_worst,
            "looks": self.looks,
            "tv": worst["tv"] if worst else 0.0,
            "tv_by_chance": worst["tv_by_chance"] if worst else 0.0,
            "cases": cases,
        }


View = tuple[Floats, Floats]
"""Counts and probabilities of bins."""


def _views(case: Case, counts: Floats) -> list[View]:
    """The coarse bins, and the fine ones where there are counts enough for them."""
    law = case.law
    views = [(bins_of(counts, law.coarse), law.coarse_probs)]
    if counts.sum() * law.probs.min() >= ENOUGH_FINE:
        views.append((counts, law.probs))
    return views


def _p(view: View) -> float:
    return tail(chi_square(*view), len(view[1]) - 1)


def _case(case: Case, counts: Floats) -> dict[str, Any]:
    """What the view says that shows most."""
    number = int(counts.sum())
    seen, law = min(_views(case, counts), key=_p)
    return {
        "name": case.name,
        "requests": number,
        "outcomes": len(law),
        "tv": round(total_variation(seen, law), 5),
        "tv_by_chance": round(noise(law, number), 5),
        "p": _p((seen, law)),
    }


def needed(cases: Sequence[Case], shift: float) -> int:
    """The number of requests that find a shift of this size in all cases, rounded up to whole ones for each case."""
    total = samples(sum(case.law.df for case in cases), shift, _level(-1))
    least = max(int(np.ceil(ENOUGH / case.law.coarse_probs.min())) for case in cases)
    return len(cases) * max(-(-total // len(cases)), least)


def power_of(sampled: Sampled, shift: float) -> dict[str, Any]:
    """What could have been found: the probability of finding `shift`, the smallest shift found with POWER, and the
    smallest in one case alone."""
    level, count = _level(-1), sampled.planned
    alone = max((case.law.df for case in sampled.cases), default=1)
    each = level / max(len(sampled.cases), 1)
    return {
        "shift": shift,
        "power": round(power(count, sampled.df, shift, level), 4) if sampled.df else 0.0,
        "detectable": round(detectable(count, sampled.df, level), 4) if sampled.df else 1.0,
        "detectable_in_one_case": round(detectable(count // max(len(sampled.cases), 1), alone, each), 4),
        "level": LEVEL,
        "tokens": max((case.law.length for case in sampled.cases), default=0),
    }


def _level(look: int) -> float:
    """Of one of the four tests of a look."""
    return LEVEL * LOOKS[look][1] / 4


def sample(
    engine: UnderTest,
    cases: Sequence[Case],
    requests: int,
    rng: np.random.Generator,
    progress: Progress = lambda done, of: None,
) -> Sampled:
    """Ask, count, and test; stops at the first look that finds something."""
    sampled = Sampled(list(cases), [np.zeros(len(case.law.probs)) for case in cases], requests)
    for look, (share, _) in enumerate(LOOKS):
        until = int(np.ceil(requests * share))
        while sampled.requests < until:
            _ask(engine, sampled, min(AT_ONCE, until - sampled.requests), rng)
            progress(sampled.requests, requests)
        if _look(sampled, look):
            break
    return sampled


def _ask(engine: UnderTest, sampled: Sampled, number: int, rng: np.random.Generator) -> None:
    begin = sampled.requests
    chosen = rng.permutation((begin + np.arange(number)) % len(sampled.cases))
    seeds = rng.integers(1 << 31, size=number).tolist()
    cases = [sampled.cases[i] for i in chosen]
    wishes = [replace(case.wish, seed=seed) for case, seed in zip(cases, seeds, strict=True)]
    said = engine.answer([case.prompt for case in cases], wishes)
    for i, one in zip(chosen, said, strict=True):
        sampled.counts[i] += sampled.cases[i].law.count([one.tokens])


def _look(sampled: Sampled, look: int) -> bool:
    """Test what there is so far; True if it shows that the engine is not lossless."""
    views = [_views(case, counts) for case, counts in zip(sampled.cases, sampled.counts, strict=True)]
    p = p_worst = 1.0
    for resolution in range(min(map(len, views), default=0)):
        of_it = [of_case[resolution] for of_case in views]
        statistic = sum(chi_square(*view) for view in of_it)
        p = min(p, tail(statistic, sum(len(law) - 1 for _, law in of_it)))
        p_worst = min(p_worst, worst([_p(view) for view in of_it]))
    sampled.looks.append({"requests": sampled.requests, "p": p, "p_of_worst_case": p_worst, "level": _level(look)})
    sampled.p, sampled.p_worst = min(sampled.p, p), min(sampled.p_worst, p_worst)
    sampled.lossless = min(p, p_worst) >= _level(look)
    return not sampled.lossless
