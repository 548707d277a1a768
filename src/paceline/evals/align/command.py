"""`paceline eval align` after its options are read: open backends and judges, run, compute the figures."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.errors import MethodError, PacelineError
from paceline.evals.align import prompts
from paceline.evals.align.backend import Backend, Endpoint, Markers
from paceline.evals.align.data import read
from paceline.evals.align.figures import KIND, results
from paceline.evals.align.judge import (
    CHECKS,
    Checks,
    Judge,
    JudgeScorer,
    ModelJudge,
    ModelScorer,
    Scorer,
    ServerScorer,
)  # fmt: skip
from paceline.evals.align.methods import Method, Setting, read_methods
from paceline.evals.align.options import AlignOptions
from paceline.evals.align.run import Plan, Progress, run, shown_digest
from paceline.evals.align.types import Data, digest
from paceline.jsonl import check_folder
from paceline.workbench.client import Retry, find_model, is_url, parse
from paceline.workbench.runs import Run

SELF = "self"
"""The judge that is the model under test."""


@dataclass
class Outcome:
    """A finished command. results: rows as --json prints them. complete: no item failed or is missing."""

    results: list[dict[str, Any]]
    out: Path
    progress: Progress
    complete: bool


def align(asked: AlignOptions, progress: Progress) -> Outcome:
    """Begin or continue the run in the folder `asked.out`; None: runs/align-DATE-TIME. Refuses impossible options
    before a model is asked anything."""
    asked, out = asked.with_compat(), asked.out
    if out is None:
        out = Path("runs") / f"align-{datetime.now():%Y%m%d-%H%M%S}"
        check_folder(out)
    scenarios = [name.strip() for name in asked.scenario.split(",")] if asked.scenario else []
    data, methods = read(asked.data, scenarios, asked.limit), read_methods(asked.method)
    judges = asked.judge or ([CHECKS] if _is_sample(asked) else [])
    _check(asked, methods, judges)
    try:
        return asyncio.run(_run(asked, out, data, methods, judges, progress))
    except asyncio.CancelledError:  # a second Ctrl-C
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


async def _run(
    asked: AlignOptions, out: Path, data: Data, methods: list[Method], names: Sequence[str], progress: Progress
) -> Outcome:
    backends: dict[str, Backend] = {}
    try:
        backend = backends[asked.model] = await open_backend(asked.model, asked, asked.api_key_env)
        judges = [await open_judge(name, asked, backends) for name in names]
        if len({judge.label for judge in judges}) < len(judges):
            raise PacelineError("two judges have the same name; a run tells judges apart by their models")
        adversarial = not asked.plain_prompts
        setting = Setting(asked.decoding, adversarial, asked.rules_first, _markers(asked), asked.compat)
        scorer = _scorer(asked, judges) if any(method.chooses for method in methods) else None
        plan = Plan(data, methods, backend, judges, setting, scorer, asked.concurrency)
        about = describe(asked, plan)
        with Run.open(out, KIND, **about) as folder, _Interrupt(progress):
            folder.update(**about)
            await run(plan, folder, progress)
    finally:
        for one in backends.values():
            await one.close()
    rows, _ = results(out)
    return Outcome(rows, out, progress, progress.done == plan.total and not progress.failed)


async def open_backend(spec: str, asked: AlignOptions, key_env: str | None) -> Backend:
    """An endpoint, or our engine if `spec` is a folder; PacelineError in one line if it cannot be opened."""
    if not is_url(spec):
        from paceline.evals.align.local import Local

        return Local(
            spec, asked.draft, reuse=asked.reuse, batch=asked.concurrency, dtype=asked.dtype, device=asked.device
        )
    urls, model = parse(spec)
    key = None
    if key_env is not None and not (key := os.environ.get(key_env)):
        raise PacelineError(f"the environment has no {key_env}, which was to hold the API key")
    tokenizer = None
    if asked.tokenizer is not None and spec == asked.model:
        from paceline.target.load import load_tokenizer

        tokenizer = load_tokenizer(asked.tokenizer)
        if not tokenizer.has_chat_template:
            raise PacelineError(f"{asked.tokenizer} has no chat template, and --tokenizer is there to render prompts")
    return Endpoint(
        urls, model or await find_model(urls[0], key), key=key, slots=asked.concurrency, timeout=asked.timeout,
        retry=_retry(asked), stream=asked.stream, tokenizer=tokenizer,
    )  # fmt: skip


async def open_judge(name: str, asked: AlignOptions, backends: dict[str, Backend]) -> Judge:
    """A judge. Judges on the same model share a backend."""
    if name == CHECKS:
        return Checks()
    spec = asked.model if name == SELF else name
    if spec not in backends:
        backends[spec] = await open_backend(spec, asked, asked.judge_api_key_env)
    return ModelJudge(backends[spec], asked.judging, _markers(asked) if spec == asked.model else Markers())


def _markers(asked: AlignOptions) -> Markers:
    return Markers(opened=asked.thinking)


def _retry(asked: AlignOptions) -> Retry:
    return Retry(asked.tries, *asked.pauses)


def _scorer(asked: AlignOptions, judges: Sequence[Judge]) -> Scorer:
    if asked.reward == "judge":
        return JudgeScorer(judges[0], asked.scoring)
    if is_url(asked.reward):
        return ServerScorer(asked.reward, _retry(asked))
    return ModelScorer(asked.reward)


def describe(asked: AlignOptions, plan: Plan) -> dict[str, Any]:
    """The content of run.json: under "identity" what decides the answers; the rest is for reports."""
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


class _Interrupt:
    """Inside, the first Ctrl-C begins no further items and lets the present ones end; the second one cancels them."""

    def __init__(self, progress: Progress):
        self._progress = progress

    def __enter__(self) -> None:
        with suppress(NotImplementedError, ValueError, RuntimeError):  # not on this system, or not the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._press, asyncio.current_task())

    def __exit__(self, *_: object) -> None:
        with suppress(NotImplementedError, ValueError, RuntimeError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _press(self, task: asyncio.Task[Any] | None) -> None:
        if self._progress.stop and task is not None:
            task.cancel()
        self._progress.stop = True
        self._progress.watch(self._progress)
