"""All runs of the demo in turn: for every seed its start, then every rule from it. A stopped run continues.

DIR/start-*.pt   supervised starts      DIR/sums-RULE-SEED.pt  a run after its last whole epoch
DIR/results.json the figures, at the end
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.jsonl import check_folder, write_whole
from paceline.rollout.demo import grpo
from paceline.rollout.demo.grpo import Plan, Run, supervised
from paceline.rollout.demo.task import TASKS
from paceline.rollout.rules import rule_of
from paceline.rollout.run import Figures

Progress = Callable[[str, int, int], None]
"""Called with the name of the run, its finished steps, and all its steps."""


def plans(task: str, rules: Sequence[str], seeds: Sequence[int], epochs: int, draft: str) -> list[Plan]:
    """The runs, seed by seed. PacelineError for a rule or a task that does not exist."""
    if task not in TASKS:
        raise PacelineError(f"There is no task {task!r}; tasks: {', '.join(TASKS)}.")
    wanted = [Plan(task, rule, seed, epochs, draft) for seed in seeds for rule in rules]
    for plan in wanted[: len(rules)]:
        rule_of(plan.rule_name, lenience=plan.lenience)
    return wanted


def run(wanted: Sequence[Plan], start_steps: int, folder: Path, progress: Progress) -> list[dict[str, Any]]:
    """Do all that is not done yet; returns a record for every epoch of every run."""
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed, of_seed in groupby(wanted, key=lambda plan: plan.seed):
        first, *_ = of_seed_plans = list(of_seed)

        def of_start(done: int, steps: int, seed: int = seed) -> None:
            progress(f"start, seed {seed}", done, steps)

        start = supervised(first.task, seed, start_steps, folder, of_start)
        for plan in of_seed_plans:
            rows += _epochs(plan, start, folder, progress)
    return rows


def _epochs(plan: Plan, start: Any, folder: Path, progress: Progress) -> list[dict[str, Any]]:
    torch.manual_seed(plan.seed)
    going = Run(plan, start, folder)
    total = plan.epochs * grpo.STEPS
    while not going.is_done:
        done = len(going.rows) * grpo.STEPS
        steps = iter(range(done + 1, total + 1))
        going.epoch(lambda: progress(f"{plan.rule}, seed {plan.seed}", next(steps), total))  # noqa: B023
    return [{"rule": plan.rule, "seed": plan.seed, **row} for row in going.rows[: plan.epochs]]


def results(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record for each rule, over its seeds: sums over all epochs, and means over seeds."""
    of_rule: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_rule.setdefault(row["rule"], []).append(row)
    return [_result(rule, of) for rule, of in of_rule.items()]


def _result(rule: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    last = list({row["seed"]: row for row in sorted(rows, key=itemgetter("epoch"))}.values())  # of each seed
    seeds, figures = len(last), sum(map(Figures.of, rows), Figures())
    made = rule_of(rule.partition(":")[0], lenience=Plan("", rule, 0, 0, "").lenience)
    return {
        "rule": rule,
        "name": made.name,
        "lossless": made.lossless,
        "seeds": seeds,
        "epochs": max(row["epoch"] for row in rows),
        "rollouts": figures.answers,
        "tokens": round(figures.tokens / seeds),
        "tokens_decoded": round(figures.decoded / seeds),
        "reuse": round(figures.reuse, 4),
        "full_reuse": round(figures.full_reuse, 4),
        "drift": round(figures.mean_drift, 4),
        "final_reward": round(mean(row["reward"] for row in last), 4),
        "final_accuracy": round(mean(row["accuracy"] for row in last), 4),
        "accuracy_noise": round(stdev(row["accuracy"] for row in last), 4) if seeds > 1 else None,
        "seconds": round(figures.seconds / seeds, 2),
        "cpu_seconds": round(figures.cpu_seconds / seeds, 2),
    }


def write_results(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write results.json; returns its content: `results`, and every epoch of every run."""
    whole = {"results": results(rows), "epochs": list(rows)}
    write_whole(folder / "results.json", json.dumps(whole, indent=1, allow_nan=False) + "\n")
    return whole


def rule_label(rule: str) -> str:
    """A rule's name in tables."""
    name, _, log_lenience = rule.partition(":")
    return f"plain, e^{log_lenience or 0} (not lossless)" if name == "plain" else name
