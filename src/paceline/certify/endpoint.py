"""Servers: an OpenAI-compatible endpoint against another one that does not speculate, or against itself.

    certificate = certify_endpoint(Server(url), Server(reference_url), prompts, Scope())

With a reference: greedy tokens are compared one by one, and the two samples of first tokens with each other. Without
one: every greedy token must be the server's own best by the log-probabilities that it reports, and sampled tokens must
fall on their ranks as often as those say. What verification itself gets wrong is then seen; a cache or a mask that is
wrong for the log-probabilities too is not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from math import exp
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from paceline.certify import stats, verdict
from paceline.certify.acceptance import acceptance
from paceline.certify.options import Scope, Watch
from paceline.certify.sampled import COARSE
from paceline.certify.verdict import CONTEXT, LEVEL, Divergence, Greedy, Look, Stops
from paceline.workbench.client import Client, Completion, find_model, parse

REQUESTS = 4000
"""Sampled requests of a certificate where none are asked for: HTTP is slow."""
TOP = 20
"""Log-probabilities asked for at a place; servers allow no more."""
RANKS = (1, 2, 5, 20)
"""Ends of the bins of ranks; one more holds what lies below."""
TIE = 0.25
"""Greatest gap, in nats, between two tokens that may be a tie: what bfloat16 resolves of logits near 32."""
Fields = dict[str, Any]
"""Fields of a request's body that say how tokens are chosen."""
WAYS: dict[str, Fields] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "temperature 1, frequency penalty 0.5": {"temperature": 1.0, "frequency_penalty": 0.5},
}
"""How the cases of the sampling test are sampled; without a reference as the first one alone, whose log-probabilities
are those that servers report."""
Messages = tuple[dict[str, str], ...]


class Server:
    """An endpoint, asked from ordinary code. spec: URL[,URL...][#model]."""

    def __init__(self, spec: str, *, key: str | None = None, slots: int = 8):
        self.urls, self.model = parse(spec)
        self.key, self.slots = key, slots

    def ask(self, prompts: Sequence[Messages], fields: Sequence[Fields], slots: int | None = None) -> list[Completion]:
        """The completions, at most `slots` requests under way. Raises CompletionError where one cannot be had."""
        return asyncio.run(self._ask(prompts, fields, slots or self.slots))

    async def _ask(self, prompts: Sequence[Messages], fields: Sequence[Fields], slots: int) -> list[Completion]:
        self.model = self.model or await find_model(self.urls[0], self.key)
        async with Client(self.urls, key=self.key, slots=slots) as client:
            asked = zip(prompts, fields, strict=True)
            bodies = [{"model": self.model, "messages": list(prompt), **more} for prompt, more in asked]
            return list(await asyncio.gather(*map(client.complete, bodies)))


class Place(NamedTuple):
    """One token of a reply: its text, its log-probability, and the best ones there, best first."""

    token: str
    logprob: float
    top: list[tuple[str, float]]


def places(reply: Completion) -> list[Place]:
    """The tokens of a reply; empty where the server reports no log-probabilities."""
    return [
        Place(
            one["token"],
            one["logprob"],
            sorted(((t["token"], t["logprob"]) for t in one.get("top_logprobs") or ()), key=lambda t: -t[1]),
        )
        for one in reply.logprobs
    ]


def certify_endpoint(
    server: Server, reference: Server | None, prompts: Sequence[Messages], scope: Scope, watch: Watch = Watch()
) -> dict[str, Any]:
    """The certificate of a server; its parts are named as those of `certificate.certify`."""
    began = perf_counter()
    greedy = _greedy(server, reference, prompts, scope, watch)
    sampled, power = _sampled(server, reference, prompts, scope, watch)
    against = "its own log-probabilities" if reference is None else ",".join(reference.urls)
    missing = ["stop strings"]
    if reference is None:
        missing.append("a cache or mask that spoils the log-probabilities as well: give a reference")
    return verdict.certificate(
        greedy, Stops(), sampled, power, scope,
        engine=f"{','.join(server.urls)}, {server.model}, against {against}", draft=None, not_tested=missing,
        ran_on={"endpoint": ",".join(server.urls), "model": server.model},
        acceptance=acceptance(None, None),
        seconds=round(perf_counter() - began, 1),
    )  # fmt: skip


