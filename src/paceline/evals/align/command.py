"""What `paceline eval align` does once its options are read: open everything, run, work out the figures."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline import __version__
from paceline.errors import MethodError, PacelineError
from paceline.evals.align import judge_prompts, prompts
from paceline.evals.align.backends.base import Backend, Decoding
from paceline.evals.align.data import read
from paceline.evals.align.figures import results
from paceline.evals.align.judge import CHECKS, COMPAT_CHARACTERS, Checks, Judge, JudgeConfig, ModelJudge
from paceline.evals.align.methods import Method, read_methods
from paceline.evals.align.methods.base import Setting
from paceline.evals.align.run import Plan, Progress, run, shown_digest
from paceline.evals.align.scorers import JudgeScorer, ModelScorer, Scorer, ServerScorer
from paceline.evals.align.scoring import ALPHA, NaPolicy, Scoring
from paceline.evals.align.store import KIND, Store
from paceline.evals.align.thoughts import Markers
from paceline.evals.align.types import Data, digest
from paceline.workbench.client import Retry

SELF = "self"


@dataclass(frozen=True)
class Wish:
    """The command's options. model and judges: an address with #model, or a folder; judges also "self", "checks".

    compat turns on the official code's choices; an option of its own wins where it is given (not None)."""

    model: str
    data: str
    methods: str
    out: Path
    judges: Sequence[str] = ()
    scenarios: Sequence[str] = ()
    limit: int | None = None
    decoding: Decoding = field(default_factory=Decoding)
    plain_prompts: bool = False
    rules_first: bool = False
    thinking: bool = False
    judge_mode: Literal["joint", "sequential"] = "joint"
    judge_form: Literal["tags", "json"] = "tags"
    judge_tokens: int = 4200
    sees: Literal["asked", "plain"] | None = None
    characters: int | None = None
    na: NaPolicy | None = None
    alpha: float = ALPHA
    compat: bool = False
    reward: str = "judge"
    concurrency: int = 8
    retry: Retry = field(default_factory=Retry)
    timeout: float = 600.0
    stream: bool = True
    tokenizer: str | None = None
    key_env: str | None = None
    judge_key_env: str | None = None
    draft: str = "suffix,past=16384"
    reuse: bool = True
    dtype: str = "auto"
    device: str = "auto"


@dataclass
class Outcome:
    """results: rows as --json prints them. complete: every item has an answer or a reason why not, and a verdict."""

    results: list[dict[str, Any]]
    out: Path
    progress: Progress
    complete: bool
    notes: list[str] = field(default_factory=list)


def align(wish: Wish, progress: Progress) -> Outcome:
    """Run the wish, or go on with it, in its folder. What cannot be is refused before a model is asked anything."""
    data, methods = read(wish.data, wish.scenarios, wish.limit), read_methods(wish.methods)
    names = list(wish.judges) or ([CHECKS] if wish.data.split(",")[0] == "sample" else [])
    _check(wish, methods, names)
    try:
        return asyncio.run(_run(wish, data, methods, names, progress))
    except asyncio.CancelledError:  # a second Ctrl-C
        raise KeyboardInterrupt from None


def _check(wish: Wish, methods: Sequence[Method], judges: Sequence[str]) -> None:
    if CHECKS in judges and wish.data.split(",")[0] != "sample":
        raise PacelineError("--judge checks is a program that knows the sample's rules; other data needs a judge model")
    if not 0 <= wish.alpha < 1:
        raise PacelineError(f"--alpha is {wish.alpha:g}; it must be 0 or more and below 1")
    choosing = [method.label for method in methods if method.chooses]
    if choosing and wish.reward == "judge" and not judges:
        raise MethodError(f"{choosing[0]} needs something that scores answers: give --judge, or --reward")
    if choosing and wish.decoding.is_greedy:
        raise MethodError(f"{choosing[0]} chooses among answers, and at temperature 0 they are all the same; give -t")


async def _run(wish: Wish, data: Data, methods: list[Method], names: list[str], progress: Progress) -> Outcome:
    backends: dict[str, Backend] = {}
    try:
        backend = backends[wish.model] = await open_backend(wish.model, wish, wish.key_env)
        judges = [await open_judge(name, wish, backends) for name in names]
        if len({judge.label for judge in judges}) < len(judges):
            raise PacelineError("two judges have the same name; a run tells judges apart by their models")
        plan = Plan(data, methods, backend, judges, _setting(wish), _scorer(wish, methods, judges), wish.concurrency)
        about = describe(wish, plan)
        with Store.open(wish.out, about) as store, _Interrupt(progress):
            await run(plan, store, progress)
    finally:
        for one in backends.values():
            await one.close()
    rows, _ = results(wish.out)
    return Outcome(rows, wish.out, progress, progress.done == plan.total and not progress.failed)


