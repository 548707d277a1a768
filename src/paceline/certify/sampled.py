"""Sampled answers: the distribution of their first tokens, all together, against the model's own, by chi-square.

The distribution is worked out from the model alone, in every world that rounding may make of it: outcomes are prefixes
with their probabilities, the rare ones put together in bins. Many short requests are asked, and the counts are looked
at three times, so that a broken engine is found early."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.certify import stats, verdict
from paceline.certify.engines import answers
from paceline.certify.options import Scope
from paceline.certify.stats import Floats
from paceline.certify.verdict import LEVEL, Look
from paceline.core.sampling import SamplingParams
from paceline.workbench.endpoint import Endpoint
from paceline.workbench.reference import Rounding, distributions

FOLLOWED, NAMED = 0.01, 0.002
"""A prefix at least as probable as FOLLOWED is continued by its next tokens, and a token at least as probable as NAMED
has an outcome of its own. Both are shares of all answers."""
FINE, COARSE = 0.01, 0.08  # least probability of a bin, and of a coarse one
LOOKS = ((1 / 16, 0.1), (1 / 4, 0.2), (1.0, 0.4))
"""(share of the requests, share of LEVEL); the rest of LEVEL is for longer answers and for ties."""
LEAST_FINE = 10.0
"""Smallest expected count of a fine bin: with fewer, chance exceeds the small levels here more often than it should."""
AT_ONCE = 512  # requests handed to the engine together

Prefix = tuple[int, ...]
Progress = Callable[[int, int], None]
View = tuple[Floats, Floats]  # counts [B] of bins, and their probabilities in every world, [W, B]


@dataclass(frozen=True)
class Distribution:
    """bin_of: each outcome's bin; worlds: probabilities of the bins in every world, float64 [W, B], the model's own
    first; coarse: each bin's coarse one, [B]."""

    bin_of: dict[Prefix, int]
    worlds: Floats
    coarse: NDArray[np.int64]
    length: int

    @property
    def probs(self) -> Floats:
        """The model's own probabilities of the bins, [B]."""
        return self.worlds[0]

    @property
    def coarse_worlds(self) -> Floats:
        return stats.by_bin(self.worlds, self.coarse)

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


def distribution_of(rounding: Rounding, prompt: Sequence[int], params: SamplingParams, length: int) -> Distribution:
    """That of the first `length` tokens after `prompt`, sampled by `params` (which end no answer that soon)."""
    probability: dict[Prefix, Floats] = {(): np.ones(1)}
    level: list[Prefix] = [()]
    for _ in range(length):
        below: list[Prefix] = []
        for prefix, following in zip(level, _next(rounding, prompt, level, params), strict=True):
            here = probability[prefix][:, None] * following
            named = np.flatnonzero(here[0] >= NAMED)
            probability[prefix] = np.maximum(0.0, here.sum(1) - here[:, named].sum(1))
            for token in named.tolist():
                probability[*prefix, token] = here[:, token]
                below.append((*prefix, token))
        level = [prefix for prefix in below if probability[prefix][0] >= FOLLOWED]
        if not level:
            break
    worlds = np.stack(list(probability.values()), 1)
    worlds /= worlds.sum(1, keepdims=True)
    worlds[worlds < 1e-12] = 0.0  # what rounding leaves of prefixes whose tokens all have outcomes of their own
    bins = stats.pooled(worlds[0], FINE)
    fine = stats.by_bin(worlds, bins)
    return Distribution(dict(zip(probability, bins.tolist(), strict=True)), fine, stats.pooled(fine[0], COARSE), length)


def _next(rounding: Rounding, prompt: Sequence[int], prefixes: Sequence[Prefix], params: SamplingParams) -> Floats:
    """The distribution of the token after each prefix in every world, float64 [N, W, V]."""
    texts = [[*prompt, *prefix] for prefix in prefixes]
    exact, *moved = rounding.after(texts)
    return distributions([exact.double(), *moved], params, texts, len(prompt)).swapaxes(0, 1)


@dataclass(frozen=True)
class Case:
    """A prompt, how it is sampled, and the distribution of its first tokens."""

    name: str
    prompt: list[int]
    params: SamplingParams
    distribution: Distribution

    def new_counts(self) -> Floats:
        return np.zeros(len(self.distribution.probs))

    def views(self, counts: Floats) -> list[View]:
        """The coarse bins, and the fine ones where there are counts enough for them."""
        of = self.distribution
        views = [(stats.by_bin(counts, of.coarse), of.coarse_worlds)]
        if counts.sum() * of.probs.min() >= LEAST_FINE:
            views.append((counts, of.worlds))
        return views


@dataclass
class Sampled:
    """counts: of each case, [B]; planned: requests of the last look; looks: those taken so far; drafted: tokens
    of drafts, None where the engine does not say."""

    cases: list[Case]
    counts: list[Floats]
    planned: int
    looks: list[Look] = field(default_factory=list)
    drafted: int | None = None

    @property
    def requests(self) -> int:
        return int(sum(counts.sum() for counts in self.counts))

    @property
    def df(self) -> int:
        return sum(case.distribution.df for case in self.cases)

    def facts(self) -> dict[str, Any]:
        facts = verdict.sampled_facts(self.looks, list(map(_facts, self.cases, self.counts)))
        return facts | {"draft_tokens": self.drafted}

    def power(self, scope: Scope) -> dict[str, Any]:
        """What could have been found in all cases together, and the smallest shift found in one case alone."""
        level, number = level_of(-1), max(len(self.cases), 1)
        df = max((case.distribution.df for case in self.cases), default=1)
        radii = [stats.radius(case.distribution.coarse_worlds) for case in self.cases] or [0.0]
        alone = stats.detectable(self.planned / number, df, level / number, rounding=max(radii))
        samples = 1 if all(look.difference is None for look in self.looks) else 2
        rounding = float(np.sqrt(np.mean(np.square(radii))))
        power = verdict.power(scope, self.planned, self.df, level, samples=samples, rounding=rounding)
        return power | {"detectable_in_one_case": round(alone, 4)}


