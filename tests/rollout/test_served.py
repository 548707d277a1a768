"""Reuse through a server that scores and generates: exact where it says so, over a table for a server."""

import asyncio
import math
import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.net.completion import Completion
from paceline.net.endpoint import Endpoint
from paceline.rollout.served import BANNED, ServedRule, answer, generate, score
from tests.lossless_enumeration import Branches, BranchingNoise, outcomes
from tests.rollout import toys

LENGTH = 2
"""Tokens of an answer here: each request is enumerated anew."""


class Table(Endpoint):
    """A server of a policy whose draws are branches of an enumeration.

    own  whether a token of the prompt is reported where it is not among the best: by vLLM's server, not by verl's."""

    name = "table"

    def __init__(self, policy, branches, own=False):
        super().__init__()
        self.policy, self.branches, self.own = policy, branches, own

    def _after(self, tokens):
        return self.policy.probabilities_after(tokens, toys.SAMPLED).tolist()

    async def complete(self, body):
        tokens, top = body["prompt"], body.get("prompt_logprobs")
        if top is not None:
            scores = [self._score(tokens[:i], tokens[i], top) for i in range(1, len(tokens))]
            return Completion(prompt_logprobs=[{}, *scores])
        assert (body["temperature"], body["return_token_ids"]) == (1.0, True)
        made, banned = [], {int(token) for token, bias in body.get("logit_bias", {}).items() if bias == BANNED}
        for _ in range(body["max_tokens"]):
            p = self._after([*tokens, *made])
            made.append(self.branches.decide([0.0 if t in banned else p[t] for t in range(len(p))]))
        return Completion(tokens=made)

    def _score(self, before, token, top):
        p = self._after(before)
        best = sorted(range(len(p)), key=lambda t: -p[t])[:top]
        return {t: math.log(p[t]) for t in dict.fromkeys([*best, *([token] if self.own or not top else [])])}


def served(policy, old, rule, branches, own=False):
    return asyncio.run(
        answer(
            Table(policy, branches, own), toys.PROMPT, old, rule, budget=LENGTH, ends=frozenset(),
            noise=BranchingNoise(branches), version=1,
        )
    )


def distribution_over_a_server(world, rule, own=False):
    """The distribution of an answer of LENGTH tokens, and the mean number of reused ones."""
    distribution = defaultdict(float)
    reused = 0.0
    for tokens, weight in toys.shortened(world.old_distribution, LENGTH).items():
        entry = toys.entry_of(world.old, tokens, rule.asked)

        def one(branches, entry=entry):
            done = served(world.new, entry, rule, branches, own)
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
@pytest.mark.parametrize("own", [False, True], ids=["as verl reports", "as vLLM reports"])
def test_exact_rules_are_exact_over_a_server(world, rule, own):
    distribution, reused = distribution_over_a_server(world, rule, own)
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


def test_vllms_server_is_read_by_token_ids():
    """As vLLM writes log-probabilities of a prompt: none of the first token, and its own token beside the best."""
    one = {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
    completion = Completion()
    completion.take({"choices": [{"text": "", "prompt_logprobs": [None, {"7": one, "3": {"logprob": -2.0}}]}]})
    assert completion.prompt_logprobs == [{}, {7: -0.5, 3: -2.0}]


class VerlClient:
    """verl's client: entry i of the scores is about token i + 1, and the last one is padding."""

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.params = sampling_params
        fields = {}
        if "prompt_logprobs" in sampling_params:
            fields["prompt_ids"] = [[5, 6], [6, 5], [0, 0]]
            fields["prompt_logprobs"] = [[-0.1, -3.0], [-0.2, -2.0], [0.0, 0.0]]
        return SimpleNamespace(token_ids=[8, 9], extra_fields=fields)


def test_verls_client_is_an_endpoint(monkeypatch):
    loop = SimpleNamespace(AgentLoopBase=object, AgentLoopMetrics=None, AgentLoopOutput=None)
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "verl.experimental", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "verl.experimental.agent_loop", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "verl.experimental.agent_loop.agent_loop", loop)
    from paceline.rollout.verl import VerlServer

    client = VerlClient()
    server = VerlServer(client, {"temperature": 0.5, "top_p": 0.9})
    assert asyncio.run(generate(server, [1, 2], 7, [4])) == [8, 9]
    assert client.params == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "logit_bias": {4: BANNED}}
    (first, second) = asyncio.run(score(server, [1, 5, 2], 1, 2))
    assert (first.best, first.token) == ({5: math.exp(-0.1), 6: math.exp(-3.0)}, math.exp(-0.1))
    assert (second.best, second.token) == ({6: math.exp(-0.2), 5: math.exp(-2.0)}, None)
    monkeypatch.delitem(sys.modules, "paceline.rollout.verl")
