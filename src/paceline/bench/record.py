"""What a benchmark writes down: one Answer for every question, method and repetition, as one line of JSON.

Raw facts only: how many tokens each round brought and when, what was drafted, where the time went. Every figure of a
report is worked out from these by `metrics.py`. Knows nothing of engines, methods or suites.

    answer = Answer.from_json(line)
    answer.turns[0].lengths            # tokens a round, the target's own included
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from paceline.errors import PacelineError
from paceline.jsonl import loads

PEER = "peer:"
"""What the names of other engines begin with."""


@dataclass
class Reply:
    """One turn of an answer.

    tokens    the new tokens, an end-of-sequence token included.
    text      as a reader sees it: no special tokens, no white space around it.
    seconds   from handing the prompt over to the last token, prompt included, the device waited for. With several
              questions answered together it is the time of all of them: every one of the group has the same.
    lengths   tokens each round brought, the target's own included; the round that ended the prompt counts with its
              one token, as in Spec-Bench. Sums to len(tokens). None: the engine does not tell.
    times     seconds from the start to each round's tokens, as long as `lengths`; None: the engine does not tell.
    nodes     tokens drafted and verified in each round (nodes of the tree but for its root); depths the longest path
              among them. None: the engine does not tell.
    calls     forwards of a draft model, one after another; 0 for a drafter without a model.
    runs      (who, text, tokens) of each piece of the answer in order: the drafter it came from, "" for the target.
    parts     seconds by part of a round ("draft", "forward", "accept", "bookkeeping", and "align" where rows are
              realigned), prompt included.
    plain_tokens  what Spec-Bench counts for its baseline: the text encoded again, less one.
    batch         counts of all questions answered together, on the first one's reply, where schedules are compared:
              rounds; rows that ran in them, and slots, those that could have; drafting rounds, and those in which a
              whole batch was equally long; moved_bytes read and written to realign rows.
    peak_bytes    most memory of the process while answering, everything that was loaded included; None: unknown.
    finish    stop, length, context or abort.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    seconds: float
    lengths: list[int] | None = None
    times: list[float] | None = None
    nodes: list[int] | None = None
    depths: list[int] | None = None
    calls: int = 0
    runs: list[tuple[str, str, int]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    plain_tokens: int = 0
    peak_bytes: int | None = None
    batch: dict[str, int] = field(default_factory=dict)
    finish: str = "stop"

    def __post_init__(self) -> None:
        self.runs = [(str(who), str(text), int(count)) for who, text, count in self.runs]


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

    def to_json(self) -> str:
        """One line, without its end."""
        return json.dumps(_rounded(asdict(self)), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Answer:
        """PacelineError if the line is not an answer."""
        try:
            fields_of = loads(line)
            turns = [Reply(**turn) for turn in fields_of.pop("turns")]
            return cls(turns=turns, **fields_of)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            names = ", ".join(f.name for f in fields(cls))
            raise PacelineError(f"not an answer of a benchmark ({error}); it has {names}") from None


def read_answers(content: bytes, name: str) -> list[Answer]:
    """Every answer of a file's content; what follows the last line end was cut off and is left out.

    PacelineError for a line that is no answer; `name` is the file's, to say so."""
    answers = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].split(b"\n")[:-1], 1):
        try:
            answers.append(Answer.from_json(line.decode()))
        except (PacelineError, UnicodeDecodeError) as error:
            raise PacelineError(f"{name}, line {number}: {error}") from None
    return answers


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
