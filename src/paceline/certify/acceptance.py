"""Reference acceptance: does this drafter get as far in this engine as it does by itself?

An engine can be lossless and useless: with a wrong flag, template or kernel every draft is refused, the text stays
right and nothing gets faster. The reference is the same drafter over the same answers, replayed without any model; for
a host that verifies chains, its trees cut to their best chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.draft.base import Drafter
from paceline.draft.recording import Chains, Recording
from paceline.errors import PacelineError
from paceline.target.tokenizer import Tokenizer
from paceline.workbench.walk import RecordedAnswer, Tally, replay, replayable

COLLAPSED = 0.8
"""Of the reference's drafted and accepted tokens a round; below that share acceptance has collapsed."""


@dataclass
class Acceptance:
    """Tokens a round, the target's own included: of the engine, and of the same drafter replayed; None: not known."""

    measured: float | None = None
    reference: float | None = None

    @property
    def collapsed(self) -> bool:
        """Whether far fewer drafts are accepted than should be."""
        if self.measured is None or self.reference is None:
            return False
        return self.measured - 1 < COLLAPSED * (self.reference - 1) and self.reference - self.measured > 0.05

    def facts(self) -> dict[str, Any]:
        """For the certificate."""
        rounded = {name: None if value is None else round(value, 3) for name, value in vars(self).items()}
        return {"tokens_a_round": rounded["measured"], "reference": rounded["reference"], "collapsed": self.collapsed}


def measured(lengths: Sequence[Sequence[int]]) -> float | None:
    """Tokens a round, without each answer's first, which runs the prompt and has no draft."""
    later = [n for of_row in lengths for n in of_row[1:]]
    return sum(later) / len(later) if later else None


def reference(
    draft: str,
    tokenizer: Tokenizer | None,
    ends: Sequence[int],
    vocab_size: int,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    chains: bool,
) -> float | None:
    """The same of the drafter alone, over answers that are known; None if it asks the target for more than tokens.

    The first token of an answer counts as its prompt's, as in `measured`."""
    try:
        drafter: Drafter = replayable(draft, Recording(tokenizer, tuple(ends), vocab_size))
    except PacelineError:
        return None
    if chains:
        drafter = Chains(drafter)
    tally = Tally()
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if len(answer) > 1:
            turn = RecordedAnswer(np.array([*prompt, answer[0]], np.int64), np.array(answer[1:], np.int64))
            replay(drafter, turn, i, tally)
    return tally.mean_accepted_tokens or None
