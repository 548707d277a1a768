"""Every rule's distribution, enumerated: exact ones are exact, the published one is as wrong as its formula says."""

import math

import pytest

from paceline.errors import PacelineError
from paceline.rollout.rules import RULES, OneHot, PlainNotLossless, Residual, rule_of
from tests.rollout import toys


@pytest.fixture(scope="module")
def world():
    return toys.world()


@pytest.mark.parametrize(
    ("rule", "top"), [(Residual(), 4), (Residual(), 2), (Residual(), 1), (Residual(), 0), (OneHot(), 0)],
    ids=["residual", "residual, best 2", "residual, best 1", "residual, no best", "one-hot"],
)
def test_exact_rules_have_the_new_policys_distribution(world, rule, top):
    assert toys.total_variation(world.old_distribution, world.new_distribution) > 0.1, "nothing to correct"
    distribution, reused = toys.rolled_out(world.old, world.new, rule, top)
    assert toys.total_variation(distribution, world.new_distribution) < 1e-12
    assert reused > 0.3
    assert rule.lossless


@pytest.mark.parametrize(("rule", "top"), [(Residual(), 4), (Residual(), 2), (OneHot(), 0)])
def test_they_have_it_through_acceptance_too(world, rule, top):
    distribution = toys.through_acceptance(world.old, world.new, rule, top, length=2)
    assert toys.total_variation(distribution, toys.shortened(world.new_distribution, 2)) < 1e-12


def test_more_best_tokens_keep_more_of_the_old_answer(world):
    shares = [toys.rolled_out(world.old, world.new, Residual(), top)[1] for top in (0, 1, 2, 4)]
    assert shares == sorted(shares)
    assert shares[-1] > 2 * shares[0]


@pytest.mark.parametrize("lenience", [1.0, math.exp(0.5), math.exp(1.0), math.inf, 0.0])
def test_the_published_rule_is_as_wrong_as_its_formula_says(world, lenience):
    rule = PlainNotLossless(lenience)
    distribution, reused = toys.rolled_out(world.old, world.new, rule, 0)
    assert toys.total_variation(distribution, toys.formula(world.old, world.new, lenience)) < 1e-12
    wrong = toys.total_variation(distribution, world.new_distribution)
    if lenience == 0:
        assert wrong < 1e-12
        assert reused == 0
    else:
        assert wrong > 0.02
    if lenience == math.inf:
        assert toys.total_variation(distribution, world.old_distribution) < 1e-12
    assert not rule.lossless
    assert "not lossless" in rule.name


def test_residual_without_the_residual_is_told_apart(world):
    """The enumeration would notice a rule that draws from p after a rejection: the plain one is that rule."""
    distribution, _ = toys.rolled_out(world.old, world.new, PlainNotLossless(1.0), 4)
    assert toys.total_variation(distribution, world.new_distribution) > 0.02


def test_names_and_leniences():
    assert [rule_of(name).lossless for name in RULES] == [name != "plain" for name in RULES]
    with pytest.raises(PacelineError, match="residual has no lenience, for it is exact"):
        rule_of("residual", lenience=1.5)
    with pytest.raises(PacelineError, match=r"no rollout rule 'residal'\. Did you mean 'residual'\?"):
        rule_of("residal")
    with pytest.raises(PacelineError, match="lenience is -1"):
        rule_of("plain", lenience=-1)
    with pytest.raises(PacelineError, match="lenience is nan"):
        rule_of("plain", lenience=math.nan)
