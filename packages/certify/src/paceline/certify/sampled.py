"""Test the distribution of the beginnings of sampled answers, all together, by chi-square.

If the model's logits are known, the distribution of the first tokens is worked out from the model alone, in every
world that rounding may make of it. Its outcomes are prefixes, and rare ones share bins. A server's logits are unknown,
so beginnings of its texts are compared with the control's. Many short requests are asked, and the counts are tested
three times, so that a broken engine is found early."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from time import perf_counter
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from paceline.certify import stats, verdict
from paceline.certify.options import Scope
from paceline.certify.stats import Floats
from paceline.certify.verdict import LEVEL, Look
from paceline.moved import aliases
from paceline.net.completion import Completion
from paceline.net.endpoint import Body, Endpoint
from paceline.runs.progress import Progress

FINE, COARSE = 0.01, 0.08  # Least probability of a fine bin, and of a coarse bin.
LOOKS = ((1 / 16, 0.1), (1 / 4, 0.2), (1.0, 0.4))
"""(share of the requests, share of LEVEL); the rest of LEVEL is for longer answers and for ties."""
LEAST_FINE = 10.0
"""Smallest expected count of a fine bin: with fewer, chance exceeds the small levels here more often than it should."""
AT_ONCE = 512  # Requests asked together if time has no limit.

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Distribution:
    """bin_of: the bin of each outcome; worlds: probabilities of the bins in every world, float64 [W, B], the model's
    own world first; coarse: the coarse bin of each bin, [B]."""

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


@dataclass(frozen=True)
class View:
    """A test of counts in bins: the statistic, its degrees of freedom, and what a certificate shows of it."""

    statistic: float
    df: int
    facts: dict[str, Any]

    @property
    def p(self) -> float:
        return stats.tail(self.statistic, self.df)


class KnownCase:
    """A request with the distribution of its answers, worked out from the model.

    name   how the request is sampled; body: it without its seed; requests: answers of the endpoint so far.
    least  fewest answers for which the test holds; radius: see `stats.radius`."""

    def __init__(self, name: str, body: Body, distribution: Distribution):
        self.name, self.body, self.distribution, self.requests = name, body, distribution, 0
        self.least, self.df = stats.LEAST_COUNT / distribution.coarse_worlds[0].min(), distribution.df
        self.radius = stats.radius(distribution.coarse_worlds)
        self.counts = [np.zeros(len(distribution.probs)) for _ in range(2)]

    def add(self, reply: Completion, side: int) -> None:
        """Count an answer; side: 0 the endpoint's, 1 its control's."""
        self.counts[side][self.distribution.bin(reply.tokens)] += 1
        self.requests += not side

    def views(self, compared: bool = False) -> list[View]:
        """The tests: in coarse bins, and in fine bins if counts are large enough.
        compared: with the control's counts."""
        of, number = self.distribution, min(one.sum() for one in self.counts[: 1 + compared])
        views = [_known([stats.by_bin(one, of.coarse) for one in self.counts], of.coarse_worlds, compared)]
        if number * of.probs.min() >= LEAST_FINE:
            views.append(_known(self.counts, of.worlds, compared))
        return views


def _known(counts: Sequence[Floats], worlds: Floats, compared: bool) -> View:
    """Test counts against the model or the control. worlds: probabilities of the bins, [W, B]. "rounding" in the facts:
    the largest shift of a world."""
    seen, df = counts[0], len(counts[0]) - 1
    if compared:
        statistic = stats.chi_square_of_two(seen, counts[1], stats.slack_of(worlds))
    else:
        statistic = stats.chi_square(seen, worlds)
    return View(statistic, df, {
        "outcomes": len(seen),
        "tv": round(stats.total_variation(seen, worlds[0]), 5),
        "tv_by_chance": round(stats.noise(worlds[0], int(seen.sum())), 5),
        "rounding": round(max(float(abs(world - worlds[0]).sum() / 2) for world in worlds), 5),
        "p": stats.tail(statistic, df),
    })  # fmt: skip


