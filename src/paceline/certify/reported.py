"""Sampled tokens by the log-probabilities that a server reports with them.

Servers report log-probabilities before temperature, penalties and filters; these are applied here to the best tokens
that are reported, and what is left of the probability is taken as tokens no better than the last of them. What that
leaves open is a range, as rounding is."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import torch

from paceline.certify.conditional import Conditional
from paceline.certify.stats import Floats
from paceline.engine.sampling import SamplingParams, probabilities

BORDER = 0.005  # by how much the probability inside top-p may be off: rounding decides about the last token
REST = 200  # most tokens that stand for what is not among the best
Reported = tuple[str, float, list[tuple[str, float]]]
"""A token, its log-probability, and the best ones at its place with theirs, best first."""


class Words(dict[str, int]):
    """A number for every token's text. Number 0 is all that is not among the best of a place."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self) + 1
        return self[text]


def read_places(
    places: Sequence[Reported], fields: Mapping[str, Any], counts: Conditional, words: Words, group: str, *,
    raw: bool = True,
) -> None:  # fmt: skip
    """Add the places of a sampled reply to `counts`.

    fields  of the request: temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty.
    words   the same for all replies in `counts`. group: how they were sampled, in words.
    raw     the server reports log-probabilities before all these, see `is_raw`."""
    text: list[int] = []
    for said, _, top in places:
        best, token = [words[one] for one, _ in top], words[said]
        probs = _worlds([logprob for _, logprob in top], best, Counter(text), fields if raw else {})
        worlds = np.zeros((len(probs), len(words) + 1))
        for column, word in enumerate((*best, 0)):  # two tokens may have one text
            worlds[:, word] += probs[:, column]
        counts.add(group, worlds, text, 0, token if token in best else 0)
        text.append(token)


def _worlds(logprobs: Sequence[float], best: Sequence[int], seen: Counter[int], fields: Mapping[str, Any]) -> Floats:
    """What the next token is drawn from, [W, len(best) + 1]; the last column holds all that is not among `best`."""
    rest = max(0.0, 1 - float(np.exp(logprobs).sum()))
    number = min(REST, ceil(rest / max(np.exp(logprobs[-1]), 1e-9)))
    presence, frequency = fields.get("presence_penalty", 0.0), fields.get("frequency_penalty", 0.0)
    shifted = np.array(logprobs) - [presence * (seen[one] > 0) + frequency * seen[one] for one in best]
    with_rest = np.append(shifted, [np.log(rest / number)] * number if number else [])
    filters = {name: fields[name] for name in ("top_k", "top_p", "min_p") if name in fields}
    params = SamplingParams(temperature=fields.get("temperature", 1.0), **filters)
    # Below temperature 1 the rest counts the less the more tokens share it, and penalties may lower it.
    exactly = params.temperature == 1 and not presence and not frequency
    worlds = []
    for scores in (with_rest,) if exactly else (with_rest, shifted):
        for top_p in {params.top_p, min(1.0, params.top_p + BORDER), params.top_p - BORDER * (params.top_p < 1)}:
            logits = torch.tensor(scores, dtype=torch.float32)[None]
            probs = probabilities(logits, replace(params, top_p=top_p), [])[0].numpy()
            worlds.append(np.append(probs[: len(best)], probs[len(best) :].sum()))
    return np.stack(worlds)


def is_raw(hot: Sequence[Reported], cold: Sequence[Reported]) -> bool:
    """Whether a server reports log-probabilities before the temperature: a prompt's first token at 1 and at 0.5."""
    before, after = dict(hot[0][2]), dict(cold[0][2])
    best = max(before, key=before.__getitem__)
    return abs(after.get(best, 0.0) - before[best]) < abs(before[best]) / 4
