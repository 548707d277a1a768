"""An endpoint against its control: greedily in the scenarios, and sampled.

    server = Server("http://localhost:8000/v1")
    certificate = certify_endpoint(server, control_of(server, None), prompts, Scope(budget="5m"))

With a control the texts of two samples are compared. Without one sampled tokens must fall on their ranks as often as
the log-probabilities say that the server reports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from time import perf_counter
from typing import Any

import numpy as np

from paceline.certify import stats, verdict
from paceline.certify.acceptance import acceptance
from paceline.certify.asking import Control, Endpoint, Fields, Messages, places
from paceline.certify.options import Scope, Watch
from paceline.certify.sampled import LOOKS
from paceline.certify.scenarios import MIXED, Play
from paceline.certify.shrink import greedy_reports, sampled_report
from paceline.certify.verdict import LEVEL, Greedy, Look, Stops
from paceline.workbench.client import Completion

MOST = 40_000
"""Most sampled requests of a certificate where none are asked for; the budget may allow fewer."""
SAMPLED_TOKENS = 12
"""Of a sampled answer: enough for drafts to be accepted, cut and followed by others."""
RANKS = (1, 2, 5, 20)
"""Ends of the bins of ranks; one more holds what lies below."""
WAYS: dict[str, Fields] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "temperature 1, frequency penalty 0.5": {"temperature": 1.0, "frequency_penalty": 0.5},
    "temperature 1.3, min-p 0.05": {"temperature": 1.3, "min_p": 0.05},
}
"""How the cases of the sampling test are sampled; without a control as the first one alone, whose log-probabilities
are those that servers report."""
FOR_SAMPLES, FOR_REPORTS = 0.5, 0.15
"""Shares of the budget that scenarios leave for the sampling test, and both for making findings small."""


def certify_endpoint(
    server: Endpoint, control: Control, prompts: Sequence[Messages], scope: Scope, watch: Watch = Watch()
) -> dict[str, Any]:
    """The certificate of an endpoint; its parts are named as those of `certificate.certify`."""
    began = perf_counter()
    for_samples = 0.0 if scope.requests == 0 else FOR_SAMPLES
    until = began + scope.seconds * (1 - FOR_REPORTS - for_samples)
    play = Play(server, control, prompts, scope.max_tokens, until, watch)
    play.run()
    greedy = Greedy(play.answers, play.tokens, play.divergences)
    if control.is_self and "log-probabilities" not in play.features:
        greedy.why = "the server reports no log-probabilities (logprobs, top_logprobs)"
    cases = _cases(play, scope)
    looks = sample(play, cases, scope, began + scope.seconds * (1 - FOR_REPORTS)) if cases else []
    facts = [case.facts() for case in cases]
    play.until = max(began + scope.seconds, perf_counter() + FOR_REPORTS * scope.seconds)
    reports = greedy_reports(play)
    if looks and looks[-1].accuses:
        worst = min(range(len(cases)), key=lambda i: facts[i]["p"])
        reports.append(sampled_report(server, cases[worst].body, facts[worst], looks[-1]))
    count, df, tests = sum(one["requests"] for one in facts), sum(one["df"] for one in facts), 2 * len(LOOKS)
    power = verdict.power(scope, count, df, LEVEL / tests, samples=1 if control.is_self else 2)
    missing = ["what the log-probabilities share with the answers: give a control"] if control.is_self else []
    return verdict.certificate(
        greedy, Stops(), verdict.sampled_facts(looks, facts), power, scope,
        engine=f"{server.name}, against {control.name}", draft=None, not_tested=[*missing, *play.not_tested()],
        ran_on={"endpoint": server.url}, acceptance=acceptance(None, None),
        scenarios=play.rows, features=sorted(play.features), reports=reports,
        seconds=round(perf_counter() - began, 1),
    )  # fmt: skip


def _cases(play: Play, scope: Scope) -> list[Texts]:
    """Prompts whose answers are free and copied, each sampled in every way that the endpoint takes."""
    known = {"temperature", "top_p", *play.features}
    ways = [(name, way) for name, way in WAYS.items() if way.keys() <= known][: 1 if play.control.is_self else None]
    texts = [play.prompts[0], ({"role": "user", "content": MIXED[0]},)]
    logprobs = play.asked({}) if play.control.is_self else {}
    return [
        Texts(name, {"messages": list(text), "max_tokens": SAMPLED_TOKENS, **way, **logprobs})
        for name, way in ways for text in texts if scope.requests != 0
    ]  # fmt: skip


@dataclass
class Texts:
    """A case of the sampling test: a request, and the answers to it by endpoint and control."""

    name: str
    body: Fields
    mine: list[Completion] = field(default_factory=list)
    others: list[Completion] = field(default_factory=list)

    def views(self) -> list[Fields]:
        """The test in coarse bins and in fine ones; without a control, that of the ranks."""
        if not self.others:
            return [_by_rank(self.mine)]
        texts = [one.text for one in self.mine], [one.text for one in self.others]
        return [_by_text(*texts, share) for share in (0.08, 0.01)]

    def facts(self) -> Fields:
        """For the certificate: the view that shows most, and of each outcome how often either had it."""
        return {"name": self.name, "requests": len(self.mine), **min(self.views(), key=lambda view: view["p"])}


def sample(play: Play, cases: Sequence[Texts], scope: Scope, until: float) -> list[Look]:
    """Ask for samples until the budget is spent or something is found."""
    play.watch.say("sampled requests")
    rng = np.random.default_rng(scope.seed)
    began, each = perf_counter(), 8
    _ask(play, cases, each, rng)
    rate = (perf_counter() - began) / each
    total = scope.requests if scope.requests is not None else MOST
    planned = max(each, min(total // len(cases), int((until - perf_counter()) / rate)))
    looks: list[Look] = []
    for share, of_level in LOOKS:
        until_now = int(np.ceil(planned * share))
        while each < until_now:
            more = min(64, until_now - each)
            _ask(play, cases, more, rng)
            each += more
            play.watch.step(each, planned)
        views = list(zip(*(case.views() for case in cases), strict=True))
        p = min(stats.tail(sum(v["statistic"] for v in view), sum(v["df"] for v in view)) for view in views)
        worst = min(stats.worst([v["p"] for v in view]) for view in views)
        looks.append(Look(each * len(cases), p, worst, LEVEL * of_level / (2 * len(views))))
        if looks[-1].accuses:
            break
    return looks


def _ask(play: Play, cases: Sequence[Texts], each: int, rng: np.random.Generator) -> None:
    asked = [case for case in cases for _ in range(each)]
    rng.shuffle(asked)  # type: ignore[arg-type]
    sides = [(play.server, "mine")] + ([] if play.control.is_self else [(play.control.source, "others")])
    for endpoint, name in sides:
        seeds = rng.integers(1 << 31, size=len(asked)).tolist()
        bodies = [{**case.body, "seed": seed} for case, seed in zip(asked, seeds, strict=True)]
        for case, one in zip(asked, endpoint.ask(bodies), strict=True):
            getattr(case, name).append(one)


def _by_text(mine: Sequence[str], others: Sequence[str], share: float) -> Fields:
    """Two samples of texts. Outcomes are beginnings, each continued by its next character while both samples together
    have it often enough: short where texts soon differ, and long where most are alike."""
    least = max(2 * stats.LEAST_COUNT, share * (len(mine) + len(others)))
    bins: list[tuple[str, list[int]]] = []

    def split(prefix: str, members: list[tuple[str, int]]) -> None:
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
    statistic, both = stats.chi_square_of_two(*counts), counts.sum(0) / counts.sum()
    noise = stats.noise(both, len(mine)) * 2**0.5
    case = _case(counts[0], counts[1] / counts[1].sum(), statistic, len(bins) - 1, noise)
    shares = (counts / counts.sum(1, keepdims=True)).round(4).tolist()
    return case | {"seen": [[prefix, *pair] for (prefix, _), *pair in zip(bins, *shares, strict=True)]}


def _by_rank(mine: Sequence[Completion]) -> dict[str, Any]:
    """Tokens by their rank at their place, against what the reported log-probabilities say of the ranks.

    Given the tokens before it each token falls on a rank by these probabilities, so sums over all places are compared,
    with the sum of their covariances (a central limit theorem for martingales)."""
    bins = len(RANKS) + 1
    counts, expected, covariance = np.zeros(bins), np.zeros(bins), np.zeros((bins, bins))
    for reply in mine:
        for place in places(reply):
            probs = np.zeros(bins)
            rank = bins - 1
            for i, (token, logprob) in enumerate(place.top, 1):
                probs[int(np.searchsorted(RANKS, i))] += exp(logprob)
                rank = int(np.searchsorted(RANKS, i)) if token == place.token else rank
            probs[-1] += max(0.0, 1 - probs.sum())
            counts[rank] += 1
            expected += probs
            covariance += np.diag(probs) - np.outer(probs, probs)
    if not counts.sum():
        return _case(counts, expected, 0.0, 0, 0.0)
    counted = expected >= stats.LEAST_COUNT
    apart = (counts - expected)[counted][:-1]
    spread = covariance[np.ix_(counted, counted)][:-1, :-1]
    statistic = float(apart @ np.linalg.solve(spread, apart)) if len(apart) else 0.0
    probs = expected / expected.sum()
    return _case(counts, probs, statistic, len(apart), stats.noise(probs, int(counts.sum())))


def _case(counts: stats.Floats, probs: stats.Floats, statistic: float, df: int, noise: float) -> dict[str, Any]:
    return {
        "outcomes": df + 1,
        "df": df,
        "statistic": statistic,
        "p": stats.tail(statistic, df),
        "tv": round(stats.total_variation(counts, probs), 5),
        "tv_by_chance": round(noise, 5),
    }
