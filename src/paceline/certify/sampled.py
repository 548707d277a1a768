"""Sampled answers: the law of their first tokens against the model's own, by chi-square, over many short requests.

    sampled = sample(engine, cases, requests=40_000, rng=rng)

Requests of all cases are shuffled, so that every batch is another mixture of prompts, temperatures and filters, and
every request has a seed of its own. The test looks three times, after a sixteenth, a quarter and all of the requests,
so that a gross error is found soon. The level is shared out between the looks (`LOOKS`), and each look's between four
tests: the sum of all cases' statistics and the worst case alone (Bonferroni), each over coarse and over fine bins.
Together a lossless engine is accused in LEVEL of all certificates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paceline.certify import chance
from paceline.certify.engines import UnderTest
from paceline.certify.law import Law
from paceline.sampling import SamplingParams

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
    counts: list[chance.Floats]
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


View = tuple[chance.Floats, chance.Floats]
"""Counts and probabilities of bins."""


def _views(case: Case, counts: chance.Floats) -> list[View]:
    """The coarse bins, and the fine ones where there are counts enough for them."""
    law = case.law
    views = [(chance.bins_of(counts, law.coarse), law.coarse_probs)]
    if counts.sum() * law.probs.min() >= ENOUGH_FINE:
        views.append((counts, law.probs))
    return views


def _p(view: View) -> float:
    return chance.tail(chance.chi_square(*view), len(view[1]) - 1)


def _case(case: Case, counts: chance.Floats) -> dict[str, Any]:
    """What the view says that shows most."""
    number = int(counts.sum())
    seen, law = min(_views(case, counts), key=_p)
    return {
        "name": case.name,
        "requests": number,
        "outcomes": len(law),
        "tv": round(chance.total_variation(seen, law), 5),
        "tv_by_chance": round(chance.noise(law, number), 5),
        "p": _p((seen, law)),
    }


def needed(cases: Sequence[Case], shift: float) -> int:
    """The number of requests that find a shift of this size in all cases, rounded up to whole ones for each case."""
    total = chance.samples(sum(case.law.df for case in cases), shift, _level(-1))
    least = max(int(np.ceil(chance.ENOUGH / case.law.coarse_probs.min())) for case in cases)
    return len(cases) * max(-(-total // len(cases)), least)


def power_of(sampled: Sampled, shift: float) -> dict[str, Any]:
    """What could have been found: the probability of finding `shift`, the smallest shift found with POWER, and the
    smallest in one case alone."""
    level, count = _level(-1), sampled.planned
    alone = max((case.law.df for case in sampled.cases), default=1)
    each = level / max(len(sampled.cases), 1)
    return {
        "shift": shift,
        "power": round(chance.power(count, sampled.df, shift, level), 4) if sampled.df else 0.0,
        "detectable": round(chance.detectable(count, sampled.df, level), 4) if sampled.df else 1.0,
        "detectable_in_one_case": round(chance.detectable(count // max(len(sampled.cases), 1), alone, each), 4),
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
        statistic = sum(chance.chi_square(*view) for view in of_it)
        p = min(p, chance.tail(statistic, sum(len(law) - 1 for _, law in of_it)))
        p_worst = min(p_worst, chance.worst([_p(view) for view in of_it]))
    sampled.looks.append({"requests": sampled.requests, "p": p, "p_of_worst_case": p_worst, "level": _level(look)})
    sampled.p, sampled.p_worst = min(sampled.p, p), min(sampled.p_worst, p_worst)
    sampled.lossless = min(p, p_worst) >= _level(look)
    return not sampled.lossless
