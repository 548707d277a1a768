"""A random model through transformers, prompts of unequal length, and what plain decoding answers to each alone."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from tests import drafters, models, plain
from transformers import PreTrainedModel

from paceline.core.sampling import SamplingParams
from paceline.target.hf import HFTarget

NEW = 9
SAMPLED = [SamplingParams(temperature=0.9, top_k=40, max_tokens=NEW, seed=seed) for seed in range(8)]


class World(NamedTuple):
    """answers, samples: whole texts by prompt; samples with the parameters SAMPLED, in the order of the prompts."""

    model: PreTrainedModel
    target: HFTarget
    prompts: list[list[int]]
    answers: dict[tuple[int, ...], list[int]]
    samples: dict[tuple[int, ...], list[int]]

    def drafter(self, name):
        return drafters.by_name(name, self.answers)


@cache
def of(family="llama3"):
    """The token that is written most ends an answer, and is in half of the prompts: rows end at different places, and
    not in their prompt. Token 0, which would be padding elsewhere, is in all of them."""
    model = models.model(family)
    model.generation_config.eos_token_id = None
    rng = np.random.default_rng(1)
    prompts = [[0, *rng.integers(4, models.VOCAB_SIZE, n - 1).tolist()] for n in (23, 5, 34, 2, 11, 1, 60, 8)]
    late = [token for p in prompts for token in plain.generate(model, p, NEW, ())[len(p) + 5 :]]
    end = int(np.bincount(late).argmax())
    prompts = [[*p[:-1], end] if i % 2 and len(p) > 2 else p for i, p in enumerate(prompts)]
    answers = {tuple(p): plain.up_to(plain.generate(model, p, NEW, ()), end, len(p)) for p in prompts}
    samples = {
        tuple(p): [*p, *plain.decode(model, p, wish, eos=(end,)).tokens]
        for p, wish in zip(prompts, SAMPLED, strict=True)
    }
    assert len({len(text) - len(p) for p, text in answers.items()}) > 1, "all answers are equally long"
    return World(model, HFTarget(model, eos_token_ids=(end,)), prompts, answers, samples)
