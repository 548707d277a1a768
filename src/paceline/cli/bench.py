"""`paceline bench`: every drafter and every peer on the same prompts in one run, and how fast each was."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from paceline.bench.options import Benchmark
from paceline.cli import options
from paceline.cli.parameters import with_options
from paceline.cli.show import Columns, Steps, figures_table, say, standard_output
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.formats.place import check_place
from paceline.given import checked, listed, listed_numbers
from paceline.net.keys import check_server
from paceline.outputs import check_folder
from paceline.runs.progress import Progress
from paceline.runs.runs import new_folder

if TYPE_CHECKING:
    from paceline.bench.benchmark import Result

TASKS_PER_TABLE = 7  # so that a table fits 80 columns
TEXT = Path(__file__).with_name("bench.txt.jinja")
METHOD = ("method", "method", "")
COLUMNS: dict[str, Columns] = tomllib.loads(Path(__file__).with_name("bench.toml").read_text("utf-8"))


@with_options
def bench(
    asked: Benchmark,
    model: Annotated[
        str | None, typer.Argument(help=options.WHAT_A_MODEL_IS, callback=checked(check_place))
    ] = None,
    draft: list[str] | None = option(
        None, "Drafter to measure; may be repeated. Plain decoding is always measured.", names=("--draft", "-d")
    ),
    peer: list[str] | None = option(
        None, "Another engine to measure, such as transformers-lookup or vllm-ngram; may be repeated."
    ),
    categories: str | None = option(None, "Ask only these tasks or categories, joined by commas."),
    batch: str = option(
        "1",
        "Number of questions answered together; with --schedule several numbers: 1,2,4,8.",
        names=("--batch-size", "-b"),
    ),
    schedule: str | None = option(
        None,
        "Compare schedules, joined by commas (ragged, equal, grouped[:WINDOW]), at every --batch-size; all first "
        "turns are handed in at once.",
    ),
    out: Path | None = option(
        None,
        "Folder of this run; the same command goes on with a run that was stopped. [default: a new folder]",
        callback=check_folder,
    ),
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    exact: options.Exact = None,
    activations: options.Activations = None,
    budget: options.Budget = True,
    as_json: options.AsJson = False,
) -> int:
    """Measure drafters and other engines with the same model and the same prompts in one run.

    Methods take turns at every question, so that a machine that becomes slower does so for all. Every answer is written
    to the folder at once, and the same command goes on with a run that was stopped.

    \b
    paceline bench smollm2 -d sam -d recycling,tree=16
    paceline bench MODEL -d sam --peer transformers --peer transformers-lookup --suite spec-bench --limit 120
    paceline bench smollm2 -d sam --out runs/sam
    paceline report runs/sam
    paceline bench smollm2 -d sam --schedule ragged,equal,grouped --batch-size 1,2,4,8,16,32
    paceline bench --server http://a:8000,http://b:8000 --suite log.jsonl --concurrency 8
    """
    how, served = asked.options, asked.load.server
    if (model is None) == (served is None) or (served and (draft or peer or schedule)):
        raise PacelineError(
            "name a model, with --draft, --peer or --schedule, or running servers with --server URL[,URL]; not both"
        )
    batches = listed_numbers(batch, "--batch-size")

    name = Path(model or urlsplit((served or "").split(",")[0]).netloc).name
    benchmark = replace(
        asked,
        model=model or "",
        drafts=draft or (),
        peers=peer or (),
        out=out or new_folder(f"{name}-{Path(asked.suite).stem}"),
        categories=listed(categories),
        options=replace(how, batch=max(batches)),
        schedules=tuple(dict.fromkeys(listed(schedule))),
        batches=batches,
        dtype=dtype,
        device=device,
        exact=exact,
        activations=activations,
        budget=budget,
    )
    if served:
        check_server(served, asked.keys)
    else:
        from paceline.bench.suites import read_suite

        read_suite(asked.suite, categories=benchmark.categories)

    import transformers

    from paceline.bench.benchmark import bench as run
    from paceline.cli.drive import Interrupt

    transformers.logging.set_verbosity_error()
    options.use_threads(threads)
    with Interrupt() as interrupt, Steps("starting", unit="answers") as steps:
        note = partial(steps.err.print, markup=False, soft_wrap=True)
        progress = Progress(steps.say, steps.show, note, stopped=lambda: interrupt.pressed)
        if served:
            from paceline.bench.endpoint import bench_endpoints  # needs an HTTP client

            outcome = bench_endpoints(benchmark, progress)
        else:
            outcome = run(benchmark, progress)
    if as_json:
        shown = ("complete", "disturbed", "notes", "results")
        print(json.dumps({"out": str(outcome.out)} | {name: getattr(outcome, name) for name in shown}))
    else:
        _show(outcome, of_servers=served is not None)
    if interrupt.pressed:
        say(
            "interrupted; the figures above are of the answers so far, and the same command with "
            f"--out {outcome.out} goes on",
            err=True,
        )
        return 130
    return 1 if any(result["failed"] for result in outcome.results) else 0


def _show(outcome: Result, of_servers: bool) -> None:
    from paceline.bench.metrics import OVERALL
    from paceline.runs.report import render

    console = standard_output()
    overall = [result for result in outcome.results if result["category"] == OVERALL]
    schedules = any(result["scheduled"] for result in overall)
    if of_servers:
        console.print(figures_table(overall, [("server", "method", ""), *COLUMNS["servers"]]))
    elif schedules:
        console.print(figures_table(_by_batch(overall), [METHOD, *COLUMNS["schedules"]]))
    else:
        console.print(figures_table(map(_rated, overall), [METHOD, *COLUMNS["drafters"]]))
    tasks = list(dict.fromkeys(r["category"] for r in outcome.results if r["category"] != OVERALL))
    if len(tasks) > 1 and not of_servers:
        speedups: dict[str, dict[str, Any]] = {result["method"]: {} for result in overall}
        for result in outcome.results:
            speedups[result["method"]] |= {"method": result["method"], result["category"]: result["speedup"]}
        for first in range(0, len(tasks), TASKS_PER_TABLE):
            part = tasks[first : first + TASKS_PER_TABLE]
            columns = [METHOD, *((task.replace("_", "\n"), task, ".2f") for task in part)]
            console.print("\nspeed-up by task")
            console.print(figures_table(speedups.values(), columns))
    plain = next((result for result in overall if result["method"] == "none"), None)
    shown = {"overall": overall, "plain": plain, "of_servers": of_servers, "schedules": schedules}
    say(render(TEXT, outcome=outcome, **shown).rstrip())


def _rated(result: Mapping[str, Any]) -> dict[str, Any]:
    """An overall result with its speed-up and the interval as text; with a question mark where it is impossible."""
    from paceline.bench.checks import is_impossible

    gain, low = result["speedup"], result["speedup_low"]
    doubtful = not result["method"].startswith("peer:") and is_impossible(gain, result["mean_accepted_tokens"])
    return {
        **result,
        "gain": None if gain is None else f"{gain:.2f}" + (" ?" if doubtful else ""),
        "interval": "" if low is None else f"{low:.2f}-{result['speedup_high']:.2f}",
    }


def _by_batch(overall: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Overall results with their gain over plain decoding at the same batch, the smallest batch first."""
    from paceline.bench.metrics import batch_speedups, scheduled

    gains = batch_speedups(overall)
    ordered = sorted(overall, key=lambda result: scheduled(result)["batch"])
    return [{**result, "gain": gains.get(result["method"])} for result in ordered]
