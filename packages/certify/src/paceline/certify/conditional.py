"""Sampled answers of any length: each token, given those before it.

At every place the tokens before it decide which sets of tokens are looked at: the model's best token, its next ones,
the token that a drafter would copy, the last token again, and so on. The model bounds the probability
that the next token is in a set. The hits over all places are compared with these bounds by `chance.outside`, which
holds although the places of an answer depend on each other. So bugs that move little at each place add up, and bugs
that need a long text show. `read_places` does the same with log-probabilities that a server reports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.certify import stats
from paceline.certify.laws import normal_bound, normal_tail
from paceline.certify.stats import Floats
from paceline.certify.verdict import Finding
from paceline.moved import aliases
from paceline.runs.chance import outside

BEST = "the best token"
RANKED = 20  # This many best tokens are told apart from the rest.
MATCH = (3, 2)  # Lengths of n-grams to look up for the copied token, longest first.
FAR = 64  # Places with more tokens of context are counted apart.
NEAR, BEYOND = f"within {FAR} tokens of context", f"beyond {FAR} tokens of context"
Keys = tuple[tuple[str, str], ...]  # Pairs of a group of places and a set of tokens.
EVERYWHERE: Keys = ((NEAR, BEST), (BEYOND, BEST))
NORMAL = 50.0  # With this variance or more, hits are taken as normal, also far out in the tails.
Places = tuple[float, Floats, Floats]
"""How many tokens of a set came, and between which probabilities one comes at each place, [n] and [n]."""
BORDER = 0.005  # Error allowed in the probability inside top-p, since rounding decides about the last token.
REST = 200_000  # At most this many tokens stand for all that is not among the best.
UNFILTERED: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
Reported = tuple[str, float, list[tuple[str, float]]]
"""A token, its log-probability, and the best ones at its place with theirs, best first."""


class Conditional:
    """Counts over the places of many answers, by group of places and set of tokens."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], list[tuple[bool, float, float]]] = defaultdict(list)
        self.tokens, self.answers = 0, 0

    def add(self, group: str, worlds: Floats, text: Sequence[int], start: int, token: int) -> None:
        """Count `token`, which followed `text`.
        start: where the answer begins; worlds: distributions of the token, [W, V]."""
        for name, chosen, beyond in _sets(worlds, text, start):
            mass = worlds[:, chosen].sum(1)
            place = (bool(chosen[token]), min(1.0, float(mass.min())), min(1.0, float(mass.max()) + beyond))
            for of in (group, NEAR if len(text) <= FAR else BEYOND):
                self._places[of, name].append(place)
        self.tokens += 1

    def _of(self, *keys: tuple[str, str]) -> Places:
        places = [place for key in keys for place in self._places.get(key, ())]
        hits, low, high = np.array(places, np.float64).reshape(-1, 3).T
        return float(hits.sum()), low, high

    def findings(self, level: float, control: Conditional | None = None) -> list[Finding]:
        """Sets of tokens that came too often or too rarely, the surest first. level: for all sets together.

        control: counts of the same engine without drafts; if given, a finding must also differ from them."""
        number = 2 * len(self._places)
        p_values: dict[Keys, float] = {(key,): outside(*self._of(key)) * number for key in self._places}
        # Half of the level is for the best token over all ways to sample: there a small shift in each of them adds up.
        p_values[EVERYWHERE] = 2 * _often(*self._of(*EVERYWHERE)) if self._places else 1.0
        found = {keys: p for keys, p in p_values.items() if p < level}
        if control is not None:
            both = {keys: (self._of(*keys), control._of(*keys)) for keys in found}
            found = {keys: max(p, _difference(*both[keys]) * len(found)) for keys, p in found.items()}
        findings = []
        for keys, p in found.items():
            (group, name), (hits, low, high) = keys[0], self._of(*keys)
            group = "however sampled" if keys == EVERYWHERE else group
            right = f"{low.sum():,.0f} to {high.sum():,.0f}"
            what = f"{name} came {hits:,.0f} times in {len(low):,} places, where {right} are right ({group})"
            findings += [Finding("sampled", what, p)] if p < level else []
        return sorted(findings, key=lambda one: one.p)

    def facts(self, level: float) -> dict[str, Any]:
        """Facts for the certificate. detectable: the smallest shift to or from the best token that is found with
        stats.POWER, as a share of all tokens; hidden: the part of a shift that rounding hides."""
        _, low, high = self._of(*EVERYWHERE)
        number, variance = max(len(low), 1), _variance(low, high)
        hidden = float((high - low).sum()) / 2 / number
        # Chernoff's bound of a normal deviate z is exp(-z^2 / 2).
        bound = normal_bound(level / 4) if variance >= NORMAL else np.sqrt(-2 * np.log(level / 4))
        reach = float((bound + normal_bound(1 - stats.POWER)) * np.sqrt(variance)) / number
        shift = hidden + reach if self.tokens else 1.0
        return {"tokens": self.tokens, "detectable": round(float(min(1.0, shift)), 4), "hidden": round(hidden, 5)}