class TextCase:
    """A request whose answers are compared with the control's; has the members of KnownCase. slack: see
    `stats.chi_square_of_two`."""

    least = 8

    def __init__(self, name: str, body: Body, slack: SupportsFloat):
        self.name, self.body, self.slack, self.requests = name, body, slack, 0
        self.texts = list[str](), list[str]()

    @property
    def radius(self) -> float:
        return float(self.slack)

    @property
    def df(self) -> int:
        return best_view(self).df if self.requests else 0

    def add(self, reply: Completion, side: int) -> None:
        self.texts[side].append(reply.text)
        self.requests += not side

    def views(self, compared: bool = False) -> list[View]:
        return [_by_text(*self.texts, share, float(self.slack)) for share in (COARSE, FINE)]


def _by_text(mine: Sequence[str], others: Sequence[str], share: float, slack: float) -> View:
    """Compare two samples of texts. Outcomes are beginnings, which grow by a character while both samples together have
    enough of each: short if texts soon differ, long if most are alike."""
    least = max(2 * stats.LEAST_COUNT, share * (len(mine) + len(others)))
    bins: list[tuple[str, list[int]]] = []

    def split(prefix: str, members: list[tuple[str, int]]) -> None:
        """Add the bins of the texts that begin with `prefix`; members: (text, which sample)."""
        groups = defaultdict[str, list[tuple[str, int]]](list)
        for text, side in members:
            groups[text[len(prefix) : len(prefix) + 1]].append((text, side))
        large = [char for char, group in groups.items() if len(group) >= least]
        rare = [one for char, group in groups.items() if char not in large for one in group]
        if not large or large == [""] or (len(large) == 1 and rare and len(rare) < least):
            bins.append((prefix, [side for _, side in members]))
            return
        if rare and len(rare) < least:
            rare += groups[fewest := min(large, key=lambda char: len(groups[char]))]
            large.remove(fewest)
        if rare:
            bins.append((prefix + "...", [side for _, side in rare]))
        for char in large:
            if char:
                split(prefix + char, groups[char])
            else:
                bins.append((prefix, [side for _, side in groups[char]]))

    split("", [(text, 0) for text in mine] + [(text, 1) for text in others])
    counts = np.array([[sides.count(side) for _, sides in bins] for side in (0, 1)], float)
    statistic, df = stats.chi_square_of_two(counts[0], counts[1], slack), len(bins) - 1
    shares = counts / counts.sum(1, keepdims=True)
    return View(statistic, df, {
        "outcomes": len(bins),
        "df": df,
        "statistic": statistic,
        "p": stats.tail(statistic, df),
        "tv": round(stats.total_variation(counts[0], shares[1]), 5),
        "tv_by_chance": round(stats.noise(counts.sum(0) / counts.sum(), len(mine)) * 2**0.5, 5),
        "seen": [[prefix, *pair] for (prefix, _), *pair in zip(bins, *shares.round(4).tolist(), strict=True)],
    })  # fmt: skip


Case = KnownCase | TextCase


def best_view(case: Case) -> View:
    """The view with the smallest p-value."""
    return min(case.views(), key=lambda view: view.p)


