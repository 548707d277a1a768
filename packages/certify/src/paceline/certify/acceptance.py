"""Reference acceptance: new tokens a round, of an engine and of its drafter alone.

An engine can be lossless and useless: with a wrong flag, template or kernel every draft is refused, the text stays
right and nothing gets faster. The reference is the same drafter over the same answers, replayed without any model.
If the host verifies only chains, the reference's trees are cut to their best chain."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.certify.laws import student_bound
from paceline.certify.stats import Floats
from paceline.core.tally import Tally
from paceline.net.completion import Completion

COLLAPSED, LEAST_ANSWERS, NOTHING = 0.8, 12, 0.05
"""Acceptance has collapsed where fewer drafted tokens are accepted a round than this share of the reference's, by all
of the 99 % interval over LEAST_ANSWERS answers or more. Of fewer answers nothing is said, nor where the reference
accepts NOTHING."""
Rounds = tuple[int, int]
"""New tokens of an answer and its rounds, without the first, which runs the prompt and has no draft."""


def acceptance(engine: Sequence[Rounds], reference: Sequence[Rounds]) -> dict[str, Any]:
    """Facts for the certificate: new tokens a round, the target's own included,
    of the engine and of the drafter replayed.

    Both lists have the same answers in the same order, or are empty if unknown. "share": accepted tokens a round, as a
    share of the reference's; "interval": of the share, None if there are too few answers."""
    both = zip(engine, reference, strict=True) if engine and reference else ()
    pairs = [(*one, *other) for one, other in both if one[1] and other[1]]
    counts = np.array(pairs, np.float64).reshape(-1, 4)
    share, interval = _share(counts.sum(0)), None
    if len(counts) >= LEAST_ANSWERS and share is not None:
        without = [_share(counts.sum(0) - one) for one in counts]  # This is the jackknife over answers.
        spread = np.std([share if one is None else one for one in without]) * (len(counts) - 1) ** 0.5
        reach = float(student_bound(0.005, len(counts) - 1) * spread)
        interval = [round(max(0.0, share - reach), 3), round(share + reach, 3)]
    return {
        "tokens_a_round": _a_round(engine),
        "reference": _a_round(reference),
        "share": None if share is None else round(share, 3),
        "interval": interval,
        "collapsed": interval is not None and interval[1] < COLLAPSED,
    }


def _a_round(counts: Sequence[Rounds]) -> float | None:
    total = Tally(*map(sum, zip(*counts, strict=True)))
    return round(total.mean_accepted_tokens, 3) if total.rounds else None


def _share(of: Floats) -> float | None:
    """The engine's accepted tokens a round, as a share of the reference's; None if the reference accepts nothing. of:
    tokens and rounds of the engine, then of the reference."""
    tokens, rounds, others, their_rounds = map(float, of)
    accepted = others / their_rounds - 1 if their_rounds else 0.0
    return (tokens / rounds - 1) / accepted if accepted > NOTHING else None


def measured(answers: Sequence[Completion]) -> list[Rounds]:
    """Tokens and rounds of each answer as the engine reports them, less the first; empty if it does not."""
    if not all(one.rounds for one in answers):
        return []
    return [(len(one.tokens) - 1, (one.rounds or 1) - 1) for one in answers]
