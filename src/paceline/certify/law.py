"""The exact law of an answer's first tokens: outcomes with their probabilities, worked out from the model alone.

    law = law_of(reference, prompt, params, length=3)
    counts = law.count([answer.tokens for answer in answers])

The tree of prefixes is followed where it is probable; an outcome is a prefix, and stands for all answers that begin
with it and with no longer prefix of the tree. So every answer is one outcome, and nothing is approximated. Rare
outcomes are put together until each bin has at least `FINE` of the probability, and those bins again until each has
`LEAST`: few bins show a shift between them with few samples, and fine ones what moves between rare outcomes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.certify.chance import Floats, bins_of, pooled
from paceline.certify.reference import Model
from paceline.sampling import SamplingParams, probabilities

FOLLOWED, NAMED = 0.01, 0.002
"""Prefixes of at least this probability are followed to their next tokens; tokens of less have no outcome of their own.
Both as shares of all answers."""
FINE, LEAST = 0.01, 0.08
"""Least probability of a bin, and of a coarse one."""

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Law:
    """bin_of: each outcome's bin; probs: of each bin, float64 [B], summing to 1; coarse: each bin's coarse one, [B]."""

    bin_of: dict[Prefix, int]
    probs: Floats
    coarse: NDArray[np.int64]
    length: int

    @property
    def coarse_probs(self) -> Floats:
        """Probabilities of the coarse bins."""
        return bins_of(self.probs, self.coarse)

    @property
    def df(self) -> int:
        """Degrees of freedom of a test of the coarse bins."""
        return int(self.coarse.max())

    def count(self, answers: Sequence[Sequence[int]]) -> Floats:
        """How many answers fell into each bin, [B]."""
        counts = np.zeros(len(self.probs))
        for answer in answers:
            prefix = tuple(answer[: self.length])
            while prefix not in self.bin_of:
                prefix = prefix[:-1]
            counts[self.bin_of[prefix]] += 1
        return counts


def law_of(model: Model, prompt: Sequence[int], params: SamplingParams, length: int) -> Law:
    """The law of the first `length` tokens after `prompt`, sampled by `params` (which end no answer that soon)."""
    probability: dict[Prefix, float] = {(): 1.0}
    level: list[Prefix] = [()]
    for _ in range(length):
        below: list[Prefix] = []
        for prefix, law in zip(level, _next(model, prompt, level, params), strict=True):
            here = probability[prefix] * law
            named = np.flatnonzero(here >= NAMED)
            probability[prefix] = max(0.0, float(here.sum() - here[named].sum()))
            for token in named.tolist():
                probability[*prefix, token] = float(here[token])
                below.append((*prefix, token))
        level = [prefix for prefix in below if probability[prefix] >= FOLLOWED]
        if not level:
            break
    outcomes = list(probability)
    probs = np.array(list(probability.values()))
    probs /= probs.sum()
    probs[probs < 1e-12] = 0.0  # what rounding leaves of prefixes whose tokens all have outcomes of their own
    bins = pooled(probs, FINE)
    fine = bins_of(probs, bins)
    return Law(dict(zip(outcomes, bins.tolist(), strict=True)), fine, pooled(fine, LEAST), length)


def _next(model: Model, prompt: Sequence[int], prefixes: Sequence[Prefix], params: SamplingParams) -> Sequence[Floats]:
    """The law of the token after each prefix, float64 [V] each."""
    texts = [[*prompt, *prefix] for prefix in prefixes]
    logits = model.after(texts).double()
    laws = [probabilities(row.unsqueeze(0), params, [np.array(text)]) for row, text in zip(logits, texts, strict=True)]
    return [law[0].numpy() for law in laws]
