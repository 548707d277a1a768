"""`paceline bench`: every drafter and every peer on the same prompts in one run, and how fast each was."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.bench.options import Benchmark
from paceline.cli import options
from paceline.cli.show import Steps, plain_table
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.jsonl import check_folder
from paceline.workbench.options import with_options

if TYPE_CHECKING:
    from paceline.bench.benchmark import Result
    from paceline.bench.record import Answer

TASKS_PER_TABLE = 7  # so that a table fits 80 columns
SCHEDULE_WORDS = """
gain: tokens/s over those of plain decoding at the same batch. E: answers that are, token for token, those of plain
decoding one at a time; P: the share of their tokens before the first that differs. align: share of the time that
realigning rows takes. group: rounds whose rows were all equally long. idle: row slots without a row. P50, P90, P99:
seconds from handing in all requests at once to the last token of one."""


@with_options
def bench(
    asked: Benchmark,
    model: Annotated[str | None, typer.Argument(help=options.WHAT_A_MODEL_IS)] = None,
    draft: list[str] | None = option(
        None, "A drafter; may be repeated. Plain decoding is always there.", names=("--draft", "-d")
    ),
    peer: list[str] | None = option(None, "Another engine, such as transformers-lookup or vllm-ngram; repeatable."),
    categories: str | None = option(None, "These tasks or categories only, joined by commas."),
    batch: str = option("1", "Questions answered together; with --schedule several: 1,2,4,8.", names=("--batch", "-b")),
    schedule: str | None = option(
        None,
        "Compare schedules, joined by commas (ragged, equal, grouped[:WINDOW]), at every --batch, on first turns that "
        "are all handed in at once.",
    ),
    out: Path | None = option(
        None, "Folder of this run; a run that was stopped goes on there. [default: a new one]", callback=check_folder
    ),
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    exact: options.Exact = None,
    as_json: options.AsJson = False,
) -> int:
    """Measure drafters and other engines: same model, same prompts, one run.

    Methods answer in turns, question by question, so that a machine that slows down is fair to all. Every answer is
    written to the folder at once, and the same command goes on with a run that was stopped.

    \b
    paceline bench models/demo -d sam -d recycling,tree=16
    paceline bench MODEL -d sam --peer transformers --peer transformers-lookup --suite spec-bench --limit 120
    paceline bench models/demo -d sam --out runs/sam
    paceline report runs/sam
    paceline bench models/demo -d sam --schedule ragged,equal,grouped --batch 1,2,4,8,16,32
    paceline bench --endpoint http://a:8000,http://b:8000 --suite log.jsonl --concurrency 8
    """
    import transformers

    from paceline.bench.benchmark import Watch
    from paceline.bench.benchmark import bench as run
    from paceline.bench.endpoint import bench_endpoints
    from paceline.cli.drive import Interrupt
    from paceline.engine.sampling import SamplingParams

    how, served = asked.options, asked.load.endpoint
    if (model is None) == (served is None) or (served and (draft or peer or schedule)):
        raise PacelineError(
            "name a model, with --draft, --peer or --schedule, or running servers with --endpoint URL[,URL]; not both"
        )
    # What these may be is said before a model is read.
    SamplingParams(max_tokens=how.max_tokens, temperature=how.temperature)
    transformers.logging.set_verbosity_error()
    options.use_threads(threads)
    batches = sorted(set(_batches(batch)))
    benchmark = replace(
        asked,
        model=model or "",
        drafts=draft or (),
        peers=peer or (),
        out=out or _new_folder(model or urlsplit((served or "").split(",")[0]).netloc, asked.suite),
        categories=_names(categories),
        options=replace(how, batch=max(batches)),
        schedules=tuple(dict.fromkeys(_names(schedule))),
        batches=batches,
        dtype=dtype,
        device=device,
        exact=exact,
    )
    with Interrupt() as interrupt, Steps("starting", unit="answers") as steps:

        def answered(answer: Answer) -> None:
            if answer.failed:
                steps.err.print(f"{answer.method} failed: {answer.failed}", markup=False, soft_wrap=True)
            steps.advance()

        watch = Watch(steps.say, steps.begin, answered, steps.show, lambda: interrupt.pressed)
        if served:
            outcome = bench_endpoints(benchmark, watch, os.environ.get("OPENAI_API_KEY"))
        else:
            outcome = run(benchmark, watch)
    if as_json:
        shown = ("complete", "disturbed", "repeated", "notes", "results")
        print(json.dumps({"out": str(outcome.out)} | {name: getattr(outcome, name) for name in shown}))
    else:
        _show(outcome, of_servers=served is not None)
    if interrupt.pressed:
        Console(stderr=True).print(
            "interrupted; the figures above are of the answers so far, and the same command with "
            f"--out {escape(str(outcome.out))} goes on",
            soft_wrap=True,
        )
        return 130
    return 1 if any(r["failed"] and r["method"] not in outcome.unavailable for r in outcome.results) else 0


def _batches(text: str) -> list[int]:
    """The numbers of --batch."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise PacelineError(f"--batch is {text!r}; give a number from 1, or several joined by commas: 1,2,4,8")
    return [int(part) for part in parts]


