"""The tokens that the target is likeliest to take, by a drafter's distribution: for greedy requests the most probable
tokens, else those that the request's noise prefers (`paceline.core.noise`).

A drafter with a model asks `Likeliest`, which knows the columns of its logits; others call `ranked`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import Protocol

import numpy as np
import torch

from paceline.core.request import Request
from paceline.core.sampling import best_of_rows, probabilities
from paceline.core.tree import IntArray
from paceline.errors import PacelineError
from paceline.kernels.rows import top_tokens

POWER = 0.4
"""Exponent in the chances of `likeliest_columns`."""


class Place(Protocol):
    """A place in an answer: its request, its output position, and all tokens before it, int64 [n]."""

    @property
    def row(self) -> Request: ...
    @property
    def position(self) -> int: ...
    @property
    def context(self) -> IntArray: ...


class Likeliest:
    """Finds the likeliest tokens by logits whose columns are some of the tokens.

    vocab_size  number of all tokens. columns: the columns' tokens, int64 [K]; None: all."""

    def __init__(self, vocab_size: int, columns: torch.Tensor | None):
        self.vocab_size, self.columns = vocab_size, columns

    def next(self, places: Sequence[Place], logits: torch.Tensor) -> list[int | None]:
        """The likeliest token of each place, by its row of logits [R, K] after its request's parameters; None where
        these leave no distribution."""
        best = best_of_rows(logits) if any(_is_plain(place.row) for place in places) else []
        return [
            self._token(best[r]) if _is_plain(place.row) else self._warped(place, logits[r : r + 1])
            for r, place in enumerate(places)
        ]

    def _warped(self, place: Place, logits: torch.Tensor) -> int | None:
        row, shifts = place.row, place.row.params.shifts_logits
        try:
            if shifts:  # Penalties go by token, not by column.
                logits = self._spread(logits)
            scores = probabilities(logits, row.params, [place.context] if shifts else [])[0]
        except PacelineError:  # The logits have NaN, or every column is banned.
            return None
        if row.params.is_greedy:
            return int(scores.argmax())
        tokens, _ = row.noise.guess(scores, place.position, 1, None if shifts else self._tokens)
        return (int(tokens[0]) if shifts else self._token(int(tokens[0]))) if len(tokens) else None

    def best(self, row: Request, position: int, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` likeliest tokens by each row of logits [n, K], best first, and the logarithms of their chances;
        both [n, count]. position: output position of the tokens."""
        if row.params.is_greedy:
            return top_with_logprobs(logits, count, self.columns)
        columns, logs = likeliest_columns(row, [position] * len(logits), logits, count, self._tokens)
        return columns if self.columns is None else self.columns.cpu()[columns], logs

    def _token(self, column: int | None) -> int | None:
        """The token of a column of the logits."""
        return column if column is None or self._tokens is None else int(self._tokens[column])

    @cached_property
    def _tokens(self) -> IntArray | None:
        """`columns` on the CPU, where a look-up does not wait for a device."""
        return None if self.columns is None else self.columns.cpu().numpy()

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Turn logits [1, K] of the columns into logits [1, V] of all tokens."""
        if self.columns is None:
            return logits
        out = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        out[..., self.columns] = logits
        return out


def _is_plain(row: Request) -> bool:
    """Whether the row takes the token with the highest raw logit."""
    return row.params.is_greedy and not row.params.shifts_logits


def likeliest_columns(
    row: Request, positions: Sequence[int], logits: torch.Tensor, count: int, tokens: IntArray | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """For a row that samples: the `count` columns of each of logits [n, K] that its noise prefers at `positions`, and
    the logarithms of their chances; both [n, count]. Penalties are ignored.

    The chance that the target takes a column is estimated as w / (sum of w + 1) with w = (q / time) ** POWER. For
    SmolLM2's eagle3, dflash and medusa at temperature 0.7 the estimates came true.

    tokens  the target's token of each column, int64 [K]; None: column i is token i."""
    count = min(count, logits.shape[-1])
    columns, logs = torch.zeros(len(logits), count, dtype=torch.int64), torch.full((len(logits), count), -torch.inf)
    try:
        probs = probabilities(logits, row.params.without_shifts(), []).cpu()
    except PacelineError:  # The logits have NaN, so no column has a chance.
        return columns, logs
    for of_row, position, at, shares in zip(probs, positions, columns, logs, strict=True):
        best, times = row.noise.guess(of_row, position, count, tokens)
        weights = POWER * (np.log(of_row.numpy()[best].astype(np.float64)) - np.log(np.maximum(times, 1e-300)))
        at[: len(best)] = torch.from_numpy(best)
        shares[: len(best)] = torch.from_numpy(weights - np.logaddexp.reduce(np.append(weights, 0.0)))
    return columns, logs


def ranked(
    row: Request, positions: Sequence[int], logits: torch.Tensor, count: int, tokens: IntArray | None = None
) -> IntArray:
    """The `count` likeliest columns of each row of logits [n, K] at these output positions, int64 [n, count], best
    first. If the request's filters leave fewer, the most probable other columns follow.

    tokens  the target's token of each column, int64 [K]; None: column i is token i."""
    best: IntArray = top_tokens(logits, min(count, logits.shape[-1]))[1].cpu().numpy()
    if row.params.is_greedy:
        return best
    columns, logs = likeliest_columns(row, positions, logits, count, tokens)
    found = zip(columns.tolist(), logs.tolist(), best.tolist(), strict=True)
    return np.array([_filled([c for c, log in zip(*few, strict=True) if log > -inf], rest) for *few, rest in found])


def _filled(found: list[int], others: Sequence[int]) -> list[int]:
    """Fill `found` up to the length of `others`, with those of them that it lacks."""
    return [*found, *(column for column in others if column not in found)][: len(others)]


def top_with_logprobs(
    logits: torch.Tensor, count: int, columns: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `count` tokens of each row of logits [R, K], and their log probabilities; both [R, count].

    columns  tokens of the logits' columns, int64 [K]; None: all tokens."""
    values, best = top_tokens(logits, min(count, logits.shape[-1]))
    logs = values.float() - logits.float().logsumexp(-1, keepdim=True)
    return best if columns is None else columns[best], logs
