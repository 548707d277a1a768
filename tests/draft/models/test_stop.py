"""Stop rules by themselves: what they compute of a distribution, and when they stop."""

import math
from typing import get_args

import pytest
import torch

from paceline.draft.models import stop
from paceline.draft.models.stop import Confidence, Fixed, Heuristic, Outcome, Svip, certainties
from paceline.errors import MethodError

ROW = 7


def confident(probability, others=63):
    """Logits [1, 1 + others] whose best token has that probability."""
    rest = (1 - probability) / others
    return torch.tensor([[probability] + [rest] * others], dtype=torch.float64).log()


def uniform(m, size=64):
    """Logits [1, size] of the uniform distribution over m tokens."""
    return torch.tensor([[0.0] * m + [-math.inf] * (size - m)])


def stops(rule, logits, drafted=1):
    (signal,) = rule.signals(logits)
    return rule.stop(ROW, drafted, signal)


def test_every_rule_has_a_name():
    assert tuple(stop.RULES) == get_args(stop.Name)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("svip", {"threshold": -0.1}, "threshold is -0.1; for this stop rule it is between 0 and 10"),
        ("svip", {"threshold": math.nan}, "threshold is nan"),
        ("confidence", {"threshold": 1.1}, "threshold is 1.1; for this stop rule it is between 0 and 1"),
        ("fixed", {"threshold": 0.3}, "the stop rule fixed has no threshold; leave it out"),
        ("heuristic", {"threshold": 0.3}, "the stop rule heuristic has no threshold"),
    ],
)
def test_what_a_rule_cannot_have(name, options, says):
    with pytest.raises(MethodError) as error:
        stop.RULES[name](**options)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_fixed_is_as_long_as_its_cap():
    assert Fixed().most(ROW) == 5
    assert Fixed(cap=9).most(ROW) == 9
    assert not stops(Fixed(), uniform(64))


# Entropy -------------------------------------------------------------------------------------------------------------


def entropies(logits):
    return [entropy for entropy, _ in certainties(logits)]


def test_entropy_of_known_distributions():
    for m in (1, 2, 3, 17, 64):
        assert entropies(uniform(m)) == pytest.approx([math.log(m)], abs=1e-6)
    assert entropies(torch.tensor([[800.0, 0.0, 0.0]])) == [0]
    assert entropies(torch.tensor([[1.0, 1.0], [5.0, -math.inf]])) == pytest.approx([math.log(2), 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])  # the last is not compiled
@pytest.mark.parametrize("size", [1, 50, 40_000])
def test_entropy_and_the_best_probability_are_the_distributions(dtype, size):
    heat = torch.logspace(-2, 2, 40)[:, None]
    logits = (torch.randn(40, size, generator=torch.Generator().manual_seed(0)) * heat).to(dtype)
    exact = torch.distributions.Categorical(logits=logits.double())
    found, best = zip(*certainties(logits), strict=True)
    assert min(found) >= 0
    assert found == pytest.approx(exact.entropy().tolist(), abs=1e-5, rel=1e-5)
    assert best == pytest.approx(exact.probs.amax(-1).tolist(), rel=1e-5)
    turned = logits.T.contiguous().T  # a column after the other
    assert entropies(turned) == list(found)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["svip", "confidence"])
def test_what_is_no_distribution_stops_a_draft(name, broken):
    rule = stop.RULES[name]()
    assert stops(rule, torch.tensor([[0.0, broken, 1.0]]))
    assert stops(rule, torch.full((1, 3), -math.inf))


# SVIP, Kangaroo ------------------------------------------------------------------------------------------------------


def test_svip_stops_above_its_threshold_and_not_at_it():
    rule = Svip()
    assert (rule.cap, rule.threshold) == (40, 0.3)
    (half,) = entropies(confident(0.9))
    at = math.sqrt(0.15 * half)
    assert not stops(Svip(threshold=at + 1e-6), confident(0.9))
    assert stops(Svip(threshold=at - 1e-6), confident(0.9))
    (signal,) = rule.signals(confident(0.9))
    assert not Svip(threshold=signal).stop(ROW, 1, signal), "strictly above"
    # 0.6 nats by default: a coin has 0.69.
    assert stops(rule, uniform(2))
    assert not stops(rule, confident(0.92, others=2))


def test_confidence_stops_below_its_threshold():
    assert (Confidence().cap, Confidence().threshold) == (6, 0.6)
    assert stops(Confidence(), confident(0.59))
    assert not stops(Confidence(), confident(0.61))
    assert not Confidence().stop(ROW, 1, 0.6)
    assert not stops(Confidence(threshold=0), uniform(64))


# Transformers' schedule ----------------------------------------------------------------------------------------------


def test_the_heuristic_schedule():
    rule = Heuristic()
    assert rule.most(ROW) == 5
    lengths = []
    for accepted in (5, 7, 3, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0):
        rule.learn([Outcome(ROW, rule.most(ROW), accepted)])
        lengths.append(rule.most(ROW))
    assert lengths == [7, 9, 8, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1]
    rule.learn([Outcome(ROW, 0, 0)])
    assert rule.most(ROW) == 1, "a round without a draft says nothing"
    assert rule.most(ROW + 1) == 5, "rows have lengths of their own"
    rule.drop(ROW)
    assert rule.most(ROW) == 5
