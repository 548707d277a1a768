"""The 5-gram baseline against the textbook's formulas, written out with dictionaries."""

from collections import Counter, defaultdict
from functools import cache

import numpy as np
import pytest

from zoo.ngram import NgramModel, _discounts

VOCABULARY = 6


def text(n: int = 400) -> list[int]:
    rng = np.random.default_rng(0)
    return (rng.zipf(1.6, n) % VOCABULARY).tolist()


def by_hand(tokens: list[int], longest: int):  # type: ignore[no-untyped-def]
    """p(token | context) with dictionaries."""
    counts: dict[int, Counter] = {longest: Counter(zip(*(tokens[i:] for i in range(longest)), strict=False))}
    for n in range(longest - 1, 0, -1):
        counts[n] = Counter(gram[1:] for gram in counts[n + 1])
    discounts = {n: _discounts(np.array(list(c.values()))) for n, c in counts.items()}
    follow: dict[int, dict] = {n: defaultdict(dict) for n in counts}
    for n, grams in counts.items():
        for gram, count in grams.items():
            follow[n][gram[:-1]][gram[-1]] = count

    @cache
    def p(token: int, context: tuple[int, ...]) -> float:
        n = len(context) + 1
        lower = p(token, context[1:]) if context else 1 / VOCABULARY
        seen = follow[n].get(context)
        if not seen:
            return lower
        d = discounts[n]
        freed = sum(d[min(c, 3)] for c in seen.values())
        count = seen.get(token, 0)
        return (max(count - d[min(count, 3)], 0) + freed * lower) / sum(seen.values())

    return p


@pytest.mark.parametrize("longest", [1, 2, 3, 5])
def test_probabilities(longest: int) -> None:
    tokens = text()
    model, p = NgramModel.fit(np.array(tokens), VOCABULARY, longest), by_hand(tokens, longest)
    row = text(60)[::-1]
    expected = [np.log(p(row[i], tuple(row[max(i - longest + 1, 0) : i]))) for i in range(1, len(row))]
    np.testing.assert_allclose(model.log_probs(np.array(row)), expected, rtol=1e-9)


def test_they_add_up_to_one() -> None:
    model = NgramModel.fit(np.array(text()), VOCABULARY)
    for context in ([1, 0, 2, 1], [5, 5, 5, 5], [3], []):
        rows = [np.array([0, *context, token]) for token in range(VOCABULARY)]
        assert sum(np.exp(model.log_probs(row)[-1]) for row in rows) == pytest.approx(1)


def test_it_learns() -> None:
    tokens = np.array([0, 1, 2, 3, 4, 5] * 50)
    assert np.exp(-NgramModel.fit(tokens, VOCABULARY).log_probs(tokens).mean()) < 1.2
    assert NgramModel.fit(tokens, VOCABULARY).log_probs(np.array([0])).tolist() == []
