"""What an answer should have taken, by the rounds of the same method: one that took far longer met another process.

A prompt is expected to take the median seconds a token of prompts of about its length, a later round the median seconds
of rounds that verified about as many nodes. A round whose like was seldom seen is expected to take what it took."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from math import sqrt

import numpy as np

from paceline.bench.record import Answer, good
from paceline.workbench.contestant import Reply

LATE = 1.5  # an answer is late from so many times the expected seconds. A longer context, which is ignored, costs less
LEAST = 0.05  # seconds that a late answer takes too long at least
SEEN = 5  # fewest rounds of a kind that give an expectation
ALIKE = sqrt(2)  # rounds are of a kind if one has at most so many times the tokens of the other


class Kinds:
    """Seconds of rounds by the number of tokens that they ran."""

    def __init__(self) -> None:
        self._seconds = defaultdict[int, list[float]](list)
        self._medians: dict[int, float | None] = {}

    def add(self, tokens: int, seconds: float) -> None:
        self._seconds[tokens].append(seconds)
        self._medians.clear()

    def expected(self, tokens: int) -> float | None:
        """The median of rounds with about as many tokens; None where too few were seen."""
        if tokens not in self._medians:
            alike = [s for n, some in self._seconds.items() if tokens / ALIKE <= n <= tokens * ALIKE for s in some]
            self._medians[tokens] = float(np.median(alike)) if len(alike) >= SEEN else None
        return self._medians[tokens]


class Pace:
    """What one method's rounds took so far, for questions answered one at a time."""

    def __init__(self, answers: Iterable[Answer] = ()):
        self._prompts, self._rounds = Kinds(), Kinds()
        for answer in answers:
            self.learn(answer)

    def learn(self, answer: Answer) -> None:
        for turn in answer.turns if answer.failed is None else ():
            if rounds := _rounds(turn):
                self._prompts.add(turn.prompt_tokens, rounds[0][1] / max(turn.prompt_tokens, 1))
                for tokens, seconds in rounds[1:]:
                    self._rounds.add(tokens, seconds)

    def is_late(self, answer: Answer) -> bool:
        expected = sum(turn.seconds - self._lost(turn) for turn in answer.turns)
        return answer.failed is None and answer.seconds > max(LATE * expected, expected + LEAST)

    def _lost(self, turn: Reply) -> float:
        """Seconds more than expected, over the rounds of which something is known."""
        lost = 0.0
        for i, (tokens, seconds) in enumerate(_rounds(turn)):
            expected = self._rounds.expected(tokens) if i else self._prompts.expected(turn.prompt_tokens)
            if expected is not None:
                lost += seconds - (expected if i else expected * turn.prompt_tokens)
        return lost


def _rounds(turn: Reply) -> list[tuple[int, float]]:
    """(tokens of the forward, seconds) of each round, the prompt's first; none if the engine does not tell."""
    if not turn.times or turn.nodes is None or len(turn.nodes) != len(turn.times):
        return []
    seconds = np.diff(turn.times, prepend=0.0).tolist()
    return [(nodes + 1, each) for nodes, each in zip(turn.nodes, seconds, strict=True)]


def late(answers: Iterable[Answer]) -> list[Answer]:
    """The answers that are late by all rounds of their methods, of questions that were answered one at a time."""
    answers = good(answers)
    together = Counter((answer.method, answer.group, answer.repeat) for answer in answers)
    alone = [answer for answer in answers if together[answer.method, answer.group, answer.repeat] == 1]
    paces = {name: Pace(a for a in alone if a.method == name) for name in dict.fromkeys(a.method for a in alone)}
    return [answer for answer in alone if paces[answer.method].is_late(answer)]
