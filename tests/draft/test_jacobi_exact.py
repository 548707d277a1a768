"""jacobi writes what plain decoding writes, greedy and sampled; the loop that was released with the paper does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.engine.accept import Accepted, accept
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from tests import models, native
from tests.draft import jacobi_official as official
from tests.draft.tables import counting
from tests.fakes import TableTarget
from tests.lossless_enumeration import (
    Branches,
    BranchingRandom,
    fixed,
    largest_difference,
    outcomes,
    plain,
    speculative,
)

SPECS = ["jacobi", "jacobi,tree=0,retrieve=none", "jacobi,tree=8,retrieve=sam", "jacobi,match=recent,candidates=3"]
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


def test_greedy_text_on_200_random_models():
    for number in range(200):  # 4 specs, 5 lengths
        check(number, SPECS[number % len(SPECS)], 16, LENGTHS[number % len(LENGTHS) :][:1])


@pytest.mark.slow
def test_greedy_text_on_200_random_models_at_length():
    for number in range(200):
        for spec in SPECS:
            check(number, spec, 60, LENGTHS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_text_on_200_random_transformers():
    for number in range(200):
        size = int(np.random.default_rng(number).integers(8, 65))
        made = models.model("llama3", number, vocab_size=size, num_hidden_layers=1, **native.TINY)
        target = native.of(made, eos=())
        rng = np.random.default_rng(number)
        prompts = [rng.integers(0, size, n).tolist() for n in LENGTHS]
        params = SamplingParams(max_tokens=24)
        expected = [one.tokens for one in Engine(target, "none").generate(prompts, params)]
        for spec in SPECS[number % 2 :: 2]:
            assert [one.tokens for one in Engine(target, spec).generate(prompts, params)] == expected


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


@pytest.mark.parametrize("spec", ["jacobi", "jacobi,tree=0,retrieve=sam"])
def test_an_end_at_every_place_of_a_block(spec):
    target, offsets = counting(40), set()
    for end in range(10, 30):
        for way in ("stop", "eos", "length"):
            ends = {"stop": {"stop_token_ids": [end]}, "eos": {}, "length": {"max_tokens": end - 4}}[way]
            target.eos_token_ids = (end,) if way == "eos" else ()
            engine = Engine(target, spec)
            one = engine.add([*range(40), *range(5)], SamplingParams(**{"max_tokens": 60, **ends}))  # type: ignore[arg-type]
            gained: list[int] = []
            while engine.has_work:
                gained += [len(delta.tokens) for delta in engine.step() if delta.tokens]
            assert one.new_tokens.tolist() == list(range(5, end + 1))
            offsets.add(gained[-1])
    assert offsets >= {1, 2, 3, 4, 5, 6}


# Sampling ------------------------------------------------------------------------------------------------------------


def joint(
    target: TableTarget, spec: str, prompt: Sequence[int], params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Probability of every answer of the engine with this drafter, every branch walked."""

    def run(branches: Branches) -> tuple[int, ...]:
        engine = Engine(target, spec)
        one = engine.add(prompt, params)
        one.random = BranchingRandom(branches)
        while engine.has_work:
            engine.step()
        assert one.finish_reason == "length", one.error
        return tuple(one.new_tokens.tolist())

    return outcomes(run)


@pytest.mark.parametrize("spec", ["jacobi,tree=6,candidates=3", "jacobi,tree=0,window=2"])
@pytest.mark.parametrize("warping", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.8}])
def test_sampled_text_has_the_joint_law_of_ancestral_sampling(spec, warping):
    """Three tokens: the first from the prompt, then two, of which drafts may be accepted."""
    target, prompt = TableTarget(5, order=2, seed=8, scale=1.0), [0, 1, 2, 0, 1]
    params = SamplingParams(max_tokens=3, **warping)
    expected = plain(target, prompt, params, 3)
    assert len(expected) > 20
    assert largest_difference(joint(target, spec, prompt, params), expected) < 1e-9


def a_sample_a_path(requests, trees, logits):
    """A rule that draws a token for each node anew for every path to a leaf, and takes the path that agrees longest."""
    [request], [tree], [scores] = requests, trees, logits
    parents = tree.parent.tolist()
    best: Accepted | None = None
    for leaf in sorted(set(range(len(tree))) - set(parents)):
        path = [leaf]
        while path[0]:
            path.insert(0, parents[path[0]])
        said = [request.random.draft(scores[node].softmax(-1)) for node in path]
        count = 0
        while count + 1 < len(path) and tree.tokens[path[count + 1]] == said[count]:
            count += 1
        if best is None or count + 1 > len(best.path):
            best = Accepted(path[: count + 1], said[: count + 1])
    return [best]


def test_one_sample_a_path_would_bend_the_distribution():
    target, prompt, params = TableTarget(3, order=2, seed=1, scale=1.0), [0, 1], SamplingParams(temperature=1.0)
    expected = plain(target, prompt, params, 2)
    draft = fixed(target, [0, 0])
    assert largest_difference(speculative(target, prompt, params, draft, 2, accept), expected) < 1e-9
    assert largest_difference(speculative(target, prompt, params, draft, 2, a_sample_a_path), expected) > 0.02
