"""Comparisons on a terminal: drafters and plain decoding answer the same prompts in turns, asked by bench's runner.

A small model answers in milliseconds, and another process may take the processor for as long. So answers are repeated,
and a ratio that cannot be trusted is said to be one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch

from paceline.bench.checks import is_impossible
from paceline.bench.options import Options
from paceline.bench.record import is_looping
from paceline.bench.runner import Runner, grouped
from paceline.bench.suites import Question
from paceline.cli.drive import Answer, Interrupt, Refused, Watch, drive, ignore, warm_up
from paceline.cli.prompts import Job
from paceline.core.tally import over
from paceline.draft.base import UNLIMITED
from paceline.engine.engine import Engine
from paceline.net.completion import Completion, in_common
from paceline.net.endpoint import Body, Endpoint

TURNS = 5  # Turns that count, after a warm-up turn.
WILD = 0.5  # If the ratios spread more (interquartile range over median), the machine was busy.
PATIENCE = 30.0
"""Seconds after which no further turn begins; turns that long have many rounds, so their ratios are steady."""


class Driven(Endpoint):
    """A drafter that answers the prompts of a command, `Job`s, as the command does.

    engine   gives target, sizes and schedule; the first turn uses it if it has this very drafter.
    jobs     by index; a request's "user" names the job to answer.
    refused  called with a prompt that cannot be answered; watch: called with every delta.
    answers  by turn and by the prompt's index. A turn begins with `forget`."""

    in_process = True

    def __init__(
        self, draft: str, jobs: Sequence[Job], engine: Engine, chat: bool | None, interrupt: Interrupt,
        refused: Refused, *,
        schedule: str = "ragged", first: bool = False, name: str | None = None,
    ):  # fmt: skip
        super().__init__(len(jobs))
        self.name, self.jobs = name or draft, {str(job.index): job for job in jobs}
        self.draft, self.like, self.chat, self.schedule = draft, engine, chat, schedule
        self.interrupt, self.refused, self._first = interrupt, refused, first
        self.engine = engine
        self.watch: Watch = ignore
        self.answers: list[dict[int, Answer]] = []

    def forget(self) -> None:
        """Begin a turn with a drafter that has seen nothing, and an engine that runs every prompt whole."""
        if self.answers or not self._first:
            like, size = self.like, self.like.max_batch
            options: dict[str, Any] = {"tokenizer": like.tokenizer, "schedule": self.schedule, "reuse": False}
            options["budget"] = like.budget is not UNLIMITED
            self.engine = Engine(like.target, self.draft, max_batch=size, **options)
        warm_up(self.engine)
        self.answers.append({})

    async def complete(self, body: Body) -> Completion:
        return self.ask([body])[0]

    def ask(self, bodies: Sequence[Body], slots: int | None = None) -> list[Completion]:
        """Answer jobs together, each by its own parameters."""
        jobs = [self.jobs[body["user"]] for body in bodies]
        done = drive(self.engine, jobs, self.chat, self.interrupt, self.refused, self.watch)
        self.answers[-1] |= {answer.job.index: answer for answer in done}
        return [_completion(self.answers[-1].get(job.index)) for job in jobs]


def _completion(answer: Answer | None) -> Completion:
    if answer is None:
        return Completion(finish_reason="abort")
    row = answer.row
    usage, finish = {"prompt_tokens": row.prompt_length}, str(row.finish_reason)
    return Completion(row.text, finish_reason=finish, tokens=row.new_tokens.tolist(), usage=usage)


