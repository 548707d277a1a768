"""Schedules as contestants: every drafter with every schedule at every batch size, and plain batched decoding.

    Scheduled("sam", "grouped", 8, target, tokenizer).answer(prompts, Ask(max_tokens=64))

All requests of a group are handed in at once, and at most `batch` of them run in a round: requests are always waiting.
The baseline, "none", is plain decoding one request at a time. With a published schedule among them all run on the
transformers target, so that they differ in the schedule alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.bench.contestant import Ask
from paceline.bench.metrics import BASELINE
from paceline.bench.ours import Ours
from paceline.bench.record import Reply
from paceline.bench.runner import QuestionGroup
from paceline.bench.suites import Question, tasks_in_turn
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.engine.rectangles import RectangularTarget, check_schedule, create_schedule, fitted, is_rectangular
from paceline.engine.request import Row
from paceline.engine.scheduler import Schedule, Turn
from paceline.errors import PacelineError
from paceline.target.base import Target
from paceline.target.tokenizer import Tokenizer

REQUESTS = 4
"""Requests handed in at once, in largest batches: so many that the end, when batches run empty, does not count much."""
PREFILL_CHUNK = 512
TASK = "requests"
"""The one task of a run that compares schedules: its requests are mixed, and answered together."""


@dataclass(frozen=True)
class Contest:
    """The schedules and batch sizes of a run; no schedule: the run compares none."""

    schedules: tuple[str, ...] = ()
    batches: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, schedules: Iterable[str], batches: Iterable[int]) -> Contest:
        """PacelineError for a schedule that does not exist, or does not fit one of the batches."""
        contest = cls(tuple(dict.fromkeys(schedules)), tuple(sorted(dict.fromkeys(batches))))
        for schedule in contest.schedules:
            for batch in contest.batches:
                create_schedule(schedule, batch, PREFILL_CHUNK)
        if len(contest.batches) > 1 and not contest.schedules:
            raise PacelineError("several batch sizes are compared with --schedule: add --schedule ragged, for example")
        return contest

    @property
    def native(self) -> bool | None:
        """As for `target.load`: False if a schedule needs the transformers target."""
        return False if any(map(is_rectangular, self.schedules)) else None

    def groups(self, questions: Sequence[tuple[Question, int]]) -> list[QuestionGroup]:
        """The questions, those of different tasks mixed, in groups that are handed in together."""
        mixed = tasks_in_turn([question for question, _ in questions], lambda question: question.task)
        mixed = [replace(question, task=TASK) for question in mixed]
        size = REQUESTS * max(self.batches)
        parts = [mixed[begin : begin + size] for begin in range(0, len(mixed), size)]
        return [QuestionGroup(n, tuple(part), (1,) * len(part)) for n, part in enumerate(parts)]

    def contestants(self, drafts: Sequence[tuple[str, str | None]], target: Target, tokenizer: Tokenizer) -> list[Ours]:
        """drafts: (spec, spec that is made) of every drafter, plain decoding among them."""
        made: list[Ours] = [Ours(BASELINE, target, tokenizer, batch=1)]
        for batch in self.batches:
            for schedule in self.schedules:
                fit = fitted(target, create_schedule(schedule, batch, PREFILL_CHUNK))
                made += [
                    Scheduled(spec, schedule, batch, fit, tokenizer, made=other)
                    for spec, other in drafts
                    if spec != BASELINE
                ]
            if batch > 1:
                made.append(Scheduled(BASELINE, "ragged", batch, target, tokenizer))
        return made


class Counted:
    """A schedule that counts: rounds, the rows that ran in them, and rounds whose rows were all equally long."""

    def __init__(self, inner: Schedule, max_batch: int):
        self.inner, self.max_batch = inner, max_batch
        self.rounds = self.rows = self.drafting = self.same_length = 0

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        return self.inner.admit(waiting, running)

    def select(self, running: Sequence[Row]) -> list[Turn]:
        turns = self.inner.select(running)
        self.rounds += bool(turns)
        self.rows += len(turns)
        if turns and not any(turn.chunk for turn in turns):
            self.drafting += 1
            lengths = {len(turn.row) for turn in turns}
            self.same_length += len(turns) == self.max_batch and len(lengths) == 1
        return turns


class Scheduled(Ours):
    """A drafter with a schedule and a batch size. target: one that the schedule can run on."""

    def __init__(
        self, drafter: str, schedule: str, batch: int, target: Target, tokenizer: Tokenizer, *, made: str | None = None
    ):
        super().__init__(drafter, target, tokenizer, batch=batch, made=made)
        self.name, self.drafter, self.schedule = f"{drafter} {schedule} {batch}", drafter, schedule

    def open(self) -> None:
        super().open()
        check_schedule(self.schedule)
        self.settings |= {"scheduled": {"drafter": self.drafter, "schedule": self.schedule, "batch": self.batch}}

    def forget(self) -> None:
        self._counted = Counted(create_schedule(self.schedule, self.batch, PREFILL_CHUNK), self.batch)
        self._engine = Engine(
            self.target, create(self.spec), max_batch=self.batch, schedule=self._counted, tokenizer=self.tokenizer
        )

    def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Reply]:
        before = self._counts()
        replies = super().answer(prompts, ask)
        replies[0].batch = {name: count - before[name] for name, count in self._counts().items()}
        return replies

    def _counts(self) -> dict[str, int]:
        """Since the beginning; slots: rows that could have run."""
        seen = self._counted
        return {
            "rounds": seen.rounds,
            "rows": seen.rows,
            "slots": seen.rounds * self.batch,
            "drafting": seen.drafting,
            "same_length": seen.same_length,
            "moved_bytes": self.target.cache.moved_bytes if isinstance(self.target, RectangularTarget) else 0,
        }
