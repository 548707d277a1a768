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

    def __init__(self, specs: Sequence[str], conversations: Sequence[Conversation]):
        self.specs = list(specs)
        self.conversations = conversations
        named = dict.fromkeys(c.category for c in conversations if c.category not in ("", OVERALL))
        self.categories = [*named, OVERALL]
        self.tallies = {(s, name): Tally() for s in range(len(specs)) for name in self.categories}

    def add(self, done: Done) -> None:
        """Count one conversation."""
        category = self.conversations[done.conversation].category
        for name in {category or OVERALL, OVERALL}:
            self.tallies[done.spec, name] += done.tally

    @property
    def answers(self) -> int:
        """Answers in the recording."""
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def is_complete(self) -> bool:
        """Whether every drafter has replayed every answer."""
        return all(self.tallies[s, OVERALL].answers == self.answers for s in range(len(self.specs)))

    def results(self, cost: Cost | None = None) -> list[dict[str, Any]]:
        """One object for every drafter and category with answers, as `--json` prints them."""
        return [
            _result(self.specs[s], category, tally, cost)
            for (s, category), tally in self.tallies.items()
            if tally.answers
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
