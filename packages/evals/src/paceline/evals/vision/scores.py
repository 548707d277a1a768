"""Figures from the K x K scores of each case: entry (i, j) says how well picture i fits caption j.

i2t: picture i's best caption is i (a row). t2i: caption j's best picture is j (a column). A group score counts a case
if every query of it is right (Winoground, Thrush et al. 2022). Error bars resample whole cases."""

from collections.abc import Sequence
from math import factorial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Matrix = NDArray[np.floating[Any]]
Keys = NDArray[np.int64]


def correct(scores: Matrix, keys: Keys | None = None) -> NDArray[np.float64]:
    """The credit of each row's query, (K,). The right answer has the row's number.

    n best keys share the credit, 1/n each. keys: (K, K), the order in which each query lists its keys; the first of the
    best keys counts then, as in the official evaluation's argmax. A row of NaN gets 0."""
    best = scores == scores.max(1, keepdims=True)
    if keys is None:
        return np.where(np.diag(best), 1 / np.maximum(best.sum(1), 1), 0.0)
    first = np.take_along_axis(keys, np.take_along_axis(best, keys, 1).argmax(1)[:, None], 1)[:, 0]
    return (first == np.arange(len(scores))).astype(np.float64) * best.any(1)


def case_credits(
    to_text: Matrix, to_image: Matrix | None = None, i2t_keys: Keys | None = None, t2i_keys: Keys | None = None
) -> dict[str, float]:
    """The figures of one case, each from 0 to 1.

    to_text: (K, K), picture by caption. to_image: caption by picture, the same transposed if left out."""
    to_image = to_text.T if to_image is None else to_image
    texts, images = correct(to_text, i2t_keys), correct(to_image, t2i_keys)
    return {
        "i2t": float(texts.mean()),
        "t2i": float(images.mean()),
        "mean": float((texts.mean() + images.mean()) / 2),
        "group_i2t": float(texts.prod()),
        "group_t2i": float(images.prod()),
        "group": float(texts.prod() * images.prod()),
        "assignment": _assignment(_finite(to_text) + _finite(to_image).T),
    }


def _assignment(scores: NDArray[np.float64]) -> float:
    """Share of the pairs found by the best one-to-one matching.

    The solver breaks ties by position. Starting it at each position in turn gives a constant matrix 1/K."""
    shares = []
    for turn in range(len(scores)):
        rows, columns = linear_sum_assignment(np.roll(scores, turn, axis=1), maximize=True)
        shares.append(((columns - turn) % len(scores) == rows).mean())
    return float(np.mean(shares))


def _finite(scores: Matrix) -> NDArray[np.float64]:
    return np.nan_to_num(np.asarray(scores, np.float64), nan=-1e6, neginf=-1e6)


def summarise(
    subset: str, matrices: Sequence[Matrix], values: Sequence[str], *, to_image: Sequence[Matrix] | None = None,
    orders: Sequence[tuple[Keys, Keys]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A subset's figures in percent, standard errors over cases, and the confusions.

    to_image: caption by picture, where it is not the transposed matrix. orders: each case's (i2t_keys, t2i_keys), to
    give ties to the first key; None shares them."""
    backwards = [m.T for m in matrices] if to_image is None else to_image
    per_case = [
        case_credits(m, t, *(orders[n] if orders else ()))
        for n, (m, t) in enumerate(zip(matrices, backwards, strict=True))
    ]
    table = np.array([[*one.values()] for one in per_case])
    k = len(matrices[0])
    names = list(per_case[0])
    result: dict[str, Any] = {"subset": subset, "cases": len(matrices), "k": k}
    result |= {name: round(float(100 * column.mean()), 4) for name, column in zip(names, table.T, strict=True)}
    result["chance"] = {"i2t": 100 / k, "group_i2t": 100 / k**k, "permutation": 100 / factorial(k)}
    errors = 100 * table.std(0) / len(table) ** 0.5  # A bootstrap over the cases estimates the same.
    result["stderr"] = {name: round(float(error), 4) for name, error in zip(names, errors, strict=True)}
    if len(values) == k:
        result["values"] = list(values)
        result["confusion"] = {"i2t": confusion(matrices), "t2i": confusion(backwards)}
        if subset == "count":
            result["count_error"] = {way: _mean_error(rows) for way, rows in result["confusion"].items()}
    return result


def confusion(matrices: Sequence[Matrix]) -> list[list[float]]:
    """[asked][answered]: share of the answers, ties shared; each row sums to 1."""
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
    wanted = ("i2t", "t2i", "mean", "group_i2t", "group_t2i", "group", "assignment", "question", "circular")
    names = [name for name in wanted if all(name in one for one in results)]
    return {name: round(float(np.mean([one[name] for one in results])), 4) for name in names}
