"""Reference acceptance: does this drafter get as far in this engine as it does by itself?

An engine can be lossless and useless: with a wrong flag, template or kernel every draft is refused, the text stays
right and nothing gets faster. The reference is the same drafter over the same answers, replayed without any model; for
a host that verifies chains, its trees cut to their best chain."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.draft.base import Drafter
from paceline.draft.recording import Chains, Recording
from paceline.errors import PacelineError
from paceline.workbench.walk import RecordedAnswer, Tally, replay, replayable

COLLAPSED = 0.8
"""Acceptance has collapsed where fewer drafted tokens are accepted a round than this share of the reference's."""


def acceptance(tokens: float | None, reference: float | None) -> dict[str, Any]:
    """For the certificate: new tokens a round, the target's own included, and those of the same drafter replayed."""
    known = tokens is not None and reference is not None
    collapsed = known and tokens - 1 < COLLAPSED * (reference - 1) and reference - tokens > 0.05  # type: ignore[operator]
    return {
        "tokens_a_round": None if tokens is None else round(tokens, 3),
        "reference": None if reference is None else round(reference, 3),
        "collapsed": collapsed,
    }


def measured(lengths: Sequence[Sequence[int]]) -> float | None:
    """Tokens a round, without each answer's first, which runs the prompt and has no draft."""
    later = [n for of_row in lengths for n in of_row[1:]]
    return sum(later) / len(later) if later else None


def replayed(
    draft: str, recording: Recording, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *,
    chains: bool,
) -> float | None:  # fmt: skip
    """Tokens a round of the drafter alone, replayed over `answers`; None if it asks the target for more than tokens.

    The first token of an answer counts as its prompt's, as in `measured`. chains: its trees are cut to chains."""
    try:
        drafter: Drafter = replayable(draft, recording)
    except PacelineError:
        return None
    drafter = Chains(drafter) if chains else drafter
    tally = Tally()
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if len(answer) > 1:
            turn = RecordedAnswer(np.array([*prompt, answer[0]], np.int64), np.array(answer[1:], np.int64))
            replay(drafter, turn, i, tally)
    return tally.mean_accepted_tokens or None
