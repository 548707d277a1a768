"""Bugs that are planted are found, and lossless engines are not accused."""

from functools import cache
from time import process_time

import numpy as np
import pytest

from paceline.certify.certificate import certify
from paceline.certify.command import local
from paceline.certify.exact import distribution_of
from paceline.certify.greedy import PASSES
from paceline.certify.options import Scope
from paceline.certify.page import findings, page
from paceline.core.sampling import SamplingParams
from paceline.net.completion import Completion
from paceline.net.endpoint import Endpoint
from tests.certify.planted import BUGS, Tolerant, World, planted

GREEDY = ("mask off by one", "positions off by one", "padding accepted", "cache not rolled back")
"""Bugs that greedy answers show; the others but the one of stop strings show in sampled ones, most by their seeds."""
QUICK = Scope(shift=0.4, requests=160, max_tokens=24)


@cache
def world(seed=0, precision=None):
    return World(seed, precision=precision)


def test_the_distribution_of_first_tokens_is_exact():
    """Against samples drawn token by token from the reference, without engine or drafts."""
    w, params = world(), SamplingParams(temperature=0.8, top_p=0.95, max_tokens=3, ignore_eos=True)
    probs = distribution_of(w.exact().rounding, w.starts[0], params, 2)
    assert probs.probs.sum() == pytest.approx(1)
    assert len(probs.probs) > 3
    exact = distribution_of(w.exact().rounding, w.starts[0], params, 1)
    first = {}
    for outcome, bin in exact.bin_of.items():
        first.setdefault(bin, []).append(outcome)
    text = np.array(w.starts[0])
    from paceline.core.sampling import probabilities

    probs = probabilities(w.alone.after([w.starts[0]]).double(), params, [text])[0].numpy()
    named = {outcome[0] for outcome in exact.bin_of if outcome}
    for bin, outcomes in first.items():
        there = sum(probs[o[0]] if o else probs.sum() - probs[list(named)].sum() for o in outcomes)
        assert exact.probs[bin] == pytest.approx(there, abs=1e-9)


class Echo(Endpoint):
    """Answers with the prompt, and with the temperature."""

    def __init__(self, batch, mixes):
        super().__init__(batch)
        self.mixes, self.takes = mixes, frozenset({"max_tokens", "temperature", "seed"})

    async def complete(self, body):
        return Completion(tokens=[*body["prompt"], int(body["temperature"])])


@pytest.mark.parametrize(("batch", "mixes", "companies"), [
    (1, False, ["alone"]), (8, False, ["alone", "in batches of 8"]),
    (8, True, ["alone", "in batches of 8", "between rows that sample"]),
])
def test_an_engine_is_asked_in_every_way_that_it_takes(batch, mixes, companies):
    engine = Echo(batch, mixes)
    fitting = [one for one in PASSES if one.fits(engine)]
    assert [one.company.format(batch=batch) for one in fitting] == companies
    for one in fitting:
        replies = one.ask(engine, [[5], [6], [7]], 4)
        assert [reply.tokens for reply in replies] == [[5, 0], [6, 0], [7, 0]]


@pytest.mark.parametrize("bug", ["mask off by one", "stop string missed inside a draft", "argmax root when sampling"])
def test_a_planted_bug_is_found(bug):
    w = world()
    plan = Scope(shift=0.1, max_tokens=24, requests=0)
    with planted(bug, w) as engine:
        found = certify(engine, w.exact(), plan)
    assert not found["lossless"]
    assert found["verdict"] == "not lossless"
    where = "stops" if bug.startswith("stop") else "greedy"
    assert not found[where]["lossless"]
    assert bool(found["greedy"]["bugs"]) == (where == "greedy")
    assert findings(found)[0].startswith({"stops": "Stop", "greedy": "Token by token"}[where])


@pytest.mark.parametrize("bug", [
    "cache not rolled back", pytest.param("argmax root when sampling", marks=pytest.mark.slow),
])
def test_a_planted_bug_is_found_in_a_quantised_model(bug):
    """Whose reference is our own plain decoding: without drafts the bug is not in it."""
    w = world(0, "int8")
    assert w.target.quantised
    plan = Scope(shift=0.1, max_tokens=24, requests=None if bug.startswith("argmax") else 0)
    with planted(bug, w) as engine:
        found = certify(engine, w.exact(), plan)
    assert not found["greedy" if bug in GREEDY else "sampled"]["lossless"]


