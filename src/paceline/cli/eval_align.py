"""`paceline eval align`: specification alignment on SpecBench, on our sample, or on scenarios of one's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from paceline.cli import options
from paceline.cli.show import CONTROLS, progress_bar
from paceline.draft.spec import option
from paceline.evals.align.options import AlignOptions
from paceline.workbench.options import with_options

if TYPE_CHECKING:
    from paceline.evals.align.run import Outcome
    from paceline.evals.align.run import Progress as State

SPOKEN = 60.0  # seconds between two lines about progress where there is no terminal


@with_options
def align(
    asked: AlignOptions,
    draft: options.Draft = AlignOptions.draft,
    dtype: options.Dtype = AlignOptions.dtype,
    device: options.Device = AlignOptions.device,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
    show: bool = option(False, "Print answers too; they may be harmful, hence not by default.", names=("--show",)),
) -> int:
    """Answer prompts under written rules, judge every rule of every answer, and report one rate (SAR).

    Every answer and verdict is written down at once; the same command goes on with a run that was stopped. Answers go
    to files and not to the terminal: many prompts of SpecBench ask for harm.

    \b
    paceline eval align --model models/demo --limit 12
    paceline eval align --model http://localhost:8000/v1 --data SpecBench/data --judge http://j:8000/v1#Qwen3-32B
    paceline eval align --model URL --method align3,align3,steps=13 --scenario Child,Code --out runs/ablation
    paceline report runs/ablation
    """
    from paceline.evals.align.run import Progress as State
    from paceline.evals.align.run import align as run

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    with _progress() as watch:
        state = State(watch=watch)
        outcome = run(replace(asked, draft=draft, dtype=dtype, device=device), state)
    if as_json:
        print(json.dumps({"out": str(outcome.out), "complete": outcome.complete, "results": outcome.results}))
    else:
        _show(outcome)
    if show:
        _show_answers(outcome.out)
    if state.stop:
        _note(f"interrupted; the same command with --out {outcome.out} goes on")
        return 130
    if state.failed:
        _note(f"{state.failed} items failed, the last: {state.last_error}; the same command tries them again")
    return 1 if state.failed else 0


def _note(text: str) -> None:
    Console(stderr=True).print(text, markup=False, soft_wrap=True)


@contextmanager
def _progress() -> Iterator[Callable[[State], None]]:
    """A bar on a terminal, elsewhere a line a minute. Yields a function to call after every item and at Ctrl-C."""
    err, began = Console(stderr=True), monotonic()
    spoke = began
    with progress_bar(err, MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("answering", total=None)

        def watch(state: State) -> None:
            nonlocal spoke
            what = "finishing what is under way" if state.stop else "answering"
            failed = f", {state.failed} failed" if state.failed else ""
            bar.update(task, total=state.total, completed=state.done, description=what + failed)
            now = monotonic()
            if not err.is_terminal and now - spoke > SPOKEN:
                spoke = now
                left = (now - began) / max(state.done - state.found, 1) * (state.total - state.done)
                err.print(f"{state.done} of {state.total} items{failed}, {left / 60:.0f} min left", soft_wrap=True)

        yield watch


def _show(outcome: Outcome) -> None:
    console = Console(file=sys.stdout, highlight=False)
    table = Table(box=None, padding=(0, 1, 0, 0))
    several = len({row["judge"] for row in outcome.results}) > 1
    for head in [*(["judge"] if several else []), "method", "scenario"]:
        table.add_column(head, overflow="fold", min_width=8)
    for head in ("judged", "no\nanswer", "failed", "safety", "behavior", "SAR", "95 %", "tokens"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in outcome.results:
        interval = row["intervals"]["sar"]
        table.add_row(
            *([escape(row["judge"])] if several else []), escape(row["method"]), escape(row["scenario"]),
            f"{row['judged']}/{row['items']}", str(row["unanswered"]), str(row["failed"]),
            *("-" if row[name] is None else f"{100 * row[name]:.2f}" for name in ("safety", "behavior", "sar")),
            f"{100 * interval[0]:.1f}-{100 * interval[1]:.1f}" if interval else "",
            "-" if row["tokens"] is None else f"{row['tokens']:.0f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "\nper cent; SAR: mean of safe * (alpha + (1 - alpha) * behavior); tokens: generated, mean an item.\n"
        f"{outcome.out} holds it all; paceline report {outcome.out} makes a page of it.",
        markup=False,
        soft_wrap=True,
    )


def _show_answers(out: Path) -> None:
    """Answers on standard output, control characters shown and not obeyed."""
    from paceline.evals.align.figures import GENERATIONS
    from paceline.workbench.runs import rows

    for row in rows(out / GENERATIONS):
        print(f"--- {row['item']}, {row['method']}\n{row['response'].translate(CONTROLS)}")
