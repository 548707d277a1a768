"""The record of a benchmark: one Answer for every question, method and repetition, a row of a JSON Lines file.

It holds raw facts only: tokens and time of each round, drafted tokens, seconds by part. `metrics.py` computes figures.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from paceline.errors import PacelineError
from paceline.net.completion import Completion
from paceline.runs.runs import rows

KIND, ANSWERS, SUMMARY = "bench", "answers.jsonl", "summary.json"
"""The kind of run for `runs.runs`, and two of its files."""
WINDOW, MAX_NGRAM = 64, 16  # Sizes for `is_looping`.
TURN = (
    "prompt_tokens", "tokens", "text", "seconds", "lengths", "nodes", "depths", "calls", "runs", "parts",
    "plain_tokens", "peak_bytes", "batch", "seed",
)  # fmt: skip
"""Fields of a completion in a row's turns, beside times, finish and count."""
Done = set[tuple[str, int, str]]  # Method, repeat and question of answers.


@dataclass
class Answer:
    """A method's answer to a question in a repetition.

    method    "none" (plain decoding, the baseline), a drafter's spec, or "peer:..." .
    question  the suite's id; category: as in the suite; task: the task it counts for.
    group     questions of a group were answered together, and have the same `seconds`.
    failed    why there is no answer after `turns`; load: the machine's load average of one minute at the end."""

    method: str
    repeat: int
    question: str
    category: str
    task: str
    group: int
    turns: list[Completion] = field(default_factory=list)
    failed: str | None = None
    load: float | None = None

    @property
    def num_new(self) -> int:
        """New tokens of all turns."""
        return sum(turn.num_new for turn in self.turns)

    @property
    def seconds(self) -> float:
        """Seconds of all turns."""
        return sum(turn.seconds for turn in self.turns)

    def row(self) -> dict[str, Any]:
        """A row of the file of answers."""
        of_turns = [{name: getattr(turn, name) for name in TURN} for turn in self.turns]
        for row, turn in zip(of_turns, self.turns, strict=True):
            row |= {"times": turn.times or None, "finish": turn.finish_reason, "count": turn.num_new}
        return _rounded({field.name: getattr(self, field.name) for field in fields(self)} | {"turns": of_turns})

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Read the answer of a row. Raises PacelineError if it is no answer."""
        try:
            return cls(**{**row, "turns": [_turn(**turn) for turn in row["turns"]]})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            names = ", ".join(f.name for f in fields(cls))
            raise PacelineError(f"not an answer of a benchmark ({error}); it has {names}") from None


def _turn(
    *, prompt_tokens: int, finish: str = "stop", count: int = 0, times: list[float] | None = None,
    runs: Sequence[tuple[str, str, int]] = (), **facts: Any,
) -> Completion:  # fmt: skip
    """Make a completion from a turn of a row."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
    known = [(str(who), str(text), int(tokens)) for who, text, tokens in runs]
    return Completion(finish_reason=finish, usage=usage, times=times or [], runs=known, **facts)


def read_answers(file: Path) -> Iterator[Answer]:
    """Yield the answers of a file, which may be missing. Raises PacelineError for a line that is no answer."""
    for number, row in enumerate(rows(file), 1):
        try:
            yield Answer.of(row)
        except PacelineError as error:
            raise PacelineError(f"{file}, line {number}: {error}") from None


def good(answers: Iterable[Answer]) -> list[Answer]:
    """The answers that did not fail."""
    return [answer for answer in answers if answer.failed is None]


def answered(answers: Iterable[Answer]) -> Done:
    """Method, repeat and question of every answer that did not fail."""
    return {(answer.method, answer.repeat, answer.question) for answer in good(answers)}


def settled(answers: Iterable[Answer]) -> list[Answer]:
    """The answers without failures that a later attempt of the same method made good."""
    answers = list(answers)
    done = answered(answers)
    return [a for a in answers if a.failed is None or (a.method, a.repeat, a.question) not in done]


def _rounded(value: Any) -> Any:
    """Round floats to six places: less than a microsecond is noise, and would be half of the file."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def is_looping(tokens: Sequence[int | str]) -> bool:
    """Whether the last WINDOW tokens, or words, repeat a single n-gram with n up to MAX_NGRAM, begun at any place.

    A loop is the easiest text to draft, so every table with a speed-up shows how many outputs loop."""
    tail = list(tokens[-WINDOW:])
    return len(tail) == WINDOW and any(tail[n:] == tail[:-n] for n in range(1, MAX_NGRAM + 1))
