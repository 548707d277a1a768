"""Calibration of a contestant from the outside: nothing is known of its engine but how long its answers took.

    calibrate_peer(contestant, vocab_size=8192, max_context=1024).round_ms(6)

A round that verifies n tokens reads the weights once and computes n positions, and so does a prompt of n tokens. So the
times to the first token of short prompts say how rounds grow with n, and long answers say where they begin: one to a
random text, and one to a text that repeats itself, which every drafter that copies will draft in every round. What
such a round takes beyond its tokens is drafting, a draft model included: a part of it for the round, and where drafts
differ in length a part for every token.

`calibrate_beside` has plain decoding answer before every answer that is timed, as in a run, and sets the pace by it: a
speed-up compares the two, and the machine may have become faster or slower since ours was calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from paceline.bench.calibrate import SIZES
from paceline.bench.calibration import Calibration
from paceline.bench.contestant import Ask, Contestant
from paceline.bench.predict import pace
from paceline.bench.record import Turn
from paceline.cost import Floats, interpolate

PERIOD = 16
"""Tokens after which the repeating text repeats."""
TOKENS = 32
"""Tokens of a long answer behind its first, and those that plain decoding reads and writes between two of them."""
WAKE = 0.1
"""Seconds that a contestant works before them."""
SPIKE = 4.0
"""Rounds that took so many times as long as the usual one had something else going on beside them."""


def calibrate_beside(
    plain: Contestant,
    ours: Calibration,
    contestant: Contestant,
    vocab_size: int,
    max_context: int,
    *,
    tokens: int = TOKENS,
    **more: Any,
) -> Calibration | None:
    """`calibrate_peer` in turn with plain decoding on our engine, at the pace at which `ours` was calibrated."""
    beside: list[list[Turn]] = []

    def answer() -> None:
        plain.wake(WAKE)
        beside.append(plain.answer([[1] * tokens], Ask(max_tokens=tokens)))

    found = calibrate_peer(contestant, vocab_size, max_context, between=answer, tokens=tokens, **more)
    return found and found.at_pace(1 / (pace(beside, ours) or 1.0))


def calibrate_peer(
    contestant: Contestant,
    vocab_size: int,
    max_context: int,
    *,
    sizes: Sequence[int] = SIZES,
    context: int = 256,
    rounds: int = 5,
    tokens: int = TOKENS,
    between: Callable[[], object] = lambda: None,
) -> Calibration | None:
    """Time an opened contestant with one request at a time. None if it does not tell its rounds.

    sizes    tokens of the short prompts; those above a quarter of the context are left out.
    context  tokens of the long prompts, and four times as many; less where the model holds less.
    tokens   of the answers to them, beyond the first.
    between  has another engine answer something."""
    fit = sorted({1, *(n for n in sizes if n <= max_context // 4)})
    near = max(min(context, max_context // 4), PERIOD)
    contexts = sorted({near, min(4 * near, max_context - tokens - 1)})
    firsts = np.empty((rounds + 1, len(fit)))
    answers: dict[int, list[Turn]] = {length: [] for length in contexts}
    random = np.random.default_rng(0)
    for sweep in range(rounds + 1):
        for i, n in enumerate(fit):
            [turn] = contestant.answer([_text(n, n, vocab_size, random)], Ask(max_tokens=1))
            firsts[sweep, i] = 1e3 * turn.seconds
        for length in contexts:
            for period in (length, PERIOD):
                between()
                contestant.wake(WAKE)
                [turn] = contestant.answer([_text(length, period, vocab_size, random)], Ask(max_tokens=tokens + 1))
                if not turn.times or turn.nodes is None:
                    return None
                if sweep:  # the first is a warm-up
                    answers[length].append(turn)
    contestant.forget()
    growth = np.median(firsts[1:], 0)
    growth = np.maximum.accumulate(growth - growth[0])
    near_rounds = _fit(answers[contexts[0]], fit, growth)
    far_rounds = _fit(answers[contexts[-1]], fit, growth)
    prompts = [1e3 * median(turn.times[0] for turn in answers[length] if turn.times) for length in contexts]
    return Calibration(
        engine=contestant.name,
        batch=1,
        context=near,
        nodes=tuple(fit),
        ms=tuple((near_rounds.plain + growth).tolist()),
        prompt_tokens=(near, contexts[-1]),
        prompt_ms=(prompts[0], prompts[-1]),
        long_context=contexts[-1],
        long_nodes=(1,) if len(contexts) > 1 else (),
        long_ms=(far_rounds.plain,) if len(contexts) > 1 else (),
        drafting_ms=near_rounds.drafting,
        drafted_ms=near_rounds.drafted,
    )


def _text(length: int, period: int, vocab_size: int, random: np.random.Generator) -> list[int]:
    """Random tokens that repeat themselves after `period`."""
    tokens: list[int] = np.resize(random.integers(vocab_size, size=period), length).tolist()
    return tokens


class _Fit(NamedTuple):
    """Milliseconds of a round over one token, of drafting in a round, and of every token drafted."""

    plain: float
    drafting: float
    drafted: float


def _fit(turns: Sequence[Turn], sizes: Sequence[int], growth: Floats) -> _Fit:
    steps = np.concatenate([1e3 * np.diff(turn.times or []) for turn in turns])
    drafted = np.concatenate([(turn.nodes or [])[1:] for turn in turns])
    steps = np.minimum(steps, SPIKE * np.median(steps))
    beyond = steps - interpolate(sizes, growth, drafted + 1)
    plain, drafts = beyond[drafted == 0], drafted > 0
    if not drafts.any():
        return _Fit(float(plain.mean()), 0.0, 0.0)
    each, once = _line(drafted[drafts], beyond[drafts])
    if not len(plain):  # what it does in every round cannot be told from the forward
        return _Fit(once, 0.0, each)
    return _Fit(float(plain.mean()), max(once - float(plain.mean()), 0.0), each)


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    """Slope and value at 0 of the straight line through the points, neither below 0; one x alone gives no slope."""
    spread = x - x.mean()
    slope = max(float((spread * y).sum() / (spread**2).sum()), 0.0) if spread.any() else 0.0
    at_zero = float(y.mean() - slope * x.mean())
    if at_zero >= 0:
        return slope, at_zero
    return max(float((x * y).sum() / (x**2).sum()), 0.0), 0.0
