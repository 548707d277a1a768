"""Sampled answers: the distribution of their first tokens, all together, against the model's own, by chi-square.

The exact distribution is worked out from the model alone: outcomes are prefixes with their probabilities, the rare ones
put together in bins. Many short requests are asked, and the counts are looked at three times, so that a broken engine
is found early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.certify import stats, verdict
from paceline.certify.engines import UnderTest
from paceline.certify.options import Scope
from paceline.certify.reference import Model
from paceline.certify.stats import Floats
from paceline.certify.verdict import LEVEL, Look
from paceline.engine.sampling import SamplingParams, probabilities

FOLLOWED, NAMED = 0.01, 0.002
"""A prefix at least as probable as FOLLOWED is continued by its next tokens, and a token at least as probable as NAMED
has an outcome of its own. Both are shares of all answers."""
FINE, COARSE = 0.01, 0.08
"""Least probability of a bin, and of a coarse one."""
LOOKS = ((1 / 16, 0.1), (1 / 4, 0.2), (1.0, 0.7))
"""(share of the requests, share of LEVEL)."""
LEAST_FINE = 10.0
"""Smallest expected count of a fine bin: with fewer, chance exceeds the small levels here more often than it should."""
AT_ONCE = 512
"""Requests handed to the engine together."""

Prefix = tuple[int, ...]
Progress = Callable[[int, int], None]
View = tuple[Floats, Floats]
"""Counts and probabilities of bins."""


@dataclass(frozen=True)
class Distribution:
    """bin_of: each outcome's bin; probs: of each bin, float64 [B], summing to 1; coarse: each bin's coarse one, [B]."""

    bin_of: dict[Prefix, int]
    probs: Floats
    coarse: NDArray[np.int64]
    length: int

    @property
    def coarse_probs(self) -> Floats:
        """Probabilities of the coarse bins."""
        return stats.by_bin(self.probs, self.coarse)

    @property
    def df(self) -> int:
        """Degrees of freedom of a test of the coarse bins."""
        return int(self.coarse.max())

    def bin(self, answer: Sequence[int]) -> int:
        """The bin of an answer: that of its longest prefix that is an outcome."""
        prefix = tuple(answer[: self.length])
        while prefix not in self.bin_of:
            prefix = prefix[:-1]
        return self.bin_of[prefix]


def distribution_of(model: Model, prompt: Sequence[int], params: SamplingParams, length: int) -> Distribution:
    """That of the first `length` tokens after `prompt`, sampled by `params` (which end no answer that soon)."""
    probability: dict[Prefix, float] = {(): 1.0}
    level: list[Prefix] = [()]
    for _ in range(length):
        below: list[Prefix] = []
        for prefix, following in zip(level, _next(model, prompt, level, params), strict=True):
            here = probability[prefix] * following
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
    bins = stats.pooled(probs, FINE)
    fine = stats.by_bin(probs, bins)
    return Distribution(dict(zip(outcomes, bins.tolist(), strict=True)), fine, stats.pooled(fine, COARSE), length)


def _next(model: Model, prompt: Sequence[int], prefixes: Sequence[Prefix], params: SamplingParams) -> list[Floats]:
    """The distribution of the token after each prefix, float64 [V] each."""
    texts = [[*prompt, *prefix] for prefix in prefixes]
    logits = model.after(texts).double()
    rows = zip(logits, texts, strict=True)
    return [probabilities(row.unsqueeze(0), params, [np.array(text)])[0].numpy() for row, text in rows]


@dataclass(frozen=True)
class Case:
    """A prompt, how it is sampled, and the distribution of its first tokens."""

    name: str
    prompt: list[int]
    params: SamplingParams
    distribution: Distribution


@dataclass
class Sampled:
    """counts: of each case, [B]; planned: requests of the last look; looks: those taken so far."""

    cases: list[Case]
    counts: list[Floats]
    planned: int
    looks: list[Look] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return int(sum(counts.sum() for counts in self.counts))

    @property
    def df(self) -> int:
        return sum(case.distribution.df for case in self.cases)

    def facts(self) -> dict[str, Any]:
        """For the certificate."""
        return verdict.sampled_facts(self.looks, list(map(_facts, self.cases, self.counts)))

    def power(self, scope: Scope) -> dict[str, Any]:
        """What could have been found in all cases together, and the smallest shift found in one case alone."""
        level, number = _level(-1), max(len(self.cases), 1)
        df = max((case.distribution.df for case in self.cases), default=1)
        alone = round(stats.detectable(self.planned // number, df, level / number), 4)
        return verdict.power(scope, self.planned, self.df, level) | {"detectable_in_one_case": alone}


def needed(cases: Sequence[Case], shift: float) -> int:
    """The number of requests that find a shift of this size in all cases, rounded up to whole ones for each case."""
    total = stats.samples_for(sum(case.distribution.df for case in cases), shift, _level(-1))
    least = max(int(np.ceil(stats.LEAST_COUNT / case.distribution.coarse_probs.min())) for case in cases)
    return len(cases) * max(-(-total // len(cases)), least)


def sample(
    engine: UnderTest,
    cases: Sequence[Case],
    requests: int,
    rng: np.random.Generator,
    progress: Progress = lambda done, of: None,
) -> Sampled:
    """Ask, count, and test; stops at the first look that finds something."""
    sampled = Sampled(list(cases), [np.zeros(len(case.distribution.probs)) for case in cases], requests)
    for look, (share, _) in enumerate(LOOKS):
        until = int(np.ceil(requests * share))
        while sampled.requests < until:
            _ask(engine, sampled, min(AT_ONCE, until - sampled.requests), rng)
            progress(sampled.requests, requests)
        sampled.looks.append(_look(sampled, look))
        if sampled.looks[-1].accuses:
            break
    return sampled


def _ask(engine: UnderTest, sampled: Sampled, number: int, rng: np.random.Generator) -> None:
    begin = sampled.requests
    chosen = rng.permutation((begin + np.arange(number)) % len(sampled.cases))
    seeds = rng.integers(1 << 31, size=number).tolist()
    cases = [sampled.cases[i] for i in chosen]
    params = [replace(case.params, seed=seed) for case, seed in zip(cases, seeds, strict=True)]
    replies = engine.answer([case.prompt for case in cases], params)
    for i, one in zip(chosen, replies, strict=True):
        sampled.counts[i][sampled.cases[i].distribution.bin(one.tokens)] += 1


def _look(sampled: Sampled, look: int) -> Look:
    """Test the counts so far, in the coarse bins and, where all cases have counts enough, in the fine ones."""
    p = p_worst = 1.0
    for views in zip(*map(_views, sampled.cases, sampled.counts), strict=False):
        statistic, df = sum(stats.chi_square(*view) for view in views), sum(len(probs) - 1 for _, probs in views)
        p = min(p, stats.tail(statistic, df))
        p_worst = min(p_worst, stats.worst(list(map(_p, views))))
    return Look(sampled.requests, p, p_worst, _level(look))


def _level(look: int) -> float:
    """Of one of the four tests of a look."""
    return LEVEL * LOOKS[look][1] / 4


def _views(case: Case, counts: Floats) -> list[View]:
    """The coarse bins, and the fine ones where there are counts enough for them."""
    of = case.distribution
    views = [(stats.by_bin(counts, of.coarse), of.coarse_probs)]
    if counts.sum() * of.probs.min() >= LEAST_FINE:
        views.append((counts, of.probs))
    return views


def _p(view: View) -> float:
    return stats.tail(stats.chi_square(*view), len(view[1]) - 1)


def _facts(case: Case, counts: Floats) -> dict[str, Any]:
    """Of a case, in the view that shows most."""
    number = int(counts.sum())
    seen, probs = min(_views(case, counts), key=_p)
    return {
        "name": case.name,
        "requests": number,
        "outcomes": len(probs),
        "tv": round(stats.total_variation(seen, probs), 5),
        "tv_by_chance": round(stats.noise(probs, number), 5),
        "p": _p((seen, probs)),
    }
