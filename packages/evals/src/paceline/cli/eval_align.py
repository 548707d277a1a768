"""`paceline eval align`: specification alignment on SpecBench, on our sample, or on scenarios of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from paceline.cli import options
from paceline.cli.parameters import with_options
from paceline.cli.show import Steps, plain_table, say, standard_output
from paceline.draft.spec import option
from paceline.errors import CONTROLS
from paceline.evals.align.options import AlignOptions
from paceline.runs.progress import Progress

if TYPE_CHECKING:
    from paceline.evals.align.run import Outcome


@with_options
def align(
    asked: AlignOptions,
    as_json: options.AsJson = False,
    show: bool = option(False, "Print answers, too; off by default, because they may be harmful.", names=("--show",)),
) -> int:
    """Answer prompts under written rules, judge every rule of every answer, and report one rate (SAR).

    Every answer and verdict is written down at once; the same command goes on with a run that was stopped. Answers go
    to files and not to the terminal: many prompts of SpecBench ask for harm.

    \b
    paceline eval align --model smollm2 --limit 12
    paceline eval align --model http://localhost:8000/v1 --data SpecBench/data --judge http://j:8000/v1#Qwen3-32B
    paceline eval align --model URL --method align3,align3,steps=13 --scenario Child,Code --out runs/ablation
    paceline report runs/ablation
    """
    from paceline.evals.align.run import align as run

    asked.use_threads()
    with Steps("answering", unit="items") as steps:
        outcome = run(asked, Progress(step=steps.show))
    state = outcome.state
    if as_json:
        print(json.dumps({"out": str(outcome.out), "complete": outcome.complete, "results": outcome.results}))
    else:
        _show(outcome)
    if show:
        _show_answers(outcome.out)
    if state.stop:
        say(f"interrupted; the same command with --out {outcome.out} goes on", err=True)
        return 130
    if state.failed:
        say(f"{state.failed} items failed, the last: {state.last_error}; the same command tries them again", err=True)
    return 1 if state.failed else 0


def _show(outcome: Outcome) -> None:
    several = len({row["judge"] for row in outcome.results}) > 1
    texts = [*(["judge"] if several else []), "method", "scenario"]
    figures = ("judged", "no\nanswer", "failed", "safety", "behavior", "SAR", "95 %", "tokens")
    table = plain_table(*texts, *figures, text=texts, gap=1)
    for row in outcome.results:
        interval = row["intervals"]["sar"]
        table.add_row(
            *(escape(row[text]) for text in texts),
            f"{row['judged']}/{row['items']}", str(row["unanswered"]), str(row["failed"]),
            *("-" if row[name] is None else f"{100 * row[name]:.2f}" for name in ("safety", "behavior", "sar")),
            f"{100 * interval[0]:.1f}-{100 * interval[1]:.1f}" if interval else "",
            "-" if row["tokens"] is None else f"{row['tokens']:.0f}",
        )  # fmt: skip
    standard_output().print(table)
    say(
        "\nper cent; SAR: mean of safe * (alpha + (1 - alpha) * behavior); tokens: generated, mean an item.\n"
        f"{outcome.out} holds it all; paceline report {outcome.out} makes a page of it.",
    )


def _show_answers(out: Path) -> None:
    """Answers on standard output, control characters shown and not obeyed."""
    from paceline.evals.align.figures import GENERATIONS
    from paceline.runs.runs import rows

    for row in rows(out / GENERATIONS):
        print(f"--- {row['item']}, {row['method']}\n{row['response'].translate(CONTROLS)}")