async def open_backend(spec: str, wish: Wish, key_env: str | None) -> Backend:
    """An endpoint, or our engine with a folder; PacelineError in one line if it cannot be."""
    from paceline.evals.align.backends.endpoint import Endpoint
    from paceline.workbench.client import find_model, is_url, parse

    if not is_url(spec):
        from paceline.evals.align.backends.local import Local

        return Local(spec, wish.draft, reuse=wish.reuse, batch=wish.concurrency, dtype=wish.dtype, device=wish.device)
    urls, model = parse(spec)
    key = None
    if key_env is not None and not (key := os.environ.get(key_env)):
        raise PacelineError(f"the environment has no {key_env}, which was to hold the API key")
    tokenizer = None
    if wish.tokenizer is not None and spec == wish.model:
        from paceline.target.load import load_tokenizer

        tokenizer = load_tokenizer(wish.tokenizer)
        if not tokenizer.has_chat_template:
            raise PacelineError(f"{wish.tokenizer} has no chat template, and --tokenizer is there to render prompts")
    return Endpoint(
        urls, model or await find_model(urls[0], key), key=key, slots=wish.concurrency, timeout=wish.timeout,
        retry=wish.retry, stream=wish.stream, tokenizer=tokenizer,
    )  # fmt: skip


async def open_judge(name: str, wish: Wish, backends: dict[str, Backend]) -> Judge:
    """A judge; one on the model under test shares its backend."""
    if name == CHECKS:
        return Checks()
    spec = wish.model if name == SELF else name
    if spec not in backends:
        backends[spec] = await open_backend(spec, wish, wish.judge_key_env)
    return ModelJudge(backends[spec], judge_config(wish), _markers(wish) if spec == wish.model else Markers())


def judge_config(wish: Wish) -> JudgeConfig:
    """How judges judge: our defaults, or the official code's with --compat."""
    sees = wish.sees or ("plain" if wish.compat else "asked")
    characters = wish.characters if wish.characters is not None else COMPAT_CHARACTERS if wish.compat else None
    return JudgeConfig(
        wish.judge_mode, wish.judge_form, sees, characters, wish.compat,
        decoding=Decoding(max_tokens=wish.judge_tokens, temperature=0.0),
    )  # fmt: skip


def scoring_of(wish: Wish) -> Scoring:
    """NA is left out of behaviour by default, and not kept with --compat."""
    return Scoring(wish.alpha, wish.na or ("strict" if wish.compat else "exclude"))


def _markers(wish: Wish) -> Markers:
    return Markers(opened=wish.thinking)


def _setting(wish: Wish) -> Setting:
    return Setting(wish.decoding, not wish.plain_prompts, wish.rules_first, _markers(wish), wish.compat)


def _scorer(wish: Wish, methods: Sequence[Method], judges: Sequence[Judge]) -> Scorer | None:
    if not any(method.chooses for method in methods):
        return None
    if wish.reward == "judge":
        return JudgeScorer(judges[0], scoring_of(wish), not wish.plain_prompts)
    if wish.reward.startswith(("http://", "https://")):
        return ServerScorer(wish.reward, not wish.plain_prompts, wish.retry)
    return ModelScorer(wish.reward, not wish.plain_prompts)


def describe(wish: Wish, plan: Plan) -> dict[str, Any]:
    """run.json: what decides the outcome under "identity", and what a report needs to be read alone."""
    identity = {
        "model": plan.backend.label,
        "setting": asdict(plan.setting),
        "prompts": prompts.VERSION,
        "reward": plan.scorer.label if plan.scorer else None,
    }
    if plan.scorer is None:
        del identity["reward"]
    return {
        "kind": KIND,
        "paceline": __version__,
        "identity": identity,
        "data": plan.data.name,
        "methods": [method.label for method in plan.methods],
        "judges": [{"label": judge.label, "id": digest(judge.identity)} for judge in plan.judges],
        "judging": asdict(judge_config(wish)) | {"prompts": judge_prompts.VERSION},
        "scoring": asdict(scoring_of(wish)),
        "compat": wish.compat,
        "draft": None if wish.model.startswith("http") else wish.draft,
        "reuse": None if wish.model.startswith("http") else wish.reuse,
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
    """Within it the first Ctrl-C lets what is under way end and begins nothing new; the second one breaks off."""

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
