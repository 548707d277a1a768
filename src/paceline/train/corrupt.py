"""Noise in rows of conversations: a few tokens of an answer are replaced by tokens from before, the labels stay.

Wang et al. 2024, "Make Some Noise" (arXiv 2406.17404), section 3.1, "ahead noise": from left to right each token of a
segment becomes one drawn from all before it, those already replaced among them, so that only what is known when a slot
is filled in decoding can stand there. A model that learns the clean labels from such rows learns to predict past wrong
inputs.

Knows token ids and labels; nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.errors import PacelineError
from paceline.train.loop import Batch, Stream
from paceline.train.loss import IGNORE

SOURCES = ("prefix", "vocabulary", "mask")
"""Where a replaced token comes from: all before it (the paper), the whole vocabulary, or it is one token always."""


@dataclass(frozen=True)
class NoiseConfig:
    """How answers are corrupted."""

    lengths: tuple[int, int] = (5, 5)  # least and most tokens of a segment; (0, 0): no noise
    every: int = 0  # a segment for each so many tokens of an answer; 0: one an answer, as in the paper
    gap: int = 8  # least clean tokens between two segments
    share: float = 1.0  # of the answers that are corrupted
    source: str = "prefix"
    mask: int = 0  # the token of source "mask"
    vocab_size: int = 0  # for source "vocabulary"

    def __post_init__(self) -> None:
        least, most = self.lengths
        if not 0 <= least <= most or (least == 0) != (most == 0):
            raise PacelineError(f"noise of {least} to {most} tokens: give 0, or 1 or more, as in 5 or 3-6")
        if self.every < 0 or self.gap < 0 or not 0 <= self.share <= 1:
            raise PacelineError("noise: every and gap are 0 or more, the share is 0 to 1")
        if self.source not in SOURCES:
            raise PacelineError(f"there is no noise from {self.source!r}; there is {', '.join(SOURCES)}")


class Answer(NamedTuple):
    """An answer in a row. Its conversation begins at `begin`, its inputs are first..end - 1; they leave out its last
    token, which is only ever a label."""

    begin: int
    first: int
    end: int


def answers_in(ids: np.ndarray, labels: np.ndarray) -> Iterator[Answer]:
    """The answers in a row of packed conversations; ids, labels [T], labels shifted as in `rows.py`."""
    length, begin, at = len(ids), 0, 0
    while at < length:
        if labels[at] == IGNORE:
            at += 1
            continue
        end = at + 1
        # A label and the next input differ where the next conversation begins without a prompt of its own.
        while end < length and labels[end] != IGNORE and ids[end] == labels[end - 1]:
            end += 1
        yield Answer(begin, at + 1, end)
        begin = at = end


def segments(answer: Answer, config: NoiseConfig, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(start, length) of the segments to corrupt, left to right, placed uniformly; fewer where there is no room."""
    room = answer.end - answer.first
    count = max((room + 1) // config.every, 1) if config.every else 1
    least, most = config.lengths
    lengths = rng.integers(least, most + 1, count).tolist()
    while lengths and (free := room - sum(lengths) - config.gap * (len(lengths) - 1)) < 0:
        lengths.pop()
    starts, moved = [], answer.first
    offsets = sorted(rng.integers(0, free + 1, len(lengths)).tolist()) if lengths else []
    for offset, length in zip(offsets, lengths, strict=True):
        starts.append((moved + offset, length))
        moved += length + config.gap
    return starts


def corrupt(
    ids: np.ndarray, answer: Answer, where: Sequence[tuple[int, int]], config: NoiseConfig, rng: np.random.Generator
) -> None:
    """Replace the tokens of the segments `where`, (start, length) each, of `ids` [T] in place."""
    for start, length in where:
        for at in range(start, start + length):
            if config.source == "prefix":
                ids[at] = ids[rng.integers(answer.begin, at)]
            else:
                ids[at] = config.mask if config.source == "mask" else rng.integers(config.vocab_size)


def noisy(ids: np.ndarray, labels: np.ndarray, config: NoiseConfig, rng: np.random.Generator) -> np.ndarray:
    """A row [T] with noise in its answers; the labels are what they were. Answers too short for it stay as they are."""
    corrupted = ids.copy()
    for answer in answers_in(ids, labels):
        if config.lengths[1] and rng.random() < config.share:
            corrupt(corrupted, answer, segments(answer, config, rng), config, rng)
    return corrupted


class Noisy:
    """A stream of batches with noise in them: the seed's and the step's, in every process and after a resume."""

    def __init__(self, stream: Stream, config: NoiseConfig, seed: int) -> None:
        self.stream, self.config, self.seed = stream, config, seed
        self.step = 0

    def next(self, progress: float) -> Batch:
        batch = self.stream.next(progress)
        rng = np.random.default_rng([self.seed, self.step])
        self.step += 1
        pairs = zip(batch["input_ids"].numpy(), batch["labels"].numpy(), strict=True)
        ids = np.stack([noisy(ids, labels, self.config, rng) for ids, labels in pairs])
        return {**batch, "input_ids": torch.from_numpy(ids)}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.stream.load_state_dict(state["stream"])