def _names(text: str | None) -> list[str]:
    """The names in a text that joins them by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _new_folder(model: str, suite: str) -> Path:
    """A new folder for a run without --out."""
    name = f"{Path(model).name}-{Path(suite).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path("runs") / name
    check_folder(folder)
    return folder


def _show(outcome: Result, of_servers: bool) -> None:
    console = Console(file=sys.stdout, highlight=False)
    overall = [result for result in outcome.results if result["category"] == "overall"]
    if of_servers:
        return _show_servers(console, outcome, overall)
    compares = any(result["scheduled"] for result in overall)
    console.print(_schedule_table(overall) if compares else _overview(overall))
    tasks = list(dict.fromkeys(r["category"] for r in outcome.results if r["category"] != "overall"))
    for first in range(0, len(tasks), TASKS_PER_TABLE):
        if len(tasks) > 1:
            console.print("\nspeed-up by task")
            console.print(_by_task(outcome.results, overall, tasks[first : first + TASKS_PER_TABLE]))
    for result in overall:
        if result["failed"] and result["method"] not in outcome.unavailable:
            console.print(f"{result['method']} failed: {result['failed']}", markup=False, soft_wrap=True)
    for name, why in outcome.unavailable.items():
        console.print(f"{name} did not take part: {why}", markup=False, soft_wrap=True)
    for note in outcome.notes:
        console.print(note, markup=False, soft_wrap=True)
    if compares:
        console.print(SCHEDULE_WORDS, markup=False, soft_wrap=True)
    console.print(
        f"\nspeed-up: all tokens over all seconds against plain decoding, prompts included, with a 95 % interval.\n"
        f"Loops flatter drafters: {_looping(overall)}.\n"
        f"{outcome.out} holds it all; paceline report {outcome.out} makes a page of it.",
        markup=False,
        soft_wrap=True,
    )
    for line in (*outcome.disturbed, *filter(None, [outcome.repeated])):
        console.print(line, markup=False, soft_wrap=True)


SERVER_WORDS = """
first: milliseconds from when a request was due to its first token. gap: between two deliveries of tokens. token:
milliseconds a token after the first, of each request. accepted: drafted tokens that stood in a round with a draft."""


def _show_servers(console: Console, outcome: Result, overall: list[dict[str, Any]]) -> None:
    columns = ("tok/s", "first\nP50", "P99", "gap\nP50", "P99", "token\nP50", "P99", "goodput", "accepted", "errors")
    waits = [f"{of}_p{share}" for of in ("first_token_ms", "inter_token_ms", "token_ms") for share in (50, 99)]
    table = plain_table("server", *columns, text=("server",), gap=1)
    for r in overall:
        shares = (_figure(r["goodput"], ".1%"), _figure(r["draft_tokens_accepted"], ".2f"), str(r["errors"]))
        speeds = (_figure(r[name], ".1f") for name in ("tokens_per_second", *waits))
        table.add_row(escape(r["method"]), *speeds, *shares)
    console.print(table)
    failed = [f"{r['method']} failed: {r['failed']}" for r in overall if r["failed"]]
    where = f"{outcome.out} holds it all; paceline report {outcome.out} makes a page of it."
    for line in (SERVER_WORDS, *failed, *outcome.notes, where):
        console.print(line, markup=False, soft_wrap=True)


def _looping(overall: list[dict[str, Any]]) -> str:
    plain = next((result for result in overall if result["method"] == "none"), None)
    if plain is None or not plain["answers"]:
        return "no plain answers to count them in"
    share = f"{plain['looping']:.1%} of the plain answers run into one"
    if plain["too_short"]:
        share += f", and {plain['too_short']:.1%} were cut off too early to tell"
    rated = [result for result in overall if result["speedup_without_loops"] is not None and result is not plain]
    if not plain["looping"] or not rated:
        return share
    best = max(rated, key=lambda result: result["speedup_without_loops"])
    return f"{share}; without those questions {best['method']} is the fastest, {best['speedup_without_loops']:.2f}"


def _overview(overall: list[dict[str, Any]]) -> Table:
    columns = ("speed-up", "95 %", "tok/s", "mean\naccepted", "identical", "looping")
    table = plain_table("method", *columns, text=("method",), gap=1)
    for r in overall:
        table.add_row(
            escape(r["method"]),
            _figure(r["speedup"], ".2f") + (" ?" if _is_doubtful(r) else ""),
            f"{r['speedup_low']:.2f}-{r['speedup_high']:.2f}" if r["speedup_low"] is not None else "",
            _figure(r["tokens_per_second"], ".1f"),
            _figure(r["mean_accepted_tokens"], ".2f"),
            _figure(r["identical"], ".0%"),
            _figure(r["looping"], ".0%"),
        )
    return table


def _is_doubtful(result: dict[str, Any]) -> bool:
    from paceline.bench.checks import is_impossible

    ours = not result["method"].startswith("peer:")
    return ours and is_impossible(result["speedup"], result["mean_accepted_tokens"])


def _by_task(results: list[dict[str, Any]], overall: list[dict[str, Any]], tasks: list[str]) -> Table:
    speedups = {(r["method"], r["category"]): r["speedup"] for r in results}
    table = plain_table("method", *(task.replace("_", "\n") for task in tasks), text=("method",), gap=1)
    for method in (result["method"] for result in overall):
        table.add_row(escape(method), *(_figure(speedups.get((method, task)), ".2f") for task in tasks))
    return table


def _schedule_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """results: of `metrics.summarize`, the overall ones."""
    from paceline.bench.metrics import batch_speedups, scheduled

    columns = ("tok/s", "gain", "E", "P", "align", "group", "idle", "P50", "P90", "P99")
    table = plain_table("method", *columns, text=("method",), gap=1)
    gains = batch_speedups(results)
    for r in sorted(results, key=lambda r: scheduled(r)["batch"]):
        table.add_row(
            escape(r["method"]),
            _figure(r["tokens_per_second"], ".1f"),
            _figure(gains.get(r["method"]), ".2f"),
            *(_figure(r[name], ".1%") for name in ("identical", "partial_match")),
            *(_figure(r[name], ".0%") for name in ("align_share", "group_rate", "idle_slots")),
            *(_figure(r[name], ".2f") for name in ("latency_p50", "latency_p90", "latency_p99")),
        )
    return table


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