def needed(cases: Sequence[Case], shift: float) -> int:
    """The number of requests that find a shift of this size in all cases, rounded up to whole ones for each case."""
    total = stats.samples_for(sum(case.distribution.df for case in cases), shift, level_of(-1))
    return max(len(cases) * -(-total // len(cases)), least(cases))


def least(cases: Sequence[Case]) -> int:
    """The number of requests below which a chi-square test of all cases would not hold."""
    each = (stats.LEAST_COUNT / case.distribution.coarse_worlds[0].min() for case in cases)
    return len(cases) * int(np.ceil(max(each)))


def sample(
    engine: Endpoint, cases: Sequence[Case], requests: int, rng: np.random.Generator,
    progress: Progress = lambda done, of: None, control: Callable[[], Endpoint] | None = None, until: float = inf,
    latest: float = inf, size: int = AT_ONCE, stopped: Callable[[], bool] = lambda: False,
) -> Sampled:  # fmt: skip
    """Ask, count, and test; stops at the first look that finds something.

    until: when fewer requests are asked (perf_counter), as many as fit by the time that the first ones took, and as few
    as a test takes. latest: when those are not asked any more either, and there is no test.
    size: requests handed to the engine together; stopped: whether no more are to be asked.
    control: opens the engine without drafts; asked where the engine differs from the model. Then only that counts."""
    sampled = Sampled(list(cases), [case.new_counts() for case in cases], requests)
    few = min(requests, least(cases))

    def over() -> bool:
        return stopped() or perf_counter() > until

    if until < inf:
        began = perf_counter()
        _ask(engine, sampled, few, rng, progress, size, lambda: stopped() or perf_counter() > latest)
        now = perf_counter()
        requests = min(requests, few + max(0, int(few * (until - now) / (now - began))))
        sampled.planned = requests
    others = Sampled(list(cases), [case.new_counts() for case in cases], requests)
    for look, (share, _) in enumerate(LOOKS):
        _ask(engine, sampled, int(np.ceil(requests * share)), rng, progress, size, over)
        if is_last := over():
            sampled.planned = sampled.requests
            if sampled.requests < few:
                break
        found = Look(sampled.requests, *_p_values(sampled), level_of(look))
        if found.differs and control is not None:
            _ask(control(), others, sampled.requests, rng, progress)
            found = replace(found, difference=min(_p_values(sampled, others)))
        sampled.looks.append(found)
        if found.accuses or is_last:
            break
    return sampled


def _ask(
    engine: Endpoint, sampled: Sampled, until: int, rng: np.random.Generator, progress: Progress, size: int = AT_ONCE,
    over: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    while (begin := sampled.requests) < until and not over():
        number = min(size, until - begin)
        chosen = rng.permutation((begin + np.arange(number)) % len(sampled.cases))
        seeds = rng.integers(1 << 31, size=number).tolist()
        cases = [sampled.cases[i] for i in chosen]
        params = [replace(case.params, seed=seed) for case, seed in zip(cases, seeds, strict=True)]
        replies = answers(engine, [case.prompt for case in cases], params)
        for i, one in zip(chosen, replies, strict=True):
            sampled.counts[i][sampled.cases[i].distribution.bin(one.tokens)] += 1
            if (drafted := one.speculation.get("num_draft_tokens")) is not None:
                sampled.drafted = (sampled.drafted or 0) + drafted
        progress(begin + number, until)


def _p_values(sampled: Sampled, others: Sampled | None = None) -> tuple[float, float]:
    """Of the sum over all cases and of the worst case, in the coarse bins and, where all cases have counts enough, in
    the fine ones; others: of the difference from these, not from the model."""
    p = p_worst = 1.0
    counts = zip(sampled.counts, (others or sampled).counts, strict=True)
    both = [(case.views(mine), case.views(other)) for case, (mine, other) in zip(sampled.cases, counts, strict=True)]
    for size in range(min(len(views) for of in both for views in of)):
        views = [(mine[size], other[size][0]) for mine, other in both]
        statistics = [
            stats.chi_square(seen, worlds) if others is None
            else stats.chi_square_of_two(seen, other, stats.slack_of(worlds))
            for (seen, worlds), other in views
        ]  # fmt: skip
        degrees = [len(seen) - 1 for (seen, _), _ in views]
        p = min(p, stats.tail(sum(statistics), sum(degrees)))
        p_worst = min(p_worst, stats.worst(list(map(stats.tail, statistics, degrees))))
    return p, p_worst


def level_of(look: int) -> float:
    """Of one of the four tests of a look."""
    return LEVEL * LOOKS[look][1] / 4


def _p(view: View) -> float:
    return stats.tail(stats.chi_square(*view), len(view[0]) - 1)


def _facts(case: Case, counts: Floats) -> dict[str, Any]:
    """Of a case, in the view that shows most. rounding: the largest shift that a world has."""
    number = int(counts.sum())
    seen, worlds = min(case.views(counts), key=_p)
    return {
        "name": case.name,
        "requests": number,
        "outcomes": len(seen),
        "tv": round(stats.total_variation(seen, worlds[0]), 5),
        "tv_by_chance": round(stats.noise(worlds[0], number), 5),
        "rounding": round(max(float(abs(world - worlds[0]).sum() / 2) for world in worlds), 5),
        "p": _p((seen, worlds)),
    }
