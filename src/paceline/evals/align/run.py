"""The run: answers every item with every method, judges the answers, and writes each row as soon as it exists.

A bounded number of items is under way at once; each is answered, then judged. Rows in the folder are not computed
again. Items that failed in an earlier run come last. A failed item does not stop the others.

    generations.jsonl   a row for each item and method
    judgements.jsonl    a row for each answer and judge
    errors.jsonl        failures and their reasons
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from paceline.errors import PacelineError
from paceline.evals.align import prompts
from paceline.evals.align.backend import Backend
from paceline.evals.align.figures import ERRORS, GENERATIONS, JUDGEMENTS
from paceline.evals.align.judge import Judge, Scorer, Unjudged
from paceline.evals.align.methods import Method, Setting, Task
from paceline.evals.align.types import Call, Data, Item, Scenario, digest
from paceline.workbench.runs import Lines, Run

HOPELESS = 20
"""Failures in a row, in addition to one for each item under way, that end a run."""


@dataclass(frozen=True)
class Plan:
    """All parts of a run. concurrency: items under way at once."""

    data: Data
    methods: Sequence[Method]
    backend: Backend
    judges: Sequence[Judge]
    setting: Setting = field(default_factory=Setting)
    scorer: Scorer | None = None
    concurrency: int = 8

    @property
    def total(self) -> int:
        return len(self.data.items) * len(self.methods)


@dataclass
class Progress:
    """How far a run is. watch: called with it after every item. stop: if set, no further items are begun."""

    total: int = 0
    done: int = 0
    found: int = 0
    failed: int = 0
    in_a_row: int = 0
    last_error: str = ""
    stop: bool = False
    watch: Callable[[Progress], None] = field(default=lambda progress: None, repr=False)


async def run(plan: Plan, folder: Run, progress: Progress) -> None:
    """Work through the plan. Raises PacelineError after too many failures, or if the folder cannot be written."""
    progress.total = plan.total
    files = folder.lines(GENERATIONS), folder.lines(JUDGEMENTS), folder.lines(ERRORS)
    cases = [Case(item, method, plan, *files) for item in plan.data.items for method in plan.methods]
    queue = iter(sorted(cases, key=lambda case: case.key in case.errors))
    workers = [asyncio.create_task(_work(plan, progress, queue)) for _ in range(plan.concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _work(plan: Plan, progress: Progress, queue: Iterator[Case]) -> None:
    for case in queue:
        if progress.stop:
            return
        try:
            worked = await case.do()
        except Exception as error:
            case.note(error)
            progress.failed += 1
            progress.in_a_row += not isinstance(error, Unjudged)  # the backend did answer
            progress.last_error = f"{type(error).__name__}: {error}"
            if progress.in_a_row > plan.concurrency + HOPELESS:
                raise PacelineError(f"{progress.in_a_row} items failed in a row; the last: {error}") from error
        else:
            progress.found += not worked
            progress.in_a_row = 0
        progress.done += 1
        progress.watch(progress)


@dataclass
class Case:
    """One item by one method, with every judge."""

    item: Item
    method: Method
    plan: Plan
    generations: Lines
    judgements: Lines
    errors: Lines

    @property
    def scenario(self) -> Scenario:
        return self.plan.data.scenarios[self.item.scenario]

    @cached_property
    def key(self) -> str:
        """The generation's key: a digest of all that decides it."""
        plan = self.plan
        scorer = plan.scorer.label if plan.scorer is not None and self.method.chooses else None
        return digest(
            [
                self.item.id, shown_digest(self.item, self.scenario), self.method.identity, plan.backend.label,
                asdict(plan.setting), prompts.VERSION, scorer,
            ]
        )  # fmt: skip

    async def do(self) -> bool:
        """Answer and judge what is missing; returns whether anything was."""
        row = self.generations.get(self.key)
        worked = row is None
        if row is None:
            row = await self._generate()
        if row["unanswered"] is not None:
            return worked
        errors: list[Exception] = []
        for judge in self.plan.judges:
            key = digest([self.key, judge.identity])
            if key not in self.judgements:
                worked = True
                try:
                    await self._judge(judge, key, row)
                except Exception as error:  # the other judges are still asked
                    errors.append(error)
        for other in errors[:-1]:
            self.note(other)
        if errors:
            raise errors[-1]
        return worked

    async def _generate(self) -> dict[str, Any]:
        plan, scope = self.plan, f"{self.item.id} {self.method.label}"
        task = Task(self.item, self.scenario, plan.backend, plan.setting, scope, plan.scorer)
        generation = await self.method(task)
        return self._append(
            self.generations,
            self.key,
            {
                "prompt": task.query,
                "response": generation.response,
                "thought": generation.thought,
                "finish_reason": generation.finish_reason,
                "unanswered": generation.unanswered,
                **generation.extra,
            },
            generation.calls,
        )

    async def _judge(self, judge: Judge, key: str, row: Mapping[str, Any]) -> None:
        judgement = await judge.judge(self.item, self.scenario, row["prompt"], row["response"])
        self._append(
            self.judgements,
            key,
            {
                "generation": self.key,
                "judge": judge.label,
                "judge_id": digest(judge.identity),
                "verdicts": [[verdict.rule, verdict.mark, verdict.analysis] for verdict in judgement.verdicts],
                "cut": judgement.cut,
            },
            judgement.calls,
        )

    def note(self, error: Exception) -> None:
        """Write an error to the file, with its traceback if it is not a PacelineError."""
        known = isinstance(error, PacelineError)
        row = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "error": f"{type(error).__name__}: {error}",
            "trace": None if known else "".join(traceback.format_exception(error)),
        }
        self._append(self.errors, self.key, row, getattr(error, "calls", ()))

    def _append(self, file: Lines, key: str, row: Mapping[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
        """Write a row about this case, with the cost of its calls."""
        item = self.item
        whole = {
            "key": key,
            "item": item.id,
            "digest": shown_digest(item, self.scenario),
            "scenario": item.scenario,
            "label": item.label,
            "method": self.method.label,
            **row,
            "tokens": account(calls),
            "calls": [asdict(call) for call in calls],
        }
        file.append(whole)
        return whole


def shown_digest(item: Item, scenario: Scenario) -> str:
    """A digest of an item and its rules. A row with another digest is about texts that have changed since."""
    return digest([item.digest, scenario.digest])


def account(calls: Sequence[Call]) -> dict[str, Any]:
    """Sums over calls: prefilled, cached, injected and generated tokens (None if a server does not report them),
    seconds, requests and tries."""
    counts: dict[str, Any] = {}
    for name in ("prefilled", "cached", "injected", "generated"):
        values = [getattr(call, name) for call in calls]
        counts[name] = None if any(value is None for value in values) else sum(values)
    seconds = round(sum(call.seconds for call in calls), 6)
    return counts | {"seconds": seconds, "requests": len(calls), "tries": sum(call.tries for call in calls)}
