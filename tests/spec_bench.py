"""Questions of Spec-Bench as prompts, and why two answers to one part."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import zip_longest
from typing import NamedTuple

import torch


def questions(file, count):
    """First turns of `count` questions, as many of each category as there are until all have the same number."""
    by_category = defaultdict(list)
    for line in file.read_text().splitlines():
        question = json.loads(line)
        by_category[question["category"]].append(question["turns"][0])
    taken = [text for row in zip_longest(*by_category.values()) for text in row if text is not None]
    return taken[:count]


def encode(tokenizer, text, room):
    """Tokens of a chat that asks `text`. A text too long for `room` tokens loses its end, as much as must be; the
    words of the chat template stay whole."""
    while True:
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        if len(ids) <= room:
            return ids
        text = text[: min(len(text) - 1, len(text) * room // len(ids))]


class Parting(NamedTuple):
    """Where two answers part, and whether float32 is to blame: both tokens are best, as far as its rounding tells."""

    told: str
    tie: bool


def parting(models, ids, one, other):
    """Of two answers to `ids` that are not the same. models: in float32, and in float64, which says what is true."""
    at = next(i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b)
    both = [*one[at : at + 1], *other[at : at + 1]]
    logits, true = (model(torch.tensor([[*ids, *one[:at]]])).logits[0, -1].double() for model in models)
    noise, gap = float((logits - true).abs().max()), float(true.max() - true[both].min())
    told = f"token {at}: {both}; {gap:.2g} below the best, and float32 is off by up to {noise:.2g}"
    return Parting(told, len(both) == 2 and gap <= 2 * noise)
