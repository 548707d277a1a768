"""Weights between those before and after tuning, and what each mixture sees and still knows.

WiSE-FT (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models"): the straight line between the two often holds
points that have most of what was gained and lose little of what was there.

    after = weights(towers)
    points = frontier(towers, before, after, cases, pairs)
    mix(towers, before, after, choose(points, tolerance=2.0)["share"])
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.evals.vision.dataset import Data
from paceline.evals.vision.evaluate import score
from paceline.evals.vision.models.towers import Towers
from paceline.evals.vision.retention import PairFile, zero_shot

SHARES = tuple(tenth / 10 for tenth in range(11))
"""Of the way from before to after."""

Weights = dict[str, Tensor]


def weights(towers: Towers) -> Weights:
    """A copy."""
    return {name: value.detach().clone() for name, value in towers.model.state_dict().items()}


def mix(towers: Towers, before: Weights, after: Weights, share: float) -> None:
    """Give `towers` the weights that lie `share` of the way from `before` to `after`."""
    mixed = {
        name: value.lerp(after[name], share) if value.is_floating_point() else after[name]
        for name, value in before.items()
    }
    towers.model.load_state_dict(mixed)


def frontier(towers: Towers, before: Weights, after: Weights, data: Data, pairs: PairFile) -> list[dict[str, Any]]:
    """SPEC's mean and the zero-shot accuracy of every mixture, in percent."""
    points = []
    for share in SHARES:
        mix(towers, before, after, share)
        scored = score(towers, data)
        subsets = {one["subset"]: one["mean"] for one in scored.results()}
        accuracy = round(zero_shot(towers, pairs), 2)
        points.append({"share": share, "spec": scored.overall()["mean"], "retention": accuracy, "subsets": subsets})
    return points


def choose(points: list[dict[str, Any]], tolerance: float) -> dict[str, Any]:
    """The mixture with the best SPEC mean among those that lose at most `tolerance` points of accuracy."""
    least = points[0]["retention"] - tolerance
    return max((p for p in points if p["retention"] >= least), key=lambda point: float(point["spec"]))
