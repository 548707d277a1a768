"""Forecast a head's gain while it trains: tokens a round, the speed-up with this machine's times, and the gain of twice
as much training.

Tokens a round are those of a greedy chain over held-out answers (`measure.py`). The target's forwards are timed here,
again each time: the least counts, so that other programs that run at the start do not decide. A draft is taken to cost
what reading its weights costs at the speed at which the target's are read; this flatters heads so small that other work
bounds them. `paceline bench` measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from paceline.core.clock import seconds_of
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree, Floats
from paceline.draft.cost import forward_times
from paceline.draft.shapes import best_first
from paceline.target.base import Target
from paceline.target.load import load
from paceline.train.data import Rows
from paceline.train.measure import Fit, measure
from paceline.train.student import Student

TOKENS = 1 << 12  # Held-out tokens to measure each time, over all sources, but at least a row of each.
HALF = 0.6  # An earlier figure counts as half the training if it had at most this share of the tokens.
TREE = 16  # Nodes of the tree whose tokens a round are noted beside the chain's.
SIZES = (1, 2, 4, 8, 16, 32, 64)  # Nodes of the trees that `time_forwards` runs, with the root.
REPEATS = 4
CONTEXT = 32  # Those trees are verified after so many tokens.
LITTLE = 0.01  # Twice the training is hardly worth a smaller share of the tokens a round.


@dataclass
class Outlook:
    """The expectations of a training.

    forward  seconds of a forward of the target by its nodes, as `forward_times` gives them: the least so far.
    time     measures them again.
    once     plain forwards for which a draft reads weights whatever its length; each: for every token.
    seen     tokens a round by the tokens read, of earlier figures in the log."""

    student: Student
    held: Mapping[str, Rows]
    forward: Floats
    time: Callable[[], Floats]
    once: float
    each: float
    seen: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def of(cls, student: Student, held: Mapping[str, Rows], target: Any, log: Sequence[Mapping[str, Any]]) -> Outlook:
        """The outlook of a head for `target`, named as in `load`, which is timed; log: the rows so far."""
        model = load(target)
        forward = time_forwards(model)
        wide = 2.0 if model.quantised is None else 34 / 32  # Bytes of a head's weight, stored like its target's.
        once, each = (count * wide / model.weight_bytes for count in student.read_weights())
        few = {
            name: (ids[:count], labels[:count])
            for name, (ids, labels) in held.items()
            for count in [max(1, TOKENS // (ids.shape[1] * len(held)))]
        }
        seen = [(row["tokens"], row["expected"]["tokens"]) for row in log if "expected" in row]
        # Loaded anew each time: between two times, its memory is free for the training.
        return cls(student, few, forward, lambda: time_forwards(load(target)), once, each, seen)

    def look(self, tokens_read: int) -> tuple[dict[str, float], str]:
        """Figures for the log, and a line: what is expected after so many tokens."""
        fits = measure(self.student, self.held)["all"]
        tokens = tokens_a_round(fits)
        self.forward = np.minimum(self.forward, self.time())
        speeds = [made / self._cost(drafted) for drafted, made in enumerate(tokens)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        longest = len(tokens) - 1
        shown = best or min(3, longest)
        line = f"expected: {tokens[shown]:.2f} tokens a round with chains of {shown}"
        line += f", about {speeds[shown]:.2f} times plain decoding here" + "; no chain pays yet" * (best == 0)
        gain = self._doubling(tokens_read, tokens[longest])
        self.seen.append((tokens_read, tokens[longest]))
        if gain is not None:
            more = f"twice the training would add about {max(gain, 0.0):.2f} tokens"
            more += f" to chains of {longest}" * (shown != longest)
            line += f"; {more}" + ", so more is hardly worth it" * (gain < LITTLE * tokens[longest])
        figures = {"tokens": round(tokens[longest], 4), "tree": round(tokens_of_a_tree(fits, TREE), 4)}
        return figures | {"speedup": round(speeds[best], 3), "chain": best}, line

    def _cost(self, drafted: int) -> float:
        """A round in plain forwards."""
        draft = self.once + drafted * self.each if drafted else 0.0
        return float(self.forward[1 + drafted] / self.forward[1]) + draft

    def _doubling(self, tokens_read: int, now: float) -> float | None:
        """The gain of twice the training: as much as the second half brought, if gains follow its logarithm."""
        before = [tokens for read, tokens in self.seen if 0 < read <= HALF * tokens_read]
        return now - before[-1] if before else None


def tokens_of_a_tree(fits: Sequence[Fit], size: int) -> float:
    """Mean tokens of a round with the fixed tree of so many nodes that is best, if depths count as independent."""
    shares = [fit.ranks for fit in fits]
    return 1 + sum(best_first(lambda above: shares[len(above)] if len(above) < len(shares) else (), size).values())


def time_forwards(target: Target) -> Floats:
    """`forward_times` of one row here, the least of REPEATS at each size."""
    slot = target.add_row(CONTEXT + 2 * SIZES[-1])
    try:
        prompt = np.arange(CONTEXT) % target.vocab_size
        target.verify([Segment.chunk(slot, prompt, last=True)])
        target.commit(slot, range(CONTEXT))
        sizes = [size for size in SIZES if CONTEXT + size <= target.max_context]
        return forward_times({size: min(_timed(target, slot, size) for _ in range(REPEATS)) for size in sizes})
    finally:
        target.drop_row(slot)


def _timed(target: Target, slot: int, size: int) -> float:
    """Seconds of a forward over a bushy tree of `size` nodes; nothing is committed."""
    tokens = np.arange(size) % target.vocab_size
    tree = DraftTree(tokens, np.array([-1, *((node - 1) // 2 for node in range(1, size))]))
    # Reading a number waits for an accelerator.
    return seconds_of(lambda: target.verify([Segment.tree(slot, tree)]).logits[0, 0].item())


def tokens_a_round(fits: Sequence[Fit]) -> list[float]:
    """Mean tokens of a round with a greedy chain of 0, 1, 2, ... drafted tokens, the target's own included."""
    return [*accumulate(accumulate((fit.row["accepted"] for fit in fits), mul), initial=1.0)]
