"""Lossless on weights of eight and four bits: with any drafter the text is what this very model writes alone.

Products have one order of sums, so with `exact` this is so bit for bit, sampled too. A draft of fewer bits leaves the
target untouched."""

from functools import cache

import numpy as np
import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.formats.precision import quantised
from paceline.formats.shape import weight_shapes
from paceline.target.decoder import Decoder
from paceline.target.load import load
from tests import drafters, models
from tests.pairs import paired
from tests.plain import texts

NEW = 14
Answers = dict[tuple[int, ...], list[int]]


def wish(sampled):
    return SamplingParams(temperature=0.8 if sampled else 0.0, max_tokens=NEW, seed=4)


RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(4, models.VOCAB_SIZE, n).tolist() for n in (70, 5, 34, 1, 61, 8)]


@cache
def target_of(word, dtype, exact):
    """A model in blocks."""
    model = models.model("qwen3")
    weights = {name: model.state_dict()[name] for name in weight_shapes(model.config)}
    target = Decoder(model.config, quantised(weights, word), dtype=dtype)
    if exact:
        target.make_exact()
    return target


@cache
def alone(target, sampled):
    """Prompts with what plain decoding writes after each of them alone."""
    engine = Engine(target, max_batch=1)
    return {tuple(p): [*p, *engine.generate([p], wish(sampled))[0].tokens] for p in PROMPTS}


DRAFTERS = ["oracle chain", "oracle tree", "early exit", "recycling", "jacobi"]


@pytest.mark.parametrize(
    ("name", "dtype", "word"),
    paired(
        [*((name, torch.bfloat16) for name in DRAFTERS), ("early exit", torch.float32), ("oracle tree", torch.float32)],
        ("int8", "int4"),
    ),
)
def test_exact_answers_are_plain_ones(name, word, dtype):
    """Sampled ones: any bit of a logit may change a token."""
    target = target_of(word, dtype, exact=True)
    answers = alone(target, sampled=True)
    for batch in (1, 4) if name == "oracle tree" else (4,):
        engine = Engine(target, drafters.by_name(name, answers), max_batch=batch, prefill_chunk=32)
        out = engine.generate(PROMPTS, wish(True))
        assert texts(PROMPTS, out) == list(answers.values())
        if "oracle" in name:
            assert sum(sum(done.stats.accepted[1:]) for done in out) > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_in_float32_is_the_plain_one(name):
    target = target_of("int8", torch.float32, exact=False)
    answers = alone(target, sampled=False)
    engine = Engine(target, drafters.by_name(name, answers), max_batch=3)
    assert texts(PROMPTS, engine.generate(PROMPTS, wish(False))) == list(answers.values())


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_a_draft_of_fewer_bits_changes_nothing_and_is_what_it_says(tmp_path, word):
    models.make("llama2", tmp_path)
    target = load(tmp_path, dtype="float32")
    prompts = [[5, 6, 7, 8], [40, 41, 42]]
    alone = [done.tokens for done in Engine(target).generate(prompts, wish(False))]
    engine = Engine(target, f"model:{tmp_path},dtype={word},draft=3")
    assert engine.drafter.model.network.quantised is not None
    out = engine.generate(prompts, wish(False))
    assert [done.tokens for done in out] == alone
    accepted = sum(sum(done.stats.accepted[1:]) for done in out)
    assert accepted > 0
    whole = Engine(target, f"model:{tmp_path},draft=3")
    assert accepted <= sum(sum(done.stats.accepted[1:]) for done in whole.generate(prompts, wish(False)))
    assert 0 < engine.drafter.weight_bytes < whole.drafter.weight_bytes / 3