@dataclass
class Sampled:
    """The test of all cases.

    slack    how far rounding moves log-probabilities; None if cases are judged by known distributions.
    planned  number of requests at the last look; looks: looks so far.
    drafted  number of drafted tokens, None if the endpoint does not report it."""

    cases: Sequence[Case] = ()
    slack: SupportsFloat | None = None
    planned: int = 0
    looks: list[Look] = field(default_factory=list)
    drafted: int | None = None

    @property
    def requests(self) -> int:
        return sum(case.requests for case in self.cases)

    @property
    def least(self) -> int:
        """The fewest requests for which a test of all cases holds."""
        return len(self.cases) * ceil(max(case.least for case in self.cases))

    def facts(self) -> dict[str, Any]:
        """For the certificate."""
        asked = [case for case in self.cases if case.requests or self.slack is None]
        cases = [{"name": one.name, "requests": one.requests, **best_view(one).facts} for one in asked]
        facts = verdict.sampled_facts(self.looks, cases)
        return facts | ({"draft_tokens": self.drafted} if self.slack is None else {})

    def count_drafts(self, replies: Sequence[Completion]) -> None:
        """Add the drafted tokens of the endpoint's answers."""
        counts = [n for one in replies if (n := one.speculation.get("num_draft_tokens")) is not None]
        self.drafted = (self.drafted or 0) + sum(counts) if counts else self.drafted

    def power(self, scope: Scope) -> dict[str, Any]:
        """Facts on what the test of all cases together could have found."""
        radii = [case.radius for case in self.cases] or [0.0 if self.slack is None else float(self.slack)]
        df, rounding = sum(case.df for case in self.cases), float(np.sqrt(np.mean(np.square(radii))))
        compared = self.slack is not None or any(look.difference is not None for look in self.looks)
        return verdict.power(scope, self.planned, df, level_of(-1), samples=1 + compared, rounding=rounding)

    def run(
        self, endpoint: Endpoint, requests: int, rng: np.random.Generator, watch: Progress = Progress(), *,
        control: Callable[[], Endpoint] | None = None, until: float = inf, latest: float = inf,
    ) -> None:  # fmt: skip
        """Ask, count and test. Stops at the first look that finds something.

        control  opens the same endpoint without drafts. Texts are always compared with its texts. Known distributions
                 are compared with it only if the endpoint differs from the model, and then only that comparison counts.
        until    perf_counter by which to end: no more requests are asked than fit, judged by the first ones, but at
                 least as many as a test takes. latest: when even those are given up, and there is no test."""
        few, compared = min(requests, self.least), 0  # compared: requests that the control was asked.
        sides = {0: endpoint} if self.slack is None or control is None else {0: endpoint, 1: control()}
        size = AT_ONCE if until == inf else 2 * endpoint.slots

        def ask(sides: Mapping[int, Endpoint], begin: int, end: int, until: float) -> None:
            """Ask each endpoint for the requests from `begin` to `end`, as many as fit by `until`, and count."""
            while begin < end and not watch.over(until):
                number = min(size, end - begin)
                chosen = rng.permutation((begin + np.arange(number)) % len(self.cases)).tolist()
                cases = [self.cases[i] for i in chosen]
                replies = dict[int, list[Completion]]()
                for side, of in sides.items():
                    seeds = rng.integers(1 << 31, size=number).tolist()
                    bodies = [{**case.body, "seed": seed} for case, seed in zip(cases, seeds, strict=True)]
                    replies[side] = of.ask(bodies)
                for side, some in replies.items():
                    for case, one in zip(cases, some, strict=True):
                        case.add(one, side)
                self.count_drafts(replies.get(0, ()))
                begin += number
                watch.step(begin, end)

        self.planned, began = requests, perf_counter()
        if until < inf or self.slack is not None:
            ask(sides, 0, few, latest)
        if until < inf:
            now = perf_counter()
            self.planned = min(requests, few + max(0, int(few * (until - now) / (now - began))))
        for look, (share, _) in enumerate(LOOKS):
            ask(sides, self.requests, ceil(self.planned * share), until)
            if is_last := watch.over(until):
                self.planned = self.requests
                if self.requests < few:
                    break
            found = Look(self.requests, *self.p_values(), level_of(look))
            if found.differs and self.slack is None and control is not None:
                ask({1: control()}, compared, self.requests, inf)
                compared = self.requests
                found = replace(found, difference=min(self.p_values(compared=True)))
            self.looks.append(found)
            if found.accuses or is_last:
                break

    def p_values(self, compared: bool = False) -> tuple[float, float]:
        """p-values of the sum over all cases and of the worst case, in coarse bins and, if all cases have counts
        enough, in fine bins. compared: whether to test the difference from the control, not from the model."""
        p = p_worst = 1.0
        for views in zip(*(case.views(compared) for case in self.cases), strict=False):
            p = min(p, stats.tail(sum(view.statistic for view in views), sum(view.df for view in views)))
            p_worst = min(p_worst, stats.worst([view.p for view in views]))
        return p, p_worst


def needed(cases: Sequence[KnownCase], shift: float) -> int:
    """The number of requests that find a shift of this size in all cases, the same number for each case."""
    total = stats.samples_for(sum(case.distribution.df for case in cases), shift, level_of(-1))
    return max(len(cases) * -(-total // len(cases)), Sampled(cases).least)


def level_of(look: int) -> float:
    """The level of each of the four tests of a look."""
    return LEVEL * LOOKS[look][1] / 4


aliases(__name__)
