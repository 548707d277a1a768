"""jacobi writes what plain decoding writes, greedy and sampled."""

import numpy as np
import pytest

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from tests.fakes import TableTarget
from tests.lossless_enumeration import BranchingNoise, largest_difference, outcomes, plain
from tests.pairs import paired

SPECS = ["jacobi", "jacobi,tree=0,retrieve=none", "jacobi,tree=8", "jacobi,match=recent,candidates=3"]
LENGTHS = (1, 2, 5, 6, 100)
"""Of prompts."""


# Exactness -----------------------------------------------------------------------------------------------------------


def test_greedy_text_on_random_models():
    for number in range(60):  # 4 specs, 5 lengths
        rng = np.random.default_rng(number)
        target = TableTarget(int(rng.integers(8, 65)), order=2, seed=number)
        params, prompt = SamplingParams(max_tokens=16), rng.integers(0, target.vocab_size, LENGTHS[number % 5]).tolist()
        (done,) = Engine(target, SPECS[number % 4]).generate([prompt], params)
        assert done.tokens == target.plain(prompt, params).new_tokens.tolist()


# Sampling ------------------------------------------------------------------------------------------------------------


def joint(target, spec, prompt, params):
    """Probability of every answer of the engine with this drafter, every branch walked."""

    def run(branches):
        engine = Engine(target, spec)
        one = engine.add(prompt, params)
        one.noise = BranchingNoise(branches)
        while engine.has_work:
            engine.step()
        assert one.finish_reason == "length", one.error
        return tuple(one.new_tokens.tolist())

    return outcomes(run)


@pytest.mark.parametrize(
    ("spec", "warping"),
    paired(
        ["jacobi,tree=6,candidates=3", "jacobi,tree=0,window=2"],
        [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.8}],
    ),
)
def test_sampled_text_has_the_joint_law_of_ancestral_sampling(spec, warping):
    """Three tokens: the first from the prompt, then two, of which drafts may be accepted."""
    target, prompt = TableTarget(5, order=2, seed=8, scale=1.0), [0, 1, 2, 0, 1]
    params = SamplingParams(max_tokens=3, **warping)
    expected = plain(target, prompt, params, 3)
    assert len(expected) > 20
    assert largest_difference(joint(target, spec, prompt, params), expected) < 1e-9
