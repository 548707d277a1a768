"""Figures from the K x K scores of each case: entry (i, j) says how well picture i fits caption j.

    result = summarise("count", matrices, values)
    result["i2t"], result["t2i"], result["mean"], result["group"]

i2t: picture i's best caption is i (a row). t2i: caption j's best picture is j (a column). Group scores want every query
of a case right (Winoground, Thrush et al. 2022). Error bars resample cases, because queries of one case are related.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import factorial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Matrix = NDArray[np.floating[Any]]
RESAMPLES = 1000


def correct(scores: Matrix, keys: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
    """(K,): the credit of each row's query, whose right answer is its own number.

    Ties share the credit, 1/n among n best. With `keys`, (K, K), the order in which each query lists its keys, the
    first of the best counts instead: what the official evaluation's argmax does. A row that is not a number gets 0."""
    best = scores == scores.max(1, keepdims=True)
    if keys is None:
        number = best.sum(1)
        return np.where(np.diag(best), 1 / np.maximum(number, 1), 0.0)
    first = np.take_along_axis(keys, np.take_along_axis(best, keys, 1).argmax(1)[:, None], 1)[:, 0]
    return (first == np.arange(len(scores))).astype(np.float64) * best.any(1)


def case_credits(scores: Matrix, i2t_keys: NDArray[np.int64] | None = None, t2i_keys: NDArray[np.int64] | None = None) -> dict[str, float]:
    """The figures of one case, each from 0 to 1."""
    to_text, to_image = correct(scores, i2t_keys), correct(scores.T, t2i_keys)
    rows, columns = linear_sum_assignment(np.nan_to_num(scores), maximize=True)
    return {
        "i2t": float(to_text.mean()),
        "t2i": float(to_image.mean()),
        "mean": float((to_text.mean() + to_image.mean()) / 2),
        "group_i2t": float(to_text.prod()),
        "group_t2i": float(to_image.prod()),
        "group": float(to_text.prod() * to_image.prod()),
        "assignment": float((rows == columns).mean()),
    }


def summarise(
    subset: str,
    matrices: Sequence[Matrix],
    values: Sequence[str],
    orders: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]] | None = None,
) -> dict[str, Any]:
    """One subset's figures in percent, standard errors over cases, and what was confused with what.

    orders: each case's (i2t_keys, t2i_keys), for ties that go to the first key; None shares them."""
    per_case = [case_credits(m, *(orders[n] if orders else ())) for n, m in enumerate(matrices)]
    table = np.array([[*one.values()] for one in per_case])
    k = len(matrices[0])
    names = list(per_case[0])
    result: dict[str, Any] = {"subset": subset, "cases": len(matrices), "k": k}
    result |= {name: round(float(100 * column.mean()), 4) for name, column in zip(names, table.T, strict=True)}
    result["chance"] = {"i2t": 100 / k, "group_i2t": 100 / k**k, "permutation": 100 / factorial(k)}
    result["stderr"] = dict(zip(names, _standard_errors(table), strict=True))
    if len(values) == k:
        result["values"] = list(values)
        result["confusion"] = {"i2t": confusion(matrices), "t2i": confusion([m.T for m in matrices])}
        if subset == "count":
            result["count_error"] = {way: _mean_error(table) for way, table in result["confusion"].items()}
    return result


def _standard_errors(table: NDArray[np.float64]) -> list[float]:
    """Of each column's mean, in percent, by bootstrap over the rows."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(table), size=(RESAMPLES, len(table)))
    return [round(float(100 * spread), 4) for spread in table[drawn].mean(1).std(0)]


def confusion(matrices: Sequence[Matrix]) -> list[list[float]]:
    """[asked][answered]: how often, ties shared; each row sums to 1."""
    shares = []
    for scores in matrices:
        best = scores == scores.max(1, keepdims=True)
        shares.append(best / np.maximum(best.sum(1, keepdims=True), 1))
    return [[round(float(share), 4) for share in row] for row in np.mean(shares, 0)]


def _mean_error(table: list[list[float]]) -> float:
    """Mean absolute difference of the number asked and the number answered."""
    number = np.arange(len(table))
    return round(float((np.array(table) * abs(number[:, None] - number)).sum(1).mean()), 4)


def overall(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Unweighted means over subsets, as the paper's and the official evaluation's."""
    names = ("i2t", "t2i", "mean", "group_i2t", "group_t2i", "group", "assignment")
    return {name: round(float(np.mean([one[name] for one in results])), 4) for name in names}
