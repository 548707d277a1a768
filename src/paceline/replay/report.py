"""The figures of a replay, by drafter and category, while it runs and at its end.

    report = Report(["sam", "prompt-lookup"], conversations)
    for done in start(conversations, report.specs, recording, workers=2):
        report.add(done)
    report.results()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.cost.replay import Cost, predict
from paceline.replay.tokens import Conversation
from paceline.replay.walk import Tally
from paceline.replay.workers import Done

OVERALL = "overall"
"""The category of all conversations together."""


class Report:
    """What is known so far, by drafter and category."""

    def __init__(self, specs: Sequence[str], conversations: Sequence[Conversation] = ()):
        self.specs = list(specs)
        self._of = [conversation.category for conversation in conversations]
        self._answers = [sum(len(conversation.turns) for conversation in conversations)] * len(specs)
        self.categories = [*dict.fromkeys(name for name in self._of if name not in ("", OVERALL)), OVERALL]
        self.tallies = {(s, name): Tally() for s in range(len(specs)) for name in self.categories}

    def add(self, done: Done) -> None:
        """Count one conversation."""
        for name in {self._of[done.conversation] or OVERALL, OVERALL}:
            self.tallies[done.spec, name] += done.tally

    def merge(self, other: Report, numbers: Sequence[int]) -> None:
        """Count what `other` has counted over other conversations. numbers: of its drafters among those here."""
        for name in other.categories:
            if name not in self.categories:
                self.categories.insert(-1, name)
                self.tallies |= {(s, name): Tally() for s in range(len(self.specs))}
            for s, number in enumerate(numbers):
                self.tallies[number, name] += other.tallies[s, name]
        for s, number in enumerate(numbers):
            self._answers[number] += other._answers[s]

    @property
    def answers(self) -> int:
        """Answers in the recording."""
        return max(self._answers, default=0)

    @property
    def is_complete(self) -> bool:
        """Whether every drafter has replayed every answer."""
        return all(self.tallies[s, OVERALL].answers == self.answers for s in range(len(self.specs)))

    def results(self, cost: Cost | None = None) -> list[dict[str, Any]]:
        """One object for every drafter and category with answers, as `--json` prints them."""
        return [
            _result(spec, category, self.tallies[s, category], cost)
            for s, spec in enumerate(self.specs)
            for category in self.categories
            if self.tallies[s, category].answers
        ]


def _result(spec: str, category: str, tally: Tally, cost: Cost | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "draft": spec,
        "category": category,
        "mean_accepted_tokens": round(tally.mean_accepted_tokens, 4),
        "answers": tally.answers,
        "rounds": tally.rounds,
        "new_tokens": tally.new_tokens,
        "draft_rate": round(tally.draft_rate, 4),
        "verified_per_round": round(tally.verified_per_round, 3),
        "verified_per_token": round(tally.verified_per_token, 3),
        "draft_us_per_round": round(tally.draft_us_per_round, 2),
        "accepted_by_depth": [round(share, 4) for share in tally.accepted_by_depth()],
    }
    if cost is not None:
        result["predicted_speedup"] = round(predict(tally, cost), 3)
    return result
