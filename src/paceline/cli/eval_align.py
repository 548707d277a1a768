"""`paceline eval align`: specification alignment on SpecBench, on our sample, or on scenarios of one's own."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.cli import options
from paceline.jsonl import check_folder

if TYPE_CHECKING:
    from paceline.evals.align.command import Outcome
    from paceline.evals.align.run import Progress as State

SPOKEN = 60.0
"""Seconds between two lines about progress where there is no terminal."""


def align(
    model: Annotated[
        str,
        typer.Option(
            help="URL[,URL...][#name] of an OpenAI-compatible server, up to /v1; or a folder, for our engine."
        ),
    ],
    data: Annotated[
        str, typer.Option(help="SpecBench's folder or hub id, one's own .yaml or .md, sample, or sample,items=N.")
    ] = "sample",
    method: Annotated[
        str, typer.Option(help="raw, vanilla, zero-think, more-think, align3[,steps=13], self-refine, best-of-n, tpo.")
    ] = "vanilla,align3",
    scenario: Annotated[str | None, typer.Option(help="Scenarios, joined by commas. [default: all]")] = None,
    judge: Annotated[
        list[str] | None,
        typer.Option(help="URL#name, a folder, self, or checks (of the sample); may be repeated, to compare judges."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most items, scenarios and labels in turn.", min=1)] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; the same command goes on in it.", callback=check_folder)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print answers too; they may be harmful, hence not by default.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most new tokens of a request.", min=1)] = 4200,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", help="0 is greedy. [default: the server's; our engine: 0]", min=0),
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="As servers understand it.", min=0, max=1)] = None,
    top_k: Annotated[int | None, typer.Option(help="As servers understand it.", min=-1)] = None,
    min_p: Annotated[float | None, typer.Option(help="As servers understand it.", min=0, max=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible, where the server can.", min=0)] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="The endpoint's chat template opens the thought. [--tokenizer shows it]")
    ] = False,
    plain_prompts: Annotated[
        bool, typer.Option("--plain-prompts", help="Ask the prompts before they were disguised.")
    ] = False,
    rules_first: Annotated[
        bool, typer.Option("--rules-first", help="Rules before the query: cacheable, but another prompt.")
    ] = False,
    judge_mode: Annotated[
        Literal["joint", "sequential"], typer.Option(help="All rules in one call, or a call for each rule.")
    ] = "joint",
    judge_form: Annotated[
        Literal["tags", "json"],
        typer.Option(help="What a joint judge replies in; json brings a schema for the server."),
    ] = "tags",
    judge_max_tokens: Annotated[int, typer.Option(help="Most new tokens of a judge's reply.", min=1)] = 4200,
    judge_sees: Annotated[
        Literal["asked", "plain"] | None, typer.Option(help="The prompt shown to judges. [default: asked]")
    ] = None,
    max_chars: Annotated[
        int | None, typer.Option(help="Most characters of an answer shown to judges. [default: all]", min=1)
    ] = None,
    na: Annotated[
        Literal["exclude", "strict"] | None,
        typer.Option(help="Rules that do not apply: left out, or not kept. [default: exclude]"),
    ] = None,
    alpha: Annotated[
        float, typer.Option(help="What a safe answer is worth that keeps no behavioural rule.", min=0, max=1)
    ] = 0.3,
    compat: Annotated[
        bool,
        typer.Option("--compat", help="The official code's choices: --judge-sees plain --max-chars 8000 --na strict."),
    ] = False,
    reward: Annotated[
        str,
        typer.Option(help="What best-of-n and tpo choose by: judge, a scoring server's URL, a reward model's folder."),
    ] = "judge",
    concurrency: Annotated[int, typer.Option(help="Items under way at once.", min=1)] = 8,
    tries: Annotated[int, typer.Option(help="Attempts at a request.", min=1)] = 8,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a byte before an attempt is given up.", min=0.001)
    ] = 600.0,
    stream: Annotated[bool, typer.Option(help="Ask servers for streams.")] = True,
    tokenizer: Annotated[
        str | None, typer.Option(help="The served model's tokenizer: renders prefixes, counts injected tokens.")
    ] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the model's API key.")] = None,
    judge_api_key_env: Annotated[str | None, typer.Option(help="The same for judges.")] = None,
    draft: options.Draft = "suffix,past=16384",
    reuse: Annotated[bool, typer.Option(help="Share keys and values of prompts that begin alike (our engine).")] = True,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
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
    from paceline.evals.align.backends.base import Decoding
    from paceline.evals.align.command import Wish
    from paceline.evals.align.command import align as run
    from paceline.evals.align.run import Progress as State
    from paceline.workbench.client import Retry

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if out is None:
        out = Path("runs") / f"align-{datetime.now():%Y%m%d-%H%M%S}"
        check_folder(out)
    wish = Wish(
        model,
        data,
        method,
        out,
        judge or (),
        [name.strip() for name in scenario.split(",")] if scenario else (),
        limit,
        Decoding(max_tokens, temperature, top_p, top_k, min_p, seed),
        plain_prompts,
        rules_first,
        thinking,
        judge_mode,
        judge_form,
        judge_max_tokens,
        judge_sees,
        max_chars,
        na,
        alpha,
        compat,
        reward,
        concurrency,
        Retry(tries),
        timeout,
        stream,
        tokenizer,
        api_key_env,
        judge_api_key_env,
        draft,
        reuse,
        dtype,
        device,
    )
    with _Bar() as bar:
        state = State(watch=bar.watch)
        outcome = run(wish, state)
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


class _Bar:
    """On a terminal a bar with the time left, elsewhere a line a minute; both on standard error."""

    def __init__(self) -> None:
        self._err = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._err, transient=True, disable=not self._err.is_terminal)
        self._task = self._bar.add_task("answering", total=None)
        self._began = self._spoke = monotonic()

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def watch(self, state: State) -> None:
        """After every item, and at Ctrl-C."""
        what = "finishing what is under way" if state.stop else "answering"
        failed = f", {state.failed} failed" if state.failed else ""
        self._bar.update(self._task, total=state.total, completed=state.done, description=what + failed)
        now = monotonic()
        if self._bar.disable and now - self._spoke > SPOKEN:
            self._spoke = now
            left = (now - self._began) / max(state.done - state.found, 1) * (state.total - state.done)
            self._err.print(f"{state.done} of {state.total} items{failed}, {left / 60:.0f} min left", soft_wrap=True)


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
            *(_percent(row[name]) for name in ("safety", "behavior", "sar")),
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


def _percent(value: Any) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _show_answers(out: Path) -> None:
    """Answers on standard output, control characters shown and not obeyed."""
    from paceline.cli.show import CONTROLS
    from paceline.evals.align.store import GENERATIONS, rows

    for row in rows(out / GENERATIONS):
        print(f"--- {row['item']}, {row['method']}\n{row['response'].translate(CONTROLS)}")
