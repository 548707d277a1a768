"""jacobi writes what plain decoding writes, greedy and sampled; the loop that was released with the paper does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from tests.draft import jacobi_official as official
from tests.fakes import TableTarget
from tests.lossless_enumeration import (
    Branches,
    BranchingNoise,
    largest_difference,
    outcomes,
    plain,
)
from tests.pairs import paired

SPECS = ["jacobi", "jacobi,tree=0,retrieve=none", "jacobi,tree=8", "jacobi,match=recent,candidates=3"]
LENGTHS = (1, 2, 5, 6, 100)
"""Of prompts."""


# Exactness -----------------------------------------------------------------------------------------------------------


def check(number: int, spec: str, count: int, lengths: Sequence[int]) -> None:
    """Random table `number`: greedy text is plain decoding's, for prompts of these lengths."""
    rng = np.random.default_rng(number)
    target = TableTarget(int(rng.integers(8, 65)), order=2, seed=number)
    params = SamplingParams(max_tokens=count)
    prompts = [rng.integers(0, target.vocab_size, n).tolist() for n in lengths]
    done = Engine(target, spec, max_batch=3).generate(prompts, params)
    assert [one.tokens for one in done] == [target.plain(p, params).new_tokens.tolist() for p in prompts]


def test_greedy_text_on_random_models():
    for number in range(60):  # 4 specs, 5 lengths
        check(number, SPECS[number % len(SPECS)], 16, LENGTHS[number % len(LENGTHS) :][:1])


def divergence(count: int, vocab_size: int, new: int = 40) -> tuple[int, int, int]:
    """Of `count` random tables, how many texts are not greedy decoding's: the released loop's, the same with paths
    compared as far as they are long, ours."""
    theirs = repaired = ours = 0
    for number in range(count):
        target = TableTarget(vocab_size, order=4, seed=1000 + number, scale=1.0)
        prompt = np.random.default_rng(number).integers(0, target.vocab_size, 8).tolist()
        params = SamplingParams(max_tokens=new)
        greedy = target.plain(prompt, params).new_tokens.tolist()

        def logits(tokens: Sequence[int], target: TableTarget = target) -> np.ndarray:
            return target.logits_after(tokens).numpy()

        theirs += official.decode(logits, prompt, new) != greedy
        repaired += official.decode(logits, prompt, new, padded=False) != greedy
        (done,) = Engine(target, "jacobi").generate([prompt], params)
        ours += done.tokens != greedy
    return theirs, repaired, ours


def test_the_released_loop_leaves_the_greedy_text_and_ours_does_not():
    theirs, repaired, ours = divergence(12, 8, 30)
    assert theirs >= 3
    assert (repaired, ours) == (0, 0)


@pytest.mark.slow
def test_divergence_rates():
    """The table in docs/methods/jacobi.md."""
    for size in (8, 16, 24):
        theirs, *exact = divergence(200, size)
        print(size, theirs, *exact)
        assert theirs > 0
        assert exact == [0, 0]


# Sampling ------------------------------------------------------------------------------------------------------------


def joint(
    target: TableTarget, spec: str, prompt: Sequence[int], params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Probability of every answer of the engine with this drafter, every branch walked."""

    def run(branches: Branches) -> tuple[int, ...]:
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
