"""Calibration of a contestant from the outside: nothing is known of its engine but how long its answers took.

    calibrator = PeerCalibrator(contestant, vocab_size=8192, max_context=1024)
    calibrator.sweep()                           # again and again, with other work between
    calibrator.result().round_ms(6)

A round that verifies n tokens reads the weights once and computes n positions, and so does a prompt of n tokens. So the
times to the first token of short prompts say how rounds grow with n, and long answers say where they begin: one to a
random text, and one to a text that repeats itself, which every drafter that copies will draft in every round. What
such a round takes beyond its tokens is drafting, a draft model included: a part of it for the round, and where drafts
differ in length a part for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from paceline.bench.contestant import Ask, Contestant
from paceline.bench.record import Turn
from paceline.cost.calibrate import SIZES
from paceline.cost.calibration import Calibration
from paceline.cost.model import Floats, interpolate

PERIOD = 16
"""Tokens after which the repeating text repeats."""
TOKENS = 32
"""Tokens of a long answer behind its first."""
WAKE = 0.1
"""Seconds that a contestant works before it."""
SPIKE = 4.0
"""Rounds that took so many times as long as the usual one had something else going on beside them."""


@dataclass(frozen=True)
class PeerSweep:
    """What one sweep found, in milliseconds: first tokens of the short prompts; of the long ones, by context, first
    tokens and the rounds behind them, with the tokens that these drafted."""

    firsts: Sequence[float]
    prompts: Sequence[Sequence[float]]
    rounds: Sequence[Sequence[float]]
    drafted: Sequence[Sequence[int]]


class PeerCalibrator:
    """Times an opened contestant in sweeps, one request at a time. They may follow each other or lie minutes apart, and
    teach it nothing.

    sweeps  those there are, the first one a warm-up; may be filled with those of a calibrator like this one."""

    def __init__(
        self,
        contestant: Contestant,
        vocab_size: int,
        max_context: int,
        *,
        sizes: Sequence[int] = SIZES,
        context: int = 256,
        tokens: int = TOKENS,
    ):
        """sizes  tokens of the short prompts; those above a quarter of the context are left out.
        context  tokens of the long prompts, and four times as many; less where the model holds less.
        tokens   of the answers to them, beyond the first."""
        self.contestant, self._vocab_size, self._tokens = contestant, vocab_size, tokens
        self._sizes = sorted({1, *(n for n in sizes if n <= max_context // 4)})
        near = max(min(context, max_context // 4), PERIOD)
        self._contexts = sorted({near, min(4 * near, max_context - tokens - 1)})
        self._random = np.random.default_rng(0)
        self.sweeps: list[PeerSweep] = []

    def sweep(self) -> bool:
        """One more. False, and none more, if the contestant does not tell its rounds."""
        with self.contestant.aside():
            self.contestant.wake(WAKE)
            firsts = [1e3 * self._ask(n, n, Ask(max_tokens=1)).seconds for n in self._sizes]
            answers: list[list[Turn]] = []
            for length in self._contexts:
                answers.append([])
                for period in (length, PERIOD):
                    self.contestant.wake(WAKE)
                    turn = self._ask(length, period, Ask(max_tokens=self._tokens + 1))
                    if not turn.times or turn.nodes is None:
                        return False
                    answers[-1].append(turn)
        self.sweeps.append(
            PeerSweep(
                firsts,
                prompts=[[1e3 * turn.times[0] for turn in turns if turn.times] for turns in answers],
                rounds=[[1e3 * s for turn in turns for s in np.diff(turn.times or []).tolist()] for turns in answers],
                drafted=[[n for turn in turns for n in (turn.nodes or [])[1:]] for turns in answers],
            )
        )
        return True

    def result(self) -> Calibration:
        """Of all sweeps but the first."""
        some = self.sweeps[1:] or self.sweeps
        growth = np.median([sweep.firsts for sweep in some], 0)
        growth = np.maximum.accumulate(growth - growth[0])
        near, far = (self._fit(some, place, growth) for place in (0, -1))
        prompts = [median(ms for sweep in some for ms in sweep.prompts[place]) for place in (0, -1)]
        context, longer = self._contexts[0], self._contexts[1:]
        return Calibration(
            engine=self.contestant.name,
            batch=1,
            context=context,
            nodes=tuple(self._sizes),
            ms=tuple((near.plain + growth).tolist()),
            prompt_tokens=(context, self._contexts[-1]),
            prompt_ms=(prompts[0], prompts[-1]),
            long_context=self._contexts[-1],
            long_nodes=(1,) if longer else (),
            long_ms=(far.plain,) if longer else (),
            drafting_ms=near.drafting,
            drafted_ms=near.drafted,
        )

    def _ask(self, length: int, period: int, ask: Ask) -> Turn:
        """Its answer to random tokens that repeat themselves after `period`."""
        tokens: list[int] = np.resize(self._random.integers(self._vocab_size, size=period), length).tolist()
        [turn] = self.contestant.answer([tokens], ask)
        return turn

    def _fit(self, sweeps: Sequence[PeerSweep], place: int, growth: Floats) -> _Fit:
        """What the rounds on one of the contexts say."""
        steps = np.concatenate([sweep.rounds[place] for sweep in sweeps])
        drafted = np.concatenate([sweep.drafted[place] for sweep in sweeps])
        steps = np.minimum(steps, SPIKE * np.median(steps))
        beyond = steps - interpolate(self._sizes, growth, drafted + 1)
        plain, drafts = beyond[drafted == 0], drafted > 0
        if not drafts.any():
            return _Fit(float(plain.mean()), 0.0, 0.0)
        each, once = _line(drafted[drafts], beyond[drafts])
        if not len(plain):  # what it does in every round cannot be told from the forward
            return _Fit(once, 0.0, each)
        return _Fit(float(plain.mean()), once - float(plain.mean()), each)


class _Fit(NamedTuple):
    """Milliseconds of a round over one token, of drafting in a round that drafts (less than nothing where the first
    drafted token is cheaper than the others), and of every token drafted."""

    plain: float
    drafting: float
    drafted: float


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    """Slope and value at 0 of the straight line through the points, neither below 0; one x alone gives no slope."""
    spread = x - x.mean()
    slope = max(float((spread * y).sum() / (spread**2).sum()), 0.0) if spread.any() else 0.0
    at_zero = float(y.mean() - slope * x.mean())
    if at_zero >= 0:
        return slope, at_zero
    return max(float((x * y).sum() / (x**2).sum()), 0.0), 0.0