def _variance(low: Floats, high: Floats) -> float:
    """The greatest variance of hits in trials with probabilities of low..high [n]."""
    middle = np.clip(0.5, low, high)
    return float((middle * (1 - middle)).sum())


def _often(hits: float, low: Floats, high: Floats) -> float:
    """`outside`, by the normal distribution where the trials are many: hits are a sum of martingale differences."""
    if (variance := _variance(low, high)) < NORMAL:
        return outside(hits, low, high)
    beyond = max(hits - float(high.sum()), float(low.sum()) - hits, 0.0)
    return float(min(1.0, 2 * normal_tail(beyond / variance**0.5)))


def _difference(mine: Places, control: Places) -> float:
    """p-value: how far the hits lie from the middle of their range, compared with the control's. Both are nearly normal
    sums of martingale differences, and rounding may have moved either by half of its range."""
    if not len(control[1]):
        return 1.0
    apart, slack, variance = 0.0, 0.0, 0.0
    rate = (mine[0] + control[0]) / (len(mine[1]) + len(control[1]))
    for sign, (hits, low, high) in ((1, mine), (-1, control)):
        middle, number = (low + high) / 2, len(low)
        apart += sign * (hits - float(middle.sum())) / number
        slack += float((high - low).sum()) / 2 / number
        # Tokens that the model rules out, but that came in both, have the variance of their own rate.
        variance += max(float((middle * (1 - middle)).sum()), rate * (1 - rate) * number) / number**2
    return float(2 * normal_tail(max(0.0, abs(apart) - slack) / max(variance, 1e-12) ** 0.5))


def _sets(worlds: Floats, text: Sequence[int], start: int) -> Iterator[tuple[str, NDArray[np.bool_], float]]:
    """Yield sets of tokens to watch after `text`: name, mask [V], and by how much the probability may exceed that in
    any world. The token that follows has no part in choosing them."""
    size = worlds.shape[1]

    def mask(tokens: Any) -> NDArray[np.bool_]:
        chosen = np.zeros(size, bool)
        chosen[tokens] = True
        return chosen

    best = np.argpartition(-worlds[0], min(RANKED, size - 1))[:RANKED]
    best = best[np.argsort(-worlds[0, best], kind="stable")]
    yield BEST, mask(best[:1]), 0.0
    yield "a token of rank 2 to 4", mask(best[1:4]), 0.0
    yield f"a token of rank 5 to {RANKED}", mask(best[4:]), 0.0
    yield "a rarer token", ~mask(best), 0.0
    if (never := worlds.max(0) == 0).any():
        # Tokens at the border are inside in some worlds and outside in others; as many again may be inside elsewhere.
        yield "a token that is filtered out", never, float(worlds[:, worlds.min(0) == 0].sum(1).max())
    if (copied := copied_token(text)) is not None:
        yield "the token that followed the last time", mask(copied), 0.0
    if len(text) > start:
        yield "the last token again", mask(text[-1]), 0.0
        yield "a token that the answer has", mask(np.unique(text[start:])), 0.0


def copied_token(text: Sequence[int]) -> int | None:
    """The token after the latest earlier occurrence of the last few tokens of `text`."""
    text = list(text)
    for length in MATCH:
        last = text[-length:]
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == last:
                return text[end]
    return None


# Servers ------------------------------------------------------------------------------------------------------------
#
# Servers report log-probabilities before temperature, penalties and filters, which are applied here to the reported
# tokens. The remaining probability is spread over tokens no better than the last reported one. What stays unknown gives
# a range of probabilities, as rounding does.