class Compared:
    """A job's complete answers by a drafter and by plain decoding.

    turns             (drafted, plain) of each turn; at least one.
    ratios            tokens per second with drafts over those without, of every turn, sorted.
    pair              the turn with the median ratio, `speedup`.
    first_difference  index of the first new token that differs in it; None if all are the same.
    loops             whether its drafted answer ends in a loop; doubts: why the ratio cannot be trusted."""

    def __init__(self, job: Job, turns: Sequence[tuple[Answer, Answer]]):
        self.job, ordered = job, sorted(turns, key=_ratio)
        self.ratios = [*map(_ratio, ordered)]
        self.pair = ordered[len(ordered) // 2]
        self.speedup = _ratio(self.pair)
        mine, other = (answer.row.new_tokens.tolist() for answer in self.pair)
        self.first_difference = None if mine == other else in_common(mine, other)
        self.loops = is_looping(mine)
        self.doubts = doubts(self.speedup, self.pair[0].row.stats.mean_accepted_tokens, self.ratios)

    @classmethod
    def of(cls, job: Job, drafted: Driven, plain: Driven) -> Compared | None:
        """Make the comparison, or None if there is nothing to compare. The first turn, a warm-up, counts only if it is
        the only one."""
        turns = list(zip(drafted.answers, plain.answers, strict=False))
        for some in (turns[1:], turns[:1]):
            both = [(mine[job.index], its[job.index]) for mine, its in some if job.index in mine and job.index in its]
            if whole := [pair for pair in both if all(answer.row.is_complete for answer in pair)]:
                return cls(job, whole)
        return None

    def record(self) -> dict[str, Any]:
        """The drafted answer as a JSON object, with the figures of the comparison."""
        drafted, plain = self.pair
        return drafted.record() | {
            "baseline_tokens_per_second": round(plain.tokens_per_second, 2),
            "speedup": round(self.speedup, 4),
            "identical": self.first_difference is None,
            "first_difference": self.first_difference,
            "speedups": [round(ratio, 4) for ratio in self.ratios],
            "reliable": not self.doubts,
            "looping": self.loops,
        }

    def lines(self, drafter: str, dtype: torch.dtype, blocks: str | None = None) -> list[str]:
        """Both speeds, their ratio, whether the outputs are identical, and any doubts. blocks: `Target.quantised`."""
        from paceline.runs.report import render

        (drafted, plain), at = self.pair, self.first_difference
        return render(
            Path(__file__).with_name("compared.txt.jinja"),
            speeds=(plain.tokens_per_second, drafted.tokens_per_second),
            drafter=drafter,
            ratio=self.speedup,
            ratios=self.ratios,
            at=at,
            tokens=None if at is None else (_around(plain, at), _around(drafted, at)),
            blocks=blocks,
            dtype=str(dtype).removeprefix("torch."),
            loops=self.loops,
            doubts=self.doubts,
        ).splitlines()


def runner(
    sides: Sequence[Driven], jobs: Sequence[Job], batch: int, interrupt: Interrupt, done: Callable[[Job], None]
) -> Runner:
    """Make bench's runner for jobs; its method `repeat` is a turn. done: called with each answered job."""
    by_id = {str(job.index): job for job in jobs}
    return Runner(
        sides,
        grouped([(Question(id, "", "", ("",)), 1) for id in by_id], batch),
        Options(batch=batch),
        request=lambda question, _: {"user": question.id},
        stopped=lambda: interrupt.pressed,
        progress=lambda answer: done(by_id[answer.question]),
        catch=(),
    )


def repeat(turn: Callable[[int], bool]) -> None:
    """Run `turn` 0, 1, ..., until it returns False, there were `TURNS` after the first, or `PATIENCE` is over."""
    began, number = perf_counter(), 0
    while turn(number) and number < TURNS and perf_counter() - began < PATIENCE:
        number += 1


def doubts(ratio: float, mean_accepted_tokens: float, ratios: Sequence[float] = ()) -> list[str]:
    """Why a ratio cannot be trusted, in one line; empty if it can."""
    why = "the ratios scatter" if _spread(ratios) > WILD else ""
    if is_impossible(ratio, mean_accepted_tokens):
        why = f"a ratio of {ratio:.2f} at {mean_accepted_tokens:.2f} mean accepted tokens is impossible"
    return [f"{why}: another process is using the processor, and timings are not reliable"] if why else []


def _ratio(turn: tuple[Answer, Answer]) -> float:
    drafted, plain = (answer.tokens_per_second for answer in turn)
    return over(drafted, plain)


def _spread(ratios: Sequence[float]) -> float:
    """Interquartile range of the ratios over their median; 0 for fewer than two."""
    if len(ratios) < 2:
        return 0.0
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def _around(answer: Answer, at: int) -> str:
    """A few tokens of an answer from `at` on."""
    few = answer.row.new_tokens[at : at + 4].tolist()
    return " ".join(map(str, few)) if few else "(ended)"
