"""Measure our engine: one endpoint for each drafter, or for each drafter, schedule and batch size, on a shared target.

With schedules, all requests of a group are handed in at once, and at most `batch` of them run in a round, so requests
are always waiting. The baseline, "none", is plain decoding one request at a time. If a published schedule is among
them, all run on the transformers target, so that only schedules differ."""

from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, is_dataclass, replace
from time import perf_counter
from typing import Any

from paceline import __version__
from paceline.bench.metrics import BASELINE
from paceline.bench.runner import QuestionGroup
from paceline.bench.suites import Question, tasks_in_turn
from paceline.core.request import Delta, Row
from paceline.core.rules import check_schedule
from paceline.core.sampling import SamplingParams
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Schedule, Turn, create_schedule, fitted
from paceline.errors import PacelineError
from paceline.formats.tokenizer import Tokenizer
from paceline.net.completion import Completion
from paceline.peers.peer import Peer
from paceline.target.base import Target
from paceline.target.rectangles import RectangularTarget

REQUESTS = 4
"""Requests handed in at once, in largest batches: so many that the end, when batches run empty, does not count much."""
PREFILL_CHUNK = 512
MOST = 1 << 30  # No limit on requests handed in at once: those beyond the batch wait.
TASK = "requests"  # The task of all requests if schedules are compared: they are mixed, and answered together.


class Ours(Peer):
    """A drafter, by its spec, on a target that all drafters of a run share. It is timed round by round, in the caller's
    thread, unlike `paceline.serve.local.Local`.

    engine  made anew by `open` and `forget`."""

    engine: Engine
    mixes = in_process = True

    def __init__(self, spec: str, target: Target, tokenizer: Tokenizer, *, batch: int, budget: bool = True):
        super().__init__(spec, MOST, tokenizer)
        self.target_bytes, self.budget, self.spec = target.weight_bytes, budget, spec
        self.target, self.batch, self.spelling = target, batch, tokenizer

    @property
    def _parts(self) -> tuple[Any, ...]:
        return tuple(getattr(self.engine.drafter, "parts", (self.engine.drafter,)))

    def open(self) -> None:
        self.forget()
        self.lossless = all(getattr(part, "lossless", "not stated") == "yes" for part in self._parts)
        self._weigh()
        options = {part.name: _options(part) for part in self._parts}
        self.facts = {"engine": f"paceline {__version__}", "drafter": options, "budget": self.budget}

    def forget(self) -> None:
        # Prompts are run whole (no reuse), so that repeats and other engines compute the same.
        drafter = create(self.spec)
        options = {"max_batch": self.batch, "budget": self.budget, "reuse": False}
        self.engine = Engine(self.target, drafter, tokenizer=self.tokenizer, **options)

    def close(self) -> None:
        super().close()
        vars(self).pop("engine", None)

    def wake(self, seconds: float) -> None:
        plain = Engine(self.target, tokenizer=self.tokenizer, reuse=False)
        began = perf_counter()
        while perf_counter() - began < seconds:
            plain.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        rounds: list[list[tuple[float, Delta]]] = [[] for _ in prompts]
        began = perf_counter()
        with closing(self.engine.stream(prompts, params)) as deltas:
            for delta in deltas:
                rounds[delta.index].append((perf_counter() - began, delta))
                if delta.row.error:
                    raise PacelineError(delta.row.error)
        seconds = perf_counter() - began
        self._weigh()
        return [completion_of(of_row[0][1].row, of_row, self.spelling, seconds) for of_row in rounds]

    def _weigh(self) -> None:
        """Note the bytes that a draft forward reads; a mean over its forwards so far if they differ."""
        self.draft_bytes = round(sum(getattr(part, "mean_bytes", part.weight_bytes) for part in self._parts))


def completion_of(
    row: Row, rounds: Sequence[tuple[float, Delta]], tokenizer: Tokenizer, seconds: float
) -> Completion:
    """A row as a completion. rounds: (seconds, delta) of each of its deltas."""
    return Completion(
        usage={"prompt_tokens": row.prompt_length},
        tokens=row.new_tokens.tolist(),
        text=tokenizer.decode(row.new_tokens.tolist()),
        seconds=seconds,
        lengths=[len(delta.tokens) for _, delta in rounds],
        times=[when for when, _ in rounds],
        nodes=[delta.nodes for _, delta in rounds],
        depths=[delta.depth for _, delta in rounds],
        calls=sum(delta.calls for _, delta in rounds),
        runs=_runs(row, tokenizer),
        parts=dict(row.stats.seconds),
        finish_reason=row.finish_reason or "abort",
    )


