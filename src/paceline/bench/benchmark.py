"""A benchmark from its options to its figures: `bench(Benchmark(...))` is what `paceline bench` does.

    result = bench(Benchmark("models/demo", drafts=("sam",), suite="demo", out=Path("run")))
    result.results[0]["speedup"]

Calibrates the cost model, lets the runner ask every contestant, finds out why answers differ that should not, works
out the figures and writes the files that others read. Knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.bench import specbench
from paceline.bench.contestant import Contestant
from paceline.bench.differences import judge_differences
from paceline.bench.disturbance import disturbances
from paceline.bench.folder import RUN, SUMMARY, RunFolder, answers_of, check
from paceline.bench.metrics import BASELINE, summarize
from paceline.bench.peers import parse_peer
from paceline.bench.record import PEER, Answer, settled
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
from paceline.cost.calibration import Calibration
from paceline.cost.model import DEVICES, Machine, Size, predict
from paceline.cost.predict import predict_run, recorded_rounds
from paceline.cost.sweeps import Sweeps
from paceline.draft.registry import create
from paceline.engine import Engine
from paceline.errors import PacelineError
from paceline.target.find import is_gguf
from paceline.target.load import read_config
from paceline.target.shape import unsupported


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
    compares = benchmark.compares_schedules  # many batch sizes: rounds are predicted for one
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
            sweeps = _sweeps(setting, folder, watch) if benchmark.calibrate and not compares else None
            complete = _run(setting, folder, present, sweeps, watch)
            folder.describe(methods(opened))  # a draft model's size may be a mean over its forwards
            _close_all(contestants)  # judging may load the model once more, in float32
            return _conclude(setting, folder, unavailable, sweeps.calibration if sweeps else None, complete, watch)
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


def _sweeps(setting: Setting, folder: RunFolder, watch: Watch) -> Sweeps:
    batch = setting.benchmark.options.batch
    sweeps = Sweeps(folder, Engine(setting.target, max_batch=batch, tokenizer=setting.tokenizer))
    sweeps.before(watch.say, watch.stopped)
    return sweeps


def _run(
    setting: Setting, folder: RunFolder, present: Sequence[Contestant], sweeps: Sweeps | None, watch: Watch
) -> bool:
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
        between=sweeps.during if sweeps else lambda share: None,
    )
    return runner.run()


def _conclude(
    setting: Setting,
    folder: RunFolder,
    unavailable: dict[str, str],
    calibration: Calibration | None,
    complete: bool,
    watch: Watch,
) -> Result:
    """Work out the figures of all answers there are and write the files that others read."""
    benchmark, answers = setting.benchmark, settled(folder.answers)
    judged = judge_differences(setting, answers, folder.read(SUMMARY) or {}, watch)
    predicted = predict_run(answers, calibration) if calibration else {}
    facts = {entry["method"]: entry for entry in (folder.read(RUN) or {}).get("methods", [])}
    figures = summarize(answers, facts, judged=judged, predicted=predicted)
    compares = benchmark.compares_schedules  # a larger batch may be faster than its drafts alone allow
    disturbed = disturbances(answers, [] if compares else figures, threads=torch.get_num_threads())
    summary = {
        "complete": complete,
        "disturbed": disturbed,
        "results": figures,
        "predictions": {"devices": {} if compares else _on_devices(setting, answers)},
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


def _on_devices(setting: Setting, answers: Sequence[Answer]) -> dict[str, dict[str, list[float]]]:
    """{device: {method: [low, speed-up, high]}} for this model on other machines; our drafters only."""
    if is_gguf(setting.folder) or setting.target.quantised or unsupported(config := read_config(setting.folder)):
        return {}  # the devices are GPUs, which run neither GGUF files nor blocks here
    size = Size.of(config, setting.target.dtype.itemsize, setting.target.dtype.itemsize)
    context = int(np.mean([t.prompt_tokens + len(t.tokens) / 2 for a in answers for t in a.turns] or [0]))
    predictions: dict[str, dict[str, list[float]]] = {name: {} for name in DEVICES}
    for method in dict.fromkeys(answer.method for answer in answers):
        rounds = recorded_rounds(answer for answer in answers if answer.method == method)
        if method == BASELINE or method.startswith(PEER) or rounds is None:
            continue
        for name, device in DEVICES.items():
            batch = setting.benchmark.options.batch
            predictions[name][method] = list(predict(rounds, size, Machine(device), batch=batch, context=context))
    return predictions
