"""Reuse through a server that scores and generates: exact where it says so, over a table for a server."""

import asyncio
from collections import defaultdict

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.rollout.served import Scored, ServedRule, answer
from tests.lossless_enumeration import Branches, BranchingNoise, outcomes
from tests.rollout import toys

LENGTH = 2
"""Tokens of an answer here: each request is enumerated anew."""


class Table:
    """A server of a policy whose draws are branches of an enumeration; like verl's, it leaves out tokens that are not
    among the best."""

    def __init__(self, policy, branches):
        self.policy, self.branches = policy, branches
        self.requests = 0

    def _after(self, tokens):
        return self.policy.probabilities_after(tokens, toys.SAMPLED).tolist()

    async def score(self, tokens, begin, top):
        self.requests += 1
        places = []
        for i in range(begin, len(tokens)):
            p = self._after(tokens[:i])
            best = sorted(range(len(p)), key=lambda t: -p[t])[:top] if top else [tokens[i]]
            places.append(Scored({t: p[t] for t in best}, p[tokens[i]] if tokens[i] in best else None))
        return places

    async def generate(self, tokens, count, banned):
        self.requests += 1
        made = []
        for _ in range(count):
            p = self._after([*tokens, *made])
            made.append(self.branches.decide([0.0 if t in banned else p[t] for t in range(len(p))]))
        return made


def served(policy, old, rule, branches):
    return asyncio.run(
        answer(
            Table(policy, branches), toys.PROMPT, old, rule, budget=LENGTH, ends=frozenset(),
            noise=BranchingNoise(branches), version=1,
        )
    )


def distribution_over_a_server(world, rule):
    """The distribution of an answer of LENGTH tokens, and the mean number of reused ones."""
    distribution = defaultdict(float)
    reused = 0.0
    for tokens, weight in toys.shortened(world.old_distribution, LENGTH).items():
        entry = toys.entry_of(world.old, tokens, rule.asked)

        def one(branches, entry=entry):
            done = served(world.new, entry, rule, branches)
            return tuple(done.tokens), done.reused

        for (result, num_reused), probability in outcomes(one).items():
            distribution[result] += weight * probability
            reused += weight * probability * num_reused
    return distribution, reused


@pytest.fixture(scope="module")
def world():
    return toys.world()


@pytest.mark.parametrize(
    "rule", [ServedRule("one-hot"), *(ServedRule("residual", top=top) for top in (1, 2, 3, 4))], ids=str
)
def test_exact_rules_are_exact_over_a_server(world, rule):
    distribution, reused = distribution_over_a_server(world, rule)
    assert toys.total_variation(distribution, toys.shortened(world.new_distribution, LENGTH)) < 1e-12
    assert reused > 0.2
    assert rule.lossless


def test_the_published_rule_is_not(world):
    distribution, _ = distribution_over_a_server(world, ServedRule("plain"))
    assert toys.total_variation(distribution, toys.shortened(world.new_distribution, LENGTH)) > 0.01
    assert not ServedRule("plain").lossless


def test_ends_budgets_and_what_is_kept(world):
    """Without an old answer it is generated; a whole old answer costs no generation; an end ends it."""
    done = served(world.new, None, ServedRule(), Branches())
    assert (len(done.tokens), done.reused, done.entry.visit) == (LENGTH, 0, 0)
    assert done.entry.top_ids.shape == (LENGTH, toys.VOCAB)
    again = served(world.new, done.entry, ServedRule(), Branches())
    assert (again.tokens, again.reused, again.entry.visit) == (done.tokens, LENGTH, 1)
    np.testing.assert_allclose(again.entry.probs, toys.entry_of(world.new, again.tokens, 4).probs)
    longer = toys.entry_of(world.old, [0] * toys.LENGTH, 4)
    assert len(served(world.new, longer, ServedRule(), Branches()).tokens) == LENGTH
    unlisted = served(world.new, done.entry, ServedRule("one-hot"), Branches()).entry
    afresh = served(world.new, unlisted, ServedRule(), Branches())
    assert (afresh.reused, afresh.entry.visit) == (0, 2), "an answer that cannot be reused is an earlier answer too"


def test_rules_that_a_server_cannot_do_are_refused():
    with pytest.raises(PacelineError, match="no rule 'coupled' over a server"):
        ServedRule("coupled")
    with pytest.raises(PacelineError, match="lenience is of the rule plain alone"):
        ServedRule("residual", lenience=1.5)
