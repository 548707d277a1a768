"""A benchmark from its options to its figures: `bench(Benchmark(...))` is what `paceline bench` does.

    result = bench(Benchmark("models/demo", drafts=("sam",), suite="demo", out=Path("run")))
    result.results[0]["speedup"]

Lets the runner ask every contestant, finds out why answers differ that should not, works out the figures and writes the
files that others read. Knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.bench import specbench
from paceline.bench.contestant import Contestant
from paceline.bench.devices import on_devices
from paceline.bench.differences import judge_differences
from paceline.bench.environment import disturbances
from paceline.bench.folder import RUN, SUMMARY, RunFolder, answers_of, check
from paceline.bench.metrics import summarize
from paceline.bench.peers import parse_peer
from paceline.bench.record import Answer, settled
from paceline.bench.runner import Runner, answered, has_answered
from paceline.bench.setting import (
    Benchmark,
    Setting,
    Watch,
    create_contestants,
    description,
    identity,
    methods,
    open_contestants,
    set_up,
)
from paceline.draft.registry import create
from paceline.errors import PacelineError


@dataclass(frozen=True)
class Result:
    """results: a dict for each method and category, see `metrics.summarize`; notes: what else there is to say;
    disturbed: see `disturbance.disturbances`."""

    out: Path
    complete: bool
    results: list[dict[str, Any]]
    unavailable: dict[str, str]
    notes: list[str]
    disturbed: list[str]


def bench(benchmark: Benchmark, watch: Watch = Watch()) -> Result:
    """Run, or continue, the benchmark in `benchmark.out`.

    Raises PacelineError for what the caller has to change, before anything is timed."""
    # Misspelt specs are refused before a large model is read, another run's folder before an engine is started.
    for spec in benchmark.drafts:
        create(spec)
    for spec in benchmark.peers:
        parse_peer(spec)
    if benchmark.peers and benchmark.compares_schedules:
        raise PacelineError("--schedule compares schedules of our engine: leave out --peer, or --schedule")
    setting = set_up(benchmark, watch)
    contestants = create_contestants(setting)
    described = identity(setting, contestants)
    check(benchmark.out, described)
    finished = _finished(setting, contestants)
    try:
        unavailable = open_contestants([c for c in contestants if c.name not in finished], watch)
        present = [contestant for contestant in contestants if contestant.name not in unavailable]
        opened = [contestant for contestant in present if contestant.name not in finished]
        described |= description(setting, contestants, unavailable)
        with RunFolder.open(benchmark.out, described) as folder:
            folder.describe(methods(opened))  # a peer may have been installed since the run began
            complete = _run(setting, folder, present, watch)
            folder.describe(methods(opened))  # a draft model's size may be a mean over its forwards
            _close_all(contestants)  # judging may load the model once more, in float32
            return _conclude(setting, folder, unavailable, complete, watch)
    finally:
        _close_all(contestants)


def _finished(setting: Setting, contestants: Sequence[Contestant]) -> set[str]:
    """Names of those that have answered everything, and need not be started."""
    done, repeats = answered(answers_of(setting.benchmark.out)), setting.benchmark.options.repeats
    return {c.name for c in contestants if has_answered(c.name, setting.groups, repeats, done)}


def _close_all(contestants: list[Contestant]) -> None:
    """Close all that are still open."""
    while contestants:
        contestants.pop().close()


def _run(setting: Setting, folder: RunFolder, present: Sequence[Contestant], watch: Watch) -> bool:
    options, encode = setting.benchmark.options, setting.tokenizer.encode
    watch.total(len(present) * setting.num_questions * options.repeats)
    runner = Runner(
        folder,
        present,
        setting.groups,
        options,
        prompt=setting.transcriber.prompt,
        recount=lambda text: max(len(encode(text)) - 1, 0) if text else 0,
        ends=tuple(setting.target.eos_token_ids),
        device=setting.target.device,
        stopped=watch.stopped,
        progress=watch.answered,
    )
    return runner.run()


def _conclude(
    setting: Setting, folder: RunFolder, unavailable: dict[str, str], complete: bool, watch: Watch
) -> Result:
    """Work out the figures of all answers there are and write the files that others read."""
    benchmark, answers = setting.benchmark, settled(folder.answers)
    judged = judge_differences(setting, answers, folder.read(SUMMARY) or {}, watch)
    facts = {entry["method"]: entry for entry in (folder.read(RUN) or {}).get("methods", [])}
    figures = summarize(answers, facts, judged=judged)
    compares = benchmark.compares_schedules  # a larger batch may be faster than its drafts alone allow
    disturbed = disturbances(answers, [] if compares else figures, threads=torch.get_num_threads())
    summary = {
        "complete": complete,
        "disturbed": disturbed,
        "results": figures,
        "predictions": {"devices": {} if compares else on_devices(setting, answers)},
    }
    folder.write(SUMMARY, summary)
    notes = [] if compares else _export(setting, answers)
    return Result(folder.path, complete, figures, unavailable, notes, disturbed)


def _export(setting: Setting, answers: Sequence[Answer]) -> list[str]:
    """Write Spec-Bench's files; returns what there is to say of them."""
    benchmark = setting.benchmark
    return specbench.export(
        answers,
        benchmark.out / "spec-bench",
        model=Path(benchmark.model).name or benchmark.model,
        dtype=setting.dtype,
        temperature=benchmark.options.temperature,
        suite=setting.suite,
    )
