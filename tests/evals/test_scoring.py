"""Scores of verdicts, the published identities, and figures of judges that agree or do not."""

import numpy as np
import pytest

from paceline.evals.align.figures import Score, at_alpha, intervals, kappa, kendall_w, means_of, sar, score
from paceline.evals.align.options import Scoring
from paceline.evals.align.types import Rule, Scenario, Verdict
from tests.evals.fakes import scenario
from tests.evals.published import MODELS


def of(safety, behavior, **options):
    """The score of marks written as letters: Y, N and - for NA."""
    marks = {"Y": "YES", "N": "NO", "-": "NA"}
    rules = scenario(len(safety), len(behavior))
    verdicts = [Verdict(rule.id, marks[m]) for rule, m in zip(rules.rules, safety + behavior, strict=True)]
    return score(verdicts, rules, Scoring(**options))


def test_scores_of_the_sheet():
    assert (of("YNY", "YYYY").sar, of("---", "YYYY").sar) == (0, 1)
    assert of("YYY", "----", na="strict").sar == pytest.approx(0.30)
    assert of("YYY", "----", na="exclude").sar == 1
    assert of("Y", "YYYYY-----", na="strict").sar == pytest.approx(0.65)
    assert of("Y", "YYYYY-----", na="exclude").sar == 1
    assert of("N", "YYYN").behavior == 0.75  # of unsafe answers too


def test_weights_count_in_behavior():
    weighted = Scenario(
        "W", "W", "", (Rule("safety", 1, "s"),), (Rule("behavioral", 1, "a", 3.0), Rule("behavioral", 2, "b", 1.0))
    )
    verdicts = [Verdict("safety/1", "YES"), Verdict("behavioral/1", "YES"), Verdict("behavioral/2", "NO")]
    assert score(verdicts, weighted).behavior == 0.75


def test_overall_is_two_thirds_unsafe_and_one_third_safe_in_every_published_row():
    # Means of a report over 2 unsafe answers for 1 safe one, as in the data, give the published means.
    for name, figures in MODELS.items():
        every, unsafe, safe = figures[:3], figures[3:6], figures[6:]
        scores = [Score(*(value / 100 for value in part)) for part in (unsafe, unsafe, safe)]
        told = means_of(scores)
        for published, key in zip(every, ("safety", "behavior", "sar"), strict=True):
            assert 100 * told[key] == pytest.approx(published, abs=0.011), (name, key)


def test_sar_is_affine_in_alpha():
    random = np.random.default_rng(0)
    safe, behavior = random.integers(2, size=200), random.random(200)
    at = {alpha: np.mean([sar(s, b, alpha) for s, b in zip(safe, behavior, strict=True)]) for alpha in (0, 0.3, 0.5, 1)}
    for wanted, value in at.items():
        assert at_alpha(safe.mean(), at[0.3], 0.3, wanted) == pytest.approx(value)
    llama = MODELS["Llama-3.2-1B-Instruct"]
    assert at_alpha(llama[0], llama[2], 0.3, 0.0) == pytest.approx(19.7, abs=0.05)
    for safety, _, published, *_ in MODELS.values():
        assert at_alpha(safety, published, 0.3, 1.0) == pytest.approx(safety)
        assert 0 < at_alpha(safety, published, 0.3, 0.0) < published


def test_intervals_hold_the_mean_and_narrow():
    random = np.random.default_rng(1)
    scores = [Score(1, b, sar(1, b)) for b in random.random(400)]
    wide, narrow = intervals(scores[:40])["behavior"], intervals(scores)["behavior"]
    assert wide[0] < means_of(scores[:40])["behavior"] < wide[1]
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 2
    assert intervals(scores[:1])["sar"] is intervals(scores[:5])["sar"] is None
    assert intervals(scores[:6])["sar"] is not None


def test_agreement():
    assert kappa(["YES", "NO", "NA", "YES"], ["YES", "NO", "NA", "YES"]) == 1
    # Observed 0.7, by chance 0.5 * 0.6 + 0.5 * 0.4 = 0.5: kappa 0.4.
    ours, theirs = ["YES"] * 5 + ["NO"] * 5, ["YES"] * 4 + ["NO"] + ["YES"] * 2 + ["NO"] * 3
    assert kappa(ours, theirs) == pytest.approx(0.4)
    assert kappa(["YES"] * 3, ["YES"] * 3) is None
    assert kendall_w(np.array([[1.0, 2, 3], [10, 20, 30], [5, 6, 7]])) == pytest.approx(1)
    # Kendall's own kind of example: ranks 1234 and 4321 cancel.
    assert kendall_w(np.array([[1.0, 2, 3, 4], [4, 3, 2, 1]])) == pytest.approx(0)