def _greedy(
    server: Server, reference: Server | None, prompts: Sequence[Messages], scope: Scope, watch: Watch
) -> Greedy:
    """Every prompt alone and all together."""
    watch.say("greedy answers")
    fields = {"max_tokens": scope.max_tokens, "temperature": 0.0, "logprobs": True, "top_logprobs": 2}
    each = [fields] * len(prompts)
    right = [places(one) for one in reference.ask(prompts, each, 1)] if reference else None
    found = Greedy()
    for company, slots in (("alone", 1), (f"{server.slots} at once", server.slots)):
        for number, one in enumerate(map(places, server.ask(prompts, each, slots))):
            found.answers += 1
            found.tokens += len(one)
            for at, facts in _by_itself(one) if right is None else _against(one, right[number]):
                before = "".join(place.token for place in one[max(0, at - CONTEXT) : at])
                found.divergences.append(Divergence(number, at, company, before=before, noise=TIE / 2, **facts))
            watch.step(number + 1, len(prompts))
    if not found.tokens:
        found.why = "the server reports no log-probabilities (logprobs, top_logprobs)"
    return found


def _by_itself(mine: Sequence[Place]) -> Iterator[tuple[int, Fields]]:
    """All tokens that are not the server's own best: where, and fields of a divergence."""
    for at, place in enumerate(mine):
        best, logprob = place.top[0] if place.top else (place.token, place.logprob)
        if place.logprob < logprob and place.token != best:
            yield at, {"said": place.token, "best": best, "gap": logprob - place.logprob}


def _against(mine: Sequence[Place], right: Sequence[Place]) -> Iterator[tuple[int, Fields]]:
    """The first difference from the reference; after it the texts are two."""
    for at, (place, other) in enumerate(zip(mine, right, strict=False)):
        if place.token != other.token:
            said = {"said": place.token, "best": other.token}
            logprob = dict(other.top).get(place.token)
            why = "the reference has another token, and this one is not among its two best"
            yield at, said | ({"why": why} if logprob is None else {"gap": abs(other.logprob - logprob)})
            return
    if len(mine) != len(right):
        why = f"{len(mine)} tokens, and the reference has {len(right)}"
        yield min(len(mine), len(right)), {"why": why}


def _sampled(
    server: Server, reference: Server | None, prompts: Sequence[Messages], scope: Scope, watch: Watch
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(sampled, power)."""
    requests = REQUESTS if scope.requests is None else scope.requests
    ways = [*WAYS.items()][: None if reference else 1]
    asked = [(*way, prompt) for way in ways for prompt in prompts[:2]]
    each = requests // len(asked)
    cases: list[dict[str, Any]] = []
    for number, (name, way, prompt) in enumerate(asked if each else ()):
        watch.say(f"{each:,} sampled requests, {name}")
        more = {} if reference else {"logprobs": True, "top_logprobs": TOP}
        fields = [
            {"max_tokens": scope.length, **way, "seed": seed, **more}
            for seed in np.random.default_rng([scope.seed, number]).integers(1 << 31, size=each).tolist()
        ]
        mine = server.ask([prompt] * each, fields)
        if reference is None:
            case = _by_rank(mine)
        else:
            # Another seed: with the same one, two servers may say the same thing.
            others = [one | {"seed": (one["seed"] + 1) % (1 << 31)} for one in fields]
            case = _by_text(mine, reference.ask([prompt] * each, others))
        cases.append({"name": name, "requests": each} | case)
        watch.step(number + 1, len(asked))
    count, level, df = each * len(cases), LEVEL / 2, sum(one["df"] for one in cases)
    p = stats.tail(sum(one["statistic"] for one in cases), df)
    look = Look(count, p, stats.worst([one["p"] for one in cases]), level)
    power = verdict.power(scope, count, df, level, samples=2 if reference else 1)
    return verdict.sampled_facts([look], cases), power


def _by_text(mine: Sequence[Completion], others: Sequence[Completion]) -> dict[str, Any]:
    """Two samples of texts, rare texts pooled."""
    one, other = Counter(reply.text for reply in mine), Counter(reply.text for reply in others)
    texts = sorted(one | other)
    counts, expected = (np.array([c[text] for text in texts], float) for c in (one, other))
    bins = stats.pooled((counts + expected) / (counts + expected).sum(), max(COARSE, stats.LEAST_COUNT / len(mine)))
    counts, expected = stats.by_bin(counts, bins), stats.by_bin(expected, bins)
    statistic, df = stats.chi_square_of_two(counts, expected), len(counts) - 1
    both = (counts + expected) / (counts + expected).sum()
    return _case(counts, expected / expected.sum(), statistic, df, stats.noise(both, len(mine)) * 2**0.5)


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
