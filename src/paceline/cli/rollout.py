"""`paceline rollout`: rollouts for reinforcement learning that reuse the last epoch's answers."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from paceline.cli import options
from paceline.cli.show import progress_bar
from paceline.jsonl import check_folder, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HELP = """Reuse the last epoch's answers in reinforcement learning.

In Python: paceline.rollout.rollout, and paceline.rollout.trl and .verl for the two trainers.
"""

rollout = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)


@rollout.callback()
def group() -> None:
    """Reuse the last epoch's answers in reinforcement learning."""


@rollout.command(short_help="Train a small model with each rule, and compare.")
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder of the runs; the same command continues them.", callback=check_folder)
    ],
    rules: Annotated[
        str, typer.Option(help="vanilla, residual, one-hot, coupled, plain:LOG_LENIENCE; joined by commas.")
    ] = "vanilla,residual,one-hot,plain:0,plain:0.5,plain:1",
    epochs: Annotated[int, typer.Option(help="Passes over the 64 prompts, 8 answers to each.", min=2)] = 24,
    seeds: Annotated[int, typer.Option(help="Runs of each rule, each from a start of its own.", min=1)] = 3,
    task: Annotated[str, typer.Option(help="sums (running totals) or sort (digits).")] = "sums",
    start_steps: Annotated[
        int | None, typer.Option(help="Steps of the supervised start. [default: as the task was tested]", min=1)
    ] = None,
    draft: Annotated[str, typer.Option("--draft", "-d", help="What proposes old answers.")] = "past-answer,first=8",
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else.")] = False,
) -> int:
    """Train a small model on a checkable task with each rule, and show what reuse saved and what it cost.

    A supervised start for each seed, the same for all rules, then GRPO. Every epoch is saved, so the same command
    continues a run that was stopped. DIR/report.html has the curves.

    \b
    paceline rollout demo --out runs/rollout
    paceline rollout demo --rules vanilla,residual --epochs 6 --seeds 1 --out runs/quick
    """
    import torch

    from paceline.rollout.demo import run
    from paceline.rollout.demo.grpo import START_STEPS
    from paceline.rollout.demo.page import page

    if threads is not None:
        torch.set_num_threads(threads)
    wanted = run.plans(task, [rule.strip() for rule in rules.split(",")], range(seeds), epochs, draft)
    with _progress(not as_json) as report:
        rows = run.run(wanted, start_steps or START_STEPS, out, report)
    whole = run.write_results(out, rows)
    write_whole(out / "report.html", page(whole))
    if as_json:
        print(json.dumps(whole, allow_nan=False))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 130
        console.print(_table(whole["results"]))
        print(f"{out / 'report.html'} has the curves.")
    return 0


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for the run under way, on standard error; a line for each run where there is no terminal."""
    console = Console(stderr=True)
    with progress_bar(console, MofNCompleteColumn(), TimeRemainingColumn(), shown=shown) as bar:
        task = bar.add_task("")
        current = ""

        def report(what: str, done: int, total: int) -> None:
            nonlocal current
            if what != current:
                current = what
                bar.reset(task, description=what, total=total)
                if shown and not console.is_terminal:
                    print(what, file=sys.stderr, flush=True)
            bar.update(task, completed=done)

        yield report


def _table(results: list[dict[str, Any]]) -> Table:
    from paceline.rollout.demo.run import rule_label

    headings = ["rule", "tokens decoded", "of vanilla's", "reuse", "reused whole", "drift", "accuracy", "CPU seconds"]
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "rule" else "right", no_wrap=heading == "rule")
    vanilla = next((r["tokens_decoded"] for r in results if r["rule"] == "vanilla"), None)
    for r in results:
        share = f"{r['tokens_decoded'] / vanilla:.2f}" if vanilla else ""
        noise = f" ± {r['accuracy_noise']:.3f}" if r["accuracy_noise"] is not None else ""
        table.add_row(
            rule_label(r["rule"]),
            f"{r['tokens_decoded']:,}",
            share,
            f"{r['reuse']:.2f}",
            f"{r['full_reuse']:.2f}",
            f"{r['drift']:.3f}",
            f"{r['final_accuracy']:.3f}{noise}",
            f"{r['cpu_seconds']:.1f}",
        )
    return table
