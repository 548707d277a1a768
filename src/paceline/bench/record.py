"""What a benchmark writes down: one Answer for every question, method and repetition, a row of a JSON Lines file.

Raw facts only: how many tokens each round brought and when, what was drafted, where the time went. Every figure of a
report is worked out from these by `metrics.py`.

    for answer in read_answers(Path("run/answers.jsonl")):
        answer.turns[0].lengths            # tokens a round, the target's own included
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.workbench.contestant import Reply
from paceline.workbench.runs import rows

KIND, ANSWERS, SUMMARY = "bench", "answers.jsonl", "summary.json"
"""A benchmark's run as `workbench.runs` knows it, and two of its files."""


@dataclass
class Answer:
    """What one method answered to one question in one repetition.

    method    "none" (plain decoding, the baseline), a drafter's spec, or "peer:..." .
    question  the suite's id; category as in the suite, task the group it is counted in.
    group     questions with the same group were answered together (their `seconds` are the same time); a group of
              one, usually.
    failed    why there is no answer; `turns` then holds what there was.
    """

    method: str
    repeat: int
    question: str
    category: str
    task: str
    group: int
    turns: list[Reply] = field(default_factory=list)
    failed: str | None = None
    load: float | None = None  # the machine's load average of one minute, when it was finished

    @property
    def num_new(self) -> int:
        """New tokens of all turns."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def seconds(self) -> float:
        """Seconds of all turns."""
        return sum(turn.seconds for turn in self.turns)

    def row(self) -> dict[str, Any]:
        """As a row of the file of answers."""
        rounded: dict[str, Any] = _rounded(asdict(self))
        return rounded

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Answer:
        """The answer of a row. PacelineError if the row is none."""
        try:
            rest = dict(row)
            turns = [Reply(**turn) for turn in rest.pop("turns")]
            return cls(turns=turns, **rest)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            names = ", ".join(f.name for f in fields(cls))
            raise PacelineError(f"not an answer of a benchmark ({error}); it has {names}") from None


def read_answers(file: Path) -> Iterator[Answer]:
    """Every whole line of a file of answers, none if it is not there. PacelineError for a line that is no answer."""
    for number, row in enumerate(rows(file), 1):
        try:
            yield Answer.of(row)
        except PacelineError as error:
            raise PacelineError(f"{file}, line {number}: {error}") from None


def good(answers: Iterable[Answer]) -> list[Answer]:
    """Without those that failed."""
    return [answer for answer in answers if answer.failed is None]


def settled(answers: Iterable[Answer]) -> list[Answer]:
    """Without the failures that a later try of the same method made good."""
    answers = list(answers)
    answered = {(a.method, a.repeat, a.question) for a in answers if a.failed is None}
    return [a for a in answers if a.failed is None or (a.method, a.repeat, a.question) not in answered]


def _rounded(value: Any) -> Any:
    """Seconds to the microsecond: what lies below is noise and half the file."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, (list, tuple)) else value
