"""Tally: sums over rounds, and the rates of drafting that follow from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass
class Tally:
    """Sums over rounds that gave tokens. A rate is 0.0 where there is nothing to divide by.

    new_tokens    tokens of the answers, the target's own included.
    draft_rounds  rounds with a draft; draft_tokens: drafted tokens that were verified."""

    new_tokens: int = 0
    rounds: int = 0
    draft_rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def __iadd__(self, other: Tally) -> Self:
        for name, count in vars(self).items():
            setattr(self, name, count + getattr(other, name))
        return self

    @staticmethod
    def of(several: Iterable[Tally]) -> Tally:
        """The sums of several tallies."""
        total = Tally()
        for one in several:
            total += one
        return total

    @property
    def mean_accepted_tokens(self) -> float:
        """New tokens a round, the target's own included (Spec-Bench's definition); 1 for plain decoding."""
        return over(self.new_tokens, self.rounds)

    @property
    def mean_draft_round(self) -> float:
        """New tokens of a round with a draft, the target's own included (vLLM's mean acceptance length)."""
        return over(self.accepted_tokens + self.draft_rounds, self.draft_rounds)

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were accepted."""
        return over(self.accepted_tokens, self.draft_tokens)

    @property
    def draft_rate(self) -> float:
        """Share of rounds with a draft."""
        return over(self.draft_rounds, self.rounds)

    @property
    def verified_per_round(self) -> float:
        """Nodes verified in a round, roots included."""
        return over(self.draft_tokens + self.rounds, self.rounds)

    @property
    def verified_per_token(self) -> float:
        """Nodes verified for each new token, roots included; plain decoding is 1."""
        return over(self.draft_tokens + self.rounds, self.new_tokens)


def over(count: float, of: float) -> float:
    """`count` / `of`, or 0.0 without anything to divide by."""
    return count / of if of else 0.0
