"""Chi-square tests of sampled tokens, for models too large to enumerate.

    p_value = fit(counts, probabilities)     # were these counts drawn from this distribution?
    p_value = same(counts, other_counts)     # were both drawn from one distribution, whatever it is?

A p-value is uniform in [0, 1] if the answer is yes, and close to 0 if it is no; so a test that fixes its seeds and
demands, say, 1e-3 fails for one right program in a thousand seeds, and then always for that seed.
"""

import numpy as np
from scipy import stats

ENOUGH = 5.0
"""Expected counts below this are pooled: the chi-square distribution is an approximation for large counts."""


def fit(counts, probabilities):
    """p-value of `counts` [V] having been drawn from `probabilities` [V], which sum to 1.

    An outcome of probability 0 that was drawn all the same gives 0: no amount of chance explains it."""
    seen, law = np.asarray(counts, float), np.asarray(probabilities, float)
    if seen.shape != law.shape or not np.isclose(law.sum(), 1, atol=1e-6):
        raise ValueError("counts and probabilities must have one shape, and the probabilities sum to 1")
    if seen[law == 0].any():
        return 0.0
    expected = law / law.sum() * seen.sum()
    bins = pooled(expected)
    if bins.max() == 0:
        return 1.0
    return float(stats.chisquare(np.bincount(bins, seen), np.bincount(bins, expected)).pvalue)


def same(counts, others):
    """p-value of two sets of counts [V] having been drawn from the same distribution."""
    table = np.stack([np.asarray(counts, float), np.asarray(others, float)])
    # What a bin of the smaller sample would hold if the two were drawn alike.
    bins = pooled(table.sum(0) * table.sum(1).min() / table.sum())
    table = np.stack([np.bincount(bins, row) for row in table])
    table = table[:, table.sum(0) > 0]
    return float(stats.chi2_contingency(table, correction=False).pvalue) if table.shape[1] > 1 else 1.0


def pooled(expected):
    """The bin of each outcome, [V]: outcomes are pooled, rarest first, until a bin expects ENOUGH."""
    bins = np.zeros(len(expected), np.int64)
    order = np.argsort(expected, kind="stable")
    held, bin = 0.0, 0
    for i in order:
        if held >= ENOUGH:
            held, bin = 0.0, bin + 1
        bins[i] = bin
        held += expected[i]
    if held < ENOUGH and bin > 0:  # the last bin is never filled if the total is small
        bins[bins == bin] = bin - 1
    return bins
