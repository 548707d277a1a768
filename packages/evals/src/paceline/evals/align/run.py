"""`paceline eval align`: answers every item with every method, judges the answers, and writes each row at once.

A bounded number of items is under way at once; each is answered, then judged. Rows in the folder are kept. Items that
failed in an earlier run come last. A failed item does not stop the others.

    run.json            what was asked, with the rules and the items
    generations.jsonl   a row for each item and method
    judgements.jsonl    a row for each answer and judge
    errors.jsonl        failures and their reasons
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.errors import MethodError, PacelineError
from paceline.evals.align import prompts
from paceline.evals.align.backend import Backend
from paceline.evals.align.data import read
from paceline.evals.align.figures import ERRORS, GENERATIONS, JUDGEMENTS, KIND, results
from paceline.evals.align.judge import CHECKS, Checks, Judge, ModelJudge, Scorer, Unjudged, open_scorer
from paceline.evals.align.methods import Method, Setting, Task, read_methods
from paceline.evals.align.options import AlignOptions
from paceline.evals.align.types import Call, Data, Item, Scenario, digest
from paceline.given import listed
from paceline.interrupt import Interrupt
from paceline.net.client import Retry, find_model, is_url
from paceline.net.endpoint import Remote
from paceline.net.keys import Keys
from paceline.runs.progress import Progress
from paceline.runs.runs import Lines, Run, new_folder

SELF = "self"  # The name of the judge that is the model under test.
HOPELESS = 20  # A run ends after so many failures in a row, plus one for each item under way.


@dataclass
class State:
    """Progress of a run. stop: if set, no further items are begun."""

    total: int = 0
    done: int = 0
    failed: int = 0
    in_a_row: int = 0
    last_error: str = ""
    stop: bool = False
    progress: Progress = field(default_factory=Progress, repr=False)

    def show(self) -> None:
        """Say how far it is."""
        what = "finishing what is under way" if self.stop else "answering"
        self.progress.step(self.done, self.total, what + (f", {self.failed} failed" if self.failed else ""))


@dataclass
class Outcome:
    """A finished command. results: rows as --json prints them. complete: no item failed or is missing."""

    results: list[dict[str, Any]]
    out: Path
    state: State
    complete: bool


@dataclass(frozen=True)
class Plan:
    """All parts of a run. concurrency: items under way at once."""

    data: Data
    methods: Sequence[Method]
    backend: Backend
    judges: Sequence[Judge]
    setting: Setting
    scorer: Scorer | None
    concurrency: int


def align(asked: AlignOptions, progress: Progress = Progress()) -> Outcome:
    """Begin or continue the run in `asked.out`; None: runs/align-DATE-TIME.
    Raises PacelineError for impossible options."""
    asked, out = asked.with_compat(), asked.out or new_folder("align")
    data, methods = read(asked.data, listed(asked.scenario), asked.limit), read_methods(asked.method)
    judges = asked.judge or ([CHECKS] if _is_sample(asked) else [])
    _check(asked, methods, judges)
    try:
        return asyncio.run(_align(asked, out, data, methods, judges, State(progress=progress)))
    except asyncio.CancelledError:  # The user pressed Ctrl-C a second time.
        raise KeyboardInterrupt from None


def _is_sample(asked: AlignOptions) -> bool:
    return asked.data.split(",")[0] == "sample"


def _check(asked: AlignOptions, methods: Sequence[Method], judges: Sequence[str]) -> None:
    if CHECKS in judges and not _is_sample(asked):
        raise PacelineError("--judge checks is a program that knows the sample's rules; other data needs a judge model")
    if not 0 <= asked.scoring.alpha < 1:
        raise PacelineError(f"--alpha is {asked.scoring.alpha:g}; it must be 0 or more and below 1")
    choosing = [method.label for method in methods if method.chooses]
    if choosing and asked.reward == "judge" and not judges:
        raise MethodError(f"{choosing[0]} needs something that scores answers: give --judge, or --reward")
    if choosing and asked.decoding.is_greedy:
        raise MethodError(f"{choosing[0]} chooses among answers, and at temperature 0 they are all the same; give -t")


async def _align(
    asked: AlignOptions, out: Path, data: Data, methods: list[Method], names: Sequence[str], state: State
) -> Outcome:
    backends: dict[str, Backend] = {}
    try:
        backend = backends[asked.model] = await open_backend(asked.model, asked, asked.keys)
        judges = [await open_judge(name, asked, backends) for name in names]
        if len({judge.label for judge in judges}) < len(judges):
            raise PacelineError("two judges have the same name; a run tells judges apart by their models")
        setting = Setting(asked.decoding, not asked.plain_prompts, asked.rules_first, asked.thinking, asked.compat)
        chooses = any(method.chooses for method in methods)
        scorer = open_scorer(asked.reward, judges, asked.scoring, _retry(asked)) if chooses else None
        plan = Plan(data, methods, backend, judges, setting, scorer, asked.concurrency)
        about = describe(asked, plan)

        def press() -> None:
            state.stop = True
            state.show()

        with Run.open(out, KIND, **about) as folder, Interrupt(on_first=press):
            folder.update(**about)
            await run(plan, folder, state)
    finally:
        for one in backends.values():
            await one.close()
    rows, _ = results(out)
    return Outcome(rows, out, state, state.done == state.total and not state.failed)


async def open_backend(spec: str, asked: AlignOptions, keys: Keys) -> Backend:
    """Open an endpoint, or our engine if `spec` is a folder. Raises PacelineError if it cannot be opened."""
    if not is_url(spec):
        from paceline.evals.align.local import local_backend

        return local_backend(
            spec, asked.draft, reuse=asked.reuse, batch=asked.concurrency,
            dtype=asked.dtype, device=asked.device, exact=asked.exact, activations=asked.activations,
        )  # fmt: skip
    key = keys.of(spec)
    tokenizer = None
    if asked.tokenizer is not None and spec == asked.model:
        from paceline.formats.tokenizer_files import load_tokenizer

        tokenizer = load_tokenizer(asked.tokenizer)
        if not tokenizer.has_chat_template:
            raise PacelineError(f"{asked.tokenizer} has no chat template, and --tokenizer is there to render prompts")
    endpoint = Remote(spec, key=key, slots=asked.concurrency, timeout=asked.timeout, retry=_retry(asked))
    endpoint.model = endpoint.model or await find_model(endpoint.url, key)
    return Backend(endpoint, endpoint.model, tokenizer=tokenizer, stream=asked.stream)


async def open_judge(name: str, asked: AlignOptions, backends: dict[str, Backend]) -> Judge:
    """A judge. Judges on the same model share a backend."""
    if name == CHECKS:
        return Checks()
    spec = asked.model if name == SELF else name
    if spec not in backends:
        backends[spec] = await open_backend(spec, asked, asked.judge_keys)
    return ModelJudge(backends[spec], asked.judging, asked.thinking and spec == asked.model)


def _retry(asked: AlignOptions) -> Retry:
    return Retry(asked.tries, *asked.pauses)


def describe(asked: AlignOptions, plan: Plan) -> dict[str, Any]:
    """The content of run.json: facts that decide the answers under "identity", the rest for reports."""
    ours = not is_url(asked.model)
    return {
        "paceline": __version__,
        "identity": {
            "model": plan.backend.label,
            "setting": asdict(plan.setting),
            "prompts": prompts.VERSION,
            **({"reward": plan.scorer.label} if plan.scorer else {}),
        },
        "data": plan.data.name,
        "methods": [method.label for method in plan.methods],
        "judges": [{"label": judge.label, "id": digest(judge.identity)} for judge in plan.judges],
        "judging": asdict(asked.judging) | {"prompts": prompts.JUDGE_VERSION},
        "scoring": asdict(asked.scoring),
        "compat": asked.compat,
        "draft": asked.draft if ours else None,
        "reuse": asked.reuse if ours else None,
        "concurrency": plan.concurrency,
        "scenarios": [
            {
                "key": scenario.key,
                "name": scenario.name,
                "description": scenario.description,
                "rules": [[rule.kind, rule.index, rule.text, rule.weight] for rule in scenario.rules],
                "items": {i.id: shown_digest(i, scenario) for i in plan.data.items if i.scenario == scenario.key},
            }
            for scenario in plan.data.scenarios.values()
        ],
    }


async def run(plan: Plan, folder: Run, state: State) -> None:
    """Work through the plan. Raises PacelineError after too many failures, or if the folder cannot be written."""
    files = folder.lines(GENERATIONS), folder.lines(JUDGEMENTS), folder.lines(ERRORS)
    cases = [Case(item, method, plan, *files) for item in plan.data.items for method in plan.methods]
    state.total = len(cases)
    queue = iter(sorted(cases, key=lambda case: case.key in case.errors))
    workers = [asyncio.create_task(_work(plan, state, queue)) for _ in range(plan.concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _work(plan: Plan, state: State, queue: Iterator[Case]) -> None:
    for case in queue:
        if state.stop:
            return
        try:
            await case.do()
        except Exception as error:
            case.note(error)
            state.failed += 1
            state.in_a_row += not isinstance(error, Unjudged)  # An unreadable judgement is an answer of the backend.
            state.last_error = f"{type(error).__name__}: {error}"
            if state.in_a_row > plan.concurrency + HOPELESS:
                raise PacelineError(f"{state.in_a_row} items failed in a row; the last: {error}") from None
        else:
            state.in_a_row = 0
        state.done += 1
        state.show()


@dataclass
class Case:
    """An item, answered by a method and judged by every judge."""

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
        plan = self.plan
        scorer = plan.scorer.label if plan.scorer is not None and self.method.chooses else None
        return digest(
            [
                self.item.id, shown_digest(self.item, self.scenario), self.method.identity, plan.backend.label,
                asdict(plan.setting), prompts.VERSION, scorer,
            ]
        )  # fmt: skip

    async def do(self) -> None:
        """Make the missing answer and judgements."""
        row = self.generations.get(self.key)
        if row is None:
            row = await self._generate()
        if row["unanswered"] is not None:
            return
        errors: list[Exception] = []
        for judge in self.plan.judges:
            key = digest([self.key, judge.identity])
            if key not in self.judgements:
                try:
                    await self._judge(judge, key, row)
                except Exception as error:  # The other judges are still asked.
                    errors.append(error)
        for other in errors[:-1]:
            self.note(other)
        if errors:
            raise errors[-1]

    async def _generate(self) -> dict[str, Any]:
        plan, scope = self.plan, f"{self.item.id} {self.method.label}"
        task = Task(self.item, self.scenario, plan.backend, plan.setting, scope, plan.scorer)
        generation = await self.method(task)
        row = {
            "prompt": task.query,
            "response": generation.response,
            "thought": generation.thought,
            "finish_reason": generation.finish_reason,
            "unanswered": generation.unanswered,
            **generation.extra,
        }
        return self._append(self.generations, self.key, row, generation.calls)

    async def _judge(self, judge: Judge, key: str, row: Mapping[str, Any]) -> None:
        judgement = await judge.judge(self.item, self.scenario, row["prompt"], row["response"])
        verdicts = [[verdict.rule, verdict.mark, verdict.analysis] for verdict in judgement.verdicts]
        new = {"generation": self.key, "judge": judge.label, "judge_id": digest(judge.identity), "verdicts": verdicts}
        self._append(self.judgements, key, new | {"cut": judgement.cut}, judgement.calls)

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
    """Sums over calls: tokens by kind (None if a server does not report them), seconds, requests and tries."""
    counts: dict[str, Any] = {}
    for name in ("prefilled", "cached", "injected", "generated"):
        values = [getattr(call, name) for call in calls]
        counts[name] = None if any(value is None for value in values) else sum(values)
    seconds = round(sum(call.seconds for call in calls), 6)
    return counts | {"seconds": seconds, "requests": len(calls), "tries": sum(call.tries for call in calls)}