def _runs(row: Row, tokenizer: Tokenizer) -> list[tuple[str, str, int]]:
    """(drafter, text, tokens) of every run. A character of several tokens belongs to the run that completes it."""
    detokenizer, tokens, at = tokenizer.detokenizer(), row.new_tokens.tolist(), 0
    runs = []
    for who, count in row.runs:
        runs.append((who, "".join(map(detokenizer.push, tokens[at : at + count])), count))
        at += count
    if runs and (rest := detokenizer.flush()):
        who, text, count = runs[-1]
        runs[-1] = (who, text + rest, count)
    return runs


def _options(drafter: Any) -> dict[str, Any]:
    """A drafter's options, defaults included."""
    config = getattr(drafter, "config", None)
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}


def mixed_groups(questions: Sequence[tuple[Question, int]], batches: Sequence[int]) -> list[QuestionGroup]:
    """The questions with their tasks mixed, in groups that are handed in together."""
    mixed = tasks_in_turn([question for question, _ in questions], lambda question: question.task)
    mixed = [replace(question, task=TASK) for question in mixed]
    size = REQUESTS * max(batches)
    parts = [mixed[begin : begin + size] for begin in range(0, len(mixed), size)]
    return [QuestionGroup(n, tuple(part), (1,) * len(part)) for n, part in enumerate(parts)]


def scheduled_engines(
    drafts: Sequence[str], schedules: Sequence[str], batches: Sequence[int], target: Target, tokenizer: Tokenizer,
    budget: bool = True,
) -> list[Ours]:  # fmt: skip
    """Endpoints for every drafter, schedule and batch size, and for plain batched decoding.

    drafts: specs, including plain decoding."""
    engines: list[Ours] = [Ours(BASELINE, target, tokenizer, batch=1)]
    for batch in batches:
        for schedule in schedules:
            fit = fitted(target, create_schedule(schedule, batch, PREFILL_CHUNK))
            own = [spec for spec in drafts if spec != BASELINE]
            engines += [Scheduled(spec, schedule, batch, fit, tokenizer, budget) for spec in own]
        if batch > 1:
            engines.append(Scheduled(BASELINE, "ragged", batch, target, tokenizer))
    return engines


class Counted:
    """A schedule that counts its rounds, their rows, and rounds with equally long rows."""

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
    """A drafter with a schedule and a batch size. target: must be able to run the schedule."""

    def __init__(
        self, drafter: str, schedule: str, batch: int, target: Target, tokenizer: Tokenizer, budget: bool = True
    ):
        super().__init__(drafter, target, tokenizer, batch=batch, budget=budget)
        self.name, self.drafter, self.schedule = f"{drafter} {schedule} {batch}", drafter, schedule

    def open(self) -> None:
        super().open()
        check_schedule(self.schedule)
        self.facts |= {"scheduled": {"drafter": self.drafter, "schedule": self.schedule, "batch": self.batch}}

    def forget(self) -> None:
        seen = self._counted = Counted(create_schedule(self.schedule, self.batch, PREFILL_CHUNK), self.batch)
        options = {"max_batch": self.batch, "schedule": seen, "budget": self.budget, "tokenizer": self.tokenizer}
        self.engine = Engine(self.target, create(self.spec), **options)

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        before = self._counts()
        replies = super().answer(prompts, params)
        replies[0].batch = {name: count - before[name] for name, count in self._counts().items()}
        return replies

    def _counts(self) -> dict[str, int]:
        """Counts since the beginning: rounds, their rows and slots, drafting rounds, drafting rounds with a full batch
        of one length, and bytes read and written to realign rows."""
        seen = self._counted
        counts = {name: getattr(seen, name) for name in ("rounds", "rows", "drafting", "same_length")}
        moved = self.target.cache.moved_bytes if isinstance(self.target, RectangularTarget) else 0
        return counts | {"slots": seen.rounds * self.batch, "moved_bytes": moved}
