"""Stop rules by themselves: what they compute of a distribution, when they stop, and what the adaptive one gains."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from tests.draft.worlds import ROW, WORLDS, World, confident

from paceline.draft.models import stop
from paceline.draft.models.stop import (
    Adaptive,
    Confidence,
    Fixed,
    Heuristic,
    Outcome,
    Svip,
    best_probabilities,
    entropies,
)
from paceline.errors import MethodError


def uniform(m: int, size: int = 64) -> torch.Tensor:
    """Logits [1, size] of the uniform distribution over m tokens."""
    return torch.tensor([[0.0] * m + [-math.inf] * (size - m)])


def stops(rule: stop.StopRule, logits: torch.Tensor, drafted: int = 1) -> bool:
    rule.begin([ROW])
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
        ("adaptive", {"threshold": 0.3}, "the stop rule adaptive has no threshold"),
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
    found = entropies(logits)
    assert min(found) >= 0
    assert found == pytest.approx(exact.entropy().tolist(), abs=1e-5, rel=1e-5)
    assert best_probabilities(logits) == pytest.approx(exact.probs.amax(-1).tolist(), rel=1e-5)
    turned = logits.T.contiguous().T  # a column after the other
    assert entropies(turned) == found


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["svip", "confidence", "adaptive"])
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
        rule.learn([Outcome(ROW, rule.most(ROW), accepted)], None)
        lengths.append(rule.most(ROW))
    assert lengths == [7, 9, 8, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1]
    rule.learn([Outcome(ROW, 0, 0)], None)
    assert rule.most(ROW) == 1, "a round without a draft says nothing"
    assert rule.most(ROW + 1) == 5, "rows have lengths of their own"
    rule.drop(ROW)
    assert rule.most(ROW) == 5


# The adaptive rule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_the_adaptive_rule_is_as_fast_as_the_best_policy(world):
    rates = [world.rate(Adaptive(), 500, seed)[0] for seed in range(2)]
    assert np.mean(rates) > 0.95 * world.best()
    assert world.best() >= world.best_fixed() - 1e-3


def test_where_drafting_costs_more_than_it_brings_nothing_is_drafted():
    world = WORLDS["drafting does not pay"]
    assert world.best() == 1
    for seed in range(3):
        rate, lengths = world.rate(Adaptive(), 500, seed)
        assert rate > 0.96
        assert 0 < np.count_nonzero(lengths) < 150, "a draft is tried now and then"


def test_it_drafts_again_when_that_has_become_faster():
    rule = Adaptive()
    _, lengths = World([(0.5, 0.2, 1.0)], step=0.5).rate(rule, 100, seed=0)
    assert np.mean(lengths) < 0.5
    world = World([(0.95, 0.95, 1.0)], step=0.05)
    rate, lengths = world.rate(rule, 300, seed=1, skip=600)
    assert rate > 0.9 * world.best()


def test_plain_decoding_is_tried_even_where_drafts_do_well():
    _, lengths = WORLDS["cheap steps"].rate(Adaptive(), 500, seed=0)
    assert 0 < lengths.count(0) < 15


def test_a_step_for_one_row_of_many_holds_up_all_of_them():
    """With as good a chance, a row goes on while the others do, and stops where it would be the only one."""

    def learned() -> Adaptive:
        rule = Adaptive()
        for _ in range(40):
            rows = list(range(8))
            rule.begin(rows)
            for drafted in range(1, 5):
                signals = rule.signals(confident(0.9).repeat(8, 1))
                for row, signal in zip(rows, signals, strict=True):
                    rule.stop(row, drafted, signal)
                rule.stepped(0.1)
            rule.learn([Outcome(row, 4, 4) for row in rows], 1.0)
        rule.begin(rows)
        return rule

    together, alone = learned(), learned()
    signals = together.signals(confident(0.9).repeat(8, 1))
    assert not together.stop(0, 1, signals[0])
    (signal,) = alone.signals(confident(0.9))
    assert alone.stop(0, 1, signal)


def test_rounds_that_others_had_a_part_in_teach_chances_and_no_times():
    rule = Adaptive()
    for _ in range(30):
        rule.begin([ROW])
        for drafted in (1, 2):
            stops(rule, confident(0.97), drafted)
            rule.stepped(1e-3)
        rule.learn([Outcome(ROW, 2, 0)], None)
    assert rule.most(ROW) == 40
    assert not stops(rule, confident(0.97), 4), "nothing is known of costs"
    assert stops(rule, confident(0.97), 5)
    for seconds in (1e-3, 1e-3):
        rule.begin([ROW])
        stops(rule, confident(0.97), 1)
        rule.stepped(1e-3)
        rule.learn([Outcome(ROW, 1, 0)], seconds)
    assert stops(rule, confident(0.97), 1), "and then it is known that nothing is accepted"