class Words(dict[str, int]):
    """Numbers the texts of tokens, from 1. Number 0 stands for every token that is not among the best of a place."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self) + 1
        return self[text]


def read_places(
    places: Sequence[Reported], fields: Mapping[str, Any], counts: Conditional, words: Words, group: str, *,
    raw: bool = True,
) -> None:  # fmt: skip
    """Add the places of a sampled reply to `counts`.

    fields  the request's temperature, top_p, top_k, min_p, presence_penalty and frequency_penalty.
    words   shared by all replies in `counts`. group: how they were sampled, in words.
    raw     whether the server reports log-probabilities before these fields apply, see `is_raw`."""
    text: list[int] = []
    for said, _, top in places:
        best, token = [words[one] for one, _ in top], words[said]
        probs = _worlds([logprob for _, logprob in top], best, Counter(text), fields if raw else {})
        worlds = np.zeros((len(probs), len(words) + 1))
        for column, word in enumerate((*best, 0)):  # Two tokens may have the same text.
            worlds[:, word] += probs[:, column]
        counts.add(group, worlds, text, 0, token if token in best else 0)
        text.append(token)


def _worlds(logprobs: Sequence[float], best: Sequence[int], seen: Counter[int], fields: Mapping[str, Any]) -> Floats:
    """Distributions of the next token, [W, len(best) + 1]. The last column is all that is not among `best`."""
    rest = max(0.0, 1 - float(np.exp(logprobs).sum()))
    last = float(np.exp(logprobs[-1]))  # No token of the rest is more probable.
    number = min(REST, int(rest / max(last, 1e-7)))
    remainder = max(rest - number * last, 1e-12)
    presence, frequency = fields.get("presence_penalty", 0.0), fields.get("frequency_penalty", 0.0)
    shifted = np.array(logprobs) - [presence * (seen[one] > 0) + frequency * seen[one] for one in best]
    with_rest, counts = np.append(shifted, [logprobs[-1], np.log(remainder)]), [1] * len(best) + [number, 1]
    asked = UNFILTERED | {name: fields[name] for name in UNFILTERED if name in fields}
    # Below temperature 1, the more tokens share the rest, the less it counts. Filters and penalties may lower it too.
    exactly = asked == UNFILTERED and not presence and not frequency
    worlds, top_p = [], asked["top_p"]
    for scores in (with_rest,) if exactly else (with_rest, shifted):
        for border in {top_p, min(1.0, top_p + BORDER), top_p - BORDER * (top_p < 1)}:
            masses = drawn(scores, np.array(counts[: len(scores)]), **asked | {"top_p": border})
            worlds.append(np.append(masses[: len(best)], masses[len(best) :].sum()))
    return np.stack(worlds)


def drawn(
    scores: Floats, counts: NDArray[np.int64], *, temperature: float, top_k: int, top_p: float, min_p: float
) -> Floats:
    """The probability of each group of equally probable tokens, [n], after temperature, top-k, top-p and min-p as
    `SamplingParams` defines them. scores [n]: the logarithm of a token's probability; counts [n]: tokens of a group."""
    there = np.flatnonzero(counts)
    each, left = np.exp((scores[there] - scores.max()) / temperature), counts[there]
    order = np.argsort(each, kind="stable")
    best = order[-1]
    if top_k:
        enough = order[::-1][np.cumsum(left[order[::-1]]) >= top_k]
        left = np.where(each < each[enough[0]], 0, left) if len(enough) else left
    mass = (each * left / (each * left).sum())[order]
    a_token = each[order] / (each * left).sum()
    dropped = np.floor(np.maximum(1 - top_p - (np.cumsum(mass) - mass), 0.0) / a_token)
    left[order] = np.maximum(left[order] - dropped, order == best)  # Of the best tokens one stays.
    left[each < min_p * each[best]] = 0
    masses = np.zeros(len(scores))
    masses[there] = each * left / (each * left).sum()
    return masses


def is_raw(hot: Sequence[Reported], cold: Sequence[Reported]) -> bool:
    """Whether a server reports log-probabilities before the temperature.
    hot, cold: a prompt's first token at 1 and 0.5."""
    before, after = dict(hot[0][2]), dict(cold[0][2])
    best = max(before, key=before.__getitem__)
    return abs(after.get(best, 0.0) - before[best]) < abs(before[best]) / 4


aliases(__name__)