def test_a_quantised_model_is_certified():
    w = world(0, "int8")
    clean = certify(local(w.target, w.tokenizer, "sam"), w.exact(), QUICK)
    assert clean["lossless"]
    assert clean["greedy"]["tokens"] > 100


def test_a_lossless_engine_is_certified():
    w = world()
    found = certify(local(w.target, w.tokenizer, "sam"), w.exact(draft="sam"), QUICK)
    assert found["lossless"]
    assert found["greedy"]["tokens"] > 100
    assert found["stops"]["answers"] > 0
    assert found["sampled"]["requests"] >= 100
    assert found["power"]["detectable"] <= 0.4
    assert found["power"]["hidden"] < 0.001  # in float32
    assert found["sampled"]["draft_tokens"] > 0
    assert found["sampled"]["long"]["tokens"] >= 48
    accepted = found["acceptance"]
    assert accepted["tokens_a_round"] == pytest.approx(accepted["reference"], abs=0.1)
    assert found["greedy"]["ties"] == found["greedy"]["ties_of_rounding"] == 0
    assert "Lossless, as far as was tested" in page({"target": "tiny", "environment": {}, **found})


def test_a_drafter_that_copies_is_reached_when_sampling():
    """Short answers to short prompts have nothing to copy; long ones do, and are read token by token."""
    w = world()
    with planted("every n-gram draft accepted", w) as engine:
        found = certify(engine, w.exact(), Scope(shift=0.2, requests=320, max_tokens=48))
    assert found["verdict"] == "not lossless"
    assert found["sampled"]["draft_tokens"] > 0
    assert "long" in found["sampled"]
    assert any("the token that followed the last time came" in one for one in findings(found))


def test_an_engine_that_accepts_what_is_nearly_the_best_has_too_many_ties():
    """Each of them by itself may be rounding; plain decoding in bfloat16 has as few as the model."""
    w, prompts = world(0, "bfloat16"), [[one, two] for one in range(10, 26) for two in (40, 50)]
    plan = Scope(requests=0, max_tokens=24)
    tolerant = local(w.target, w.tokenizer, "none", rule=Tolerant(), batch=1)
    found = certify(tolerant, w.exact(prompts), plan)["greedy"]
    assert found["p_of_ties"] < 1e-4, (found["ties"], found["ties_of_rounding"])
    assert not found["lossless"]
    plain = certify(local(w.target, w.tokenizer, "none", batch=1), w.exact(prompts[:12]), plan)["greedy"]
    assert plain["lossless"], plain["findings"]


def test_too_few_requests_cannot_say():
    w = world()
    found = certify(
        local(w.target, w.tokenizer, "sam"), w.exact(), Scope(requests=40, max_tokens=16)
    )
    assert found["verdict"] == "cannot say"
    assert not found["lossless"]
    assert "would be missed" in found["why"]
    assert "Cannot say: " in page({"target": "tiny", "environment": {}, **found})


LEAST = {"residual not used": 0, "stop string missed inside a draft": 2}
"""In how many worlds of three a bug is found in bfloat16, where not in all: rounding hides the one, and the other needs
an answer whose stop string a draft holds."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("bug", BUGS)
def test_every_planted_bug_is_found(bug, precision):
    """With three worlds each; prints the rate."""
    found, seconds = [], []
    for seed in range(3):
        w, began = world(seed, precision), process_time()
        with planted(bug, w) as engine:
            found.append(not certify(engine, w.exact(), Scope(shift=0.04, seed=seed))["lossless"])
        seconds.append(process_time() - began)
    print(f"{bug}: {sum(found)} of {len(found)}, {max(seconds):.0f} s of processor time at most")
    assert sum(found) >= (LEAST.get(bug, 3) if precision else 3)


CLEAN = ["none", "sam", "suffix", "prompt-lookup", "hierarchy", "recycling", "jacobi", "ngram-pool", "coupled"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", CLEAN)
def test_no_clean_configuration_is_accused(name, batch, precision):
    """Forty configurations; prints the smallest p-value of each."""
    w = world(batch, precision)
    engine = local(w.target, w.tokenizer, w.coupled if name == "coupled" else name, batch=batch)
    # Drafts change no token of a seed: every configuration has seeds of its own.
    seed = 100 * CLEAN.index(name) + 10 * batch + (precision is None)
    found = certify(engine, w.exact(), Scope(shift=0.05, seed=seed))
    print(f"{name}, batch {batch}: {found['sampled']['requests']} requests, p {found['sampled']['p']:.3f}")
    assert found["lossless"], findings(found)
