"""`paceline bench`: every drafter and every peer on the same prompts in one run, and how fast each was. `bench server`
measures running servers, `bench schedules` ways to schedule a batch."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from paceline.bench.options import Benchmark, Load, Options, Result, Sessions
from paceline.cli import options
from paceline.cli.parameters import with_options
from paceline.cli.show import Columns, Steps, figures_table, say, standard_output
from paceline.draft.spec import option
from paceline.engine.options import Budget, ModelOptions
from paceline.errors import PacelineError
from paceline.given import listed, listed_numbers
from paceline.interrupt import Interrupt
from paceline.net.keys import Keys, check_server
from paceline.outputs import check_folder
from paceline.runs.progress import Progress
from paceline.runs.runs import new_folder

TASKS_PER_TABLE = 7  # A table must fit 80 columns.
TEXT = Path(__file__).with_name("bench.txt.jinja")
METHOD = ("method", "method", "")
COLUMNS: dict[str, Columns] = tomllib.loads(Path(__file__).with_name("bench.toml").read_text("utf-8"))
SUITE = option(
    "demo",
    "Questions to ask: demo, code-edits, spec-bench, humaneval, speed-bench, or a JSON Lines file.",
    names=("--suite", "-s"),
)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What every benchmark is told."""

    limit: int | None = option(None, "Largest number of questions, spread evenly over the tasks.", least=1)
    categories: str | None = option(None, "Ask only these tasks or categories, joined by commas.")
    how: Options = field(default_factory=Options)
    out: Path | None = option(
        None,
        "Folder of this run; the same command goes on with a run that was stopped. [default: a new folder]",
        callback=check_folder,
    )
    as_json: options.AsJson = False

    def benchmark(self, of: str, suite: str, batch: int = 1, **more: Any) -> Benchmark:
        """What to run. of: what is measured, for the name of a new folder; more: other fields."""
        out = self.out or new_folder(f"{of}-{Path(suite).stem}")
        how = replace(self.how, batch=batch)
        return Benchmark(
            suite=suite, limit=self.limit, categories=listed(self.categories), options=how, out=out, **more
        )


@with_options
def bench(
    model: options.Model,
    asked: Measurement,
    draft: options.Drafts = None,
    peer: list[str] | None = option(
        None, "Another engine to measure, such as transformers-lookup or vllm-ngram; may be repeated."
    ),
    peer_python: str | None = option(
        None, "Python interpreter that has vLLM or xllamacpp; for both, vllm=PATH,xllamacpp=PATH."
    ),
    suite: str = SUITE,
    template: options.Template = None,
    batch: int = option(1, "Number of questions answered together.", least=1, names=("--batch", "-b")),
    running: ModelOptions = ModelOptions(),
    budget: Budget = True,
) -> int:
    """Measure drafters and other engines with the same model and the same prompts in one run.

    Plain decoding is always measured. Methods take turns at every question, so that a machine that becomes slower does
    so for all. Every answer is written to the folder at once, and the same command goes on with a run that was stopped.

    \b
    paceline bench smollm2 -d sam -d recycling,tree=16
    paceline bench MODEL -d sam --peer transformers --peer transformers-lookup --suite spec-bench --limit 120
    paceline bench smollm2 -d sam --out runs/sam
    paceline report runs/sam
    paceline bench schedules --help     ways to schedule a batch
    paceline bench server --help        running servers under load
    """
    more = {"template": template, "budget": budget, "peers": peer or (), "peer_python": peer_python}
    asking = asked.benchmark(
        Path(model).name, suite, batch, model=model, drafts=draft or (), **asdict(running), **more
    )
    return _of_our_engine(asking, asked.as_json)


@with_options
def schedules(
    model: options.Model,
    asked: Measurement,
    draft: options.Drafts = None,
    schedule: str = option("ragged,equal,grouped", "Schedules, joined by commas: ragged, equal, grouped[:WINDOW]."),
    batch: str = option(
        "1,2,4,8", "Numbers of questions answered together, joined by commas.", names=("--batch", "-b")
    ),
    suite: str = SUITE,
    template: options.Template = None,
    running: ModelOptions = ModelOptions(),
    budget: Budget = True,
) -> int:
    """Compare ways to schedule a batch of questions of which every first turn is handed in at once.

    \b
    paceline bench schedules smollm2 -d sam
    paceline bench schedules smollm2 -d sam --schedule ragged,grouped:48 --batch 1,2,4,8,16,32
    """
    batches = listed_numbers(batch, "--batch")
    chosen = tuple(dict.fromkeys(listed(schedule)))
    more = {"template": template, "budget": budget, "schedules": chosen, "batches": batches}
    asking = asked.benchmark(
        Path(model).name, suite, max(batches), model=model, drafts=draft or (), **asdict(running), **more
    )
    return _of_our_engine(asking, asked.as_json)


@with_options
def servers(
    urls: Annotated[
        list[str],
        typer.Argument(
            help="Running server; with several, all are asked in turn and compared with the first.",
            metavar="URL[#model]",
        ),
    ],
    asked: Measurement,
    log: options.Log = None,
    suite: str = option(
        "demo", "Questions to ask if there is no --log: demo, code-edits, spec-bench, humaneval, speed-bench.",
        names=("--suite", "-s"),
    ),
    ignore: options.Ignore = None,
    load: Load = Load(),
    keys: Keys = Keys(),
) -> int:
    """Measure running servers, with OpenAI's API, under the load of a log.

    \b
    paceline bench server http://127.0.0.1:8000 --log log.jsonl --batch 8
    paceline bench server http://a:8000 http://b:8000 --log log.jsonl --arrivals 2
    """
    for url in urls:
        check_server(url, keys)
    load = replace(load, server=",".join(urls))
    asking = asked.benchmark(
        urlsplit(urls[0]).netloc, str(log or suite), load=load, keys=keys, ignore=ignore, template=None
    )

    from paceline.bench.endpoint import bench_endpoints  # This needs an HTTP client.

    return _measure(asking, asked.as_json, bench_endpoints, partial(_show, of_servers=True))


@with_options
def sessions(
    asked: Sessions,
    model: Annotated[
        str | None, typer.Argument(help="Model that `paceline serve` runs for this.", metavar="[MODEL]")
    ] = None,
    draft: options.Drafts = None,
    serve: str = option("", "Further options of `paceline serve` for these, such as '--context 32768 --corpus .'."),
    peer: list[str] | None = option(
        None, "Command of another server, such as 'llama-server -m FILE.gguf --port {port}'; may be repeated."
    ),
    server: list[str] | None = option(
        None, "Running server to ask, too; may be repeated.", metavar="URL[#model]"
    ),
    keys: Keys = Keys(),
    as_json: options.AsJson = False,
) -> int:
    """Ask servers for whole sessions of a coding agent, and say how long a person waits.

    Each message of the assistant is a turn, asked with the recorded messages before it, greedily. The turns of a
    session follow each other; servers take turns at every session, and those that are begun here stand still while
    another is asked. Without --draft the drafters of our servers are suffix and none.

    \b
    paceline bench sessions sessions.jsonl smollm2 --out runs/agent
    paceline bench sessions ~/.codex/sessions FILE.gguf --peer "llama-server -m FILE.gguf --port {port}"
    paceline report runs/agent
    """
    from paceline.bench.sessions import measure
    from paceline.net.client import up_to_v1  # This needs an HTTP client.

    for url in server or ():
        check_server(url, keys)
    if model is None and (draft or serve):
        raise PacelineError("--draft and --serve are of servers of ours, which need a MODEL")
    drafts = (draft or ["suffix", "none"]) if model is not None else []
    ours = {
        one: [sys.executable, "-m", "paceline", "serve", str(model), "-d", one, "--quiet", *shlex.split(serve)]
        for one in drafts
    }
    others = {f"peer {i}: {Path(one.split()[0]).name}": one for i, one in enumerate(peer or (), 1)}
    asking = replace(
        asked,
        commands={**ours, **others},
        urls={url: up_to_v1(url) for url in server or ()},
        keys={url: keys.of(url) for url in server or ()},
        out=asked.out or new_folder(f"sessions-{asked.log.stem}"),
    )
    return _measure(asking, as_json, measure, _show_sessions, unit="sessions")


def _of_our_engine(benchmark: Benchmark, as_json: bool) -> int:
    from paceline.bench.suites import read_suite

    read_suite(benchmark.suite, categories=benchmark.categories)  # Checked before torch is loaded.

    import transformers

    from paceline.bench.benchmark import bench as run

    transformers.logging.set_verbosity_error()
    benchmark.use_threads()
    return _measure(benchmark, as_json, run, _show)


def _measure(
    asked: Any, as_json: bool, run: Callable[[Any, Progress], Result], show: Callable[[Result], None],
    unit: str = "answers",
) -> int:  # fmt: skip
    """Run what was asked, and print its figures."""
    with Interrupt() as interrupt, Steps("starting", unit=unit) as steps:
        note = partial(steps.err.print, markup=False, soft_wrap=True)
        outcome = run(asked, Progress(steps.say, steps.show, note, stopped=lambda: interrupt.pressed))
    if as_json:
        shown = ("complete", "disturbed", "notes", "results")
        print(json.dumps({"out": str(outcome.out)} | {name: getattr(outcome, name) for name in shown}))
    else:
        show(outcome)
    if interrupt.pressed:
        above = "the figures above are of the answers so far, and the same command with"
        say(f"interrupted; {above} --out {outcome.out} goes on", err=True)
        return 130
    return 1 if any(result["failed"] for result in outcome.results) else 0


def _show_sessions(outcome: Result) -> None:
    standard_output().print(figures_table(outcome.results, [("server", "server", ""), *COLUMNS["sessions"]]))
    say(f"every turn is in {outcome.out}; `paceline report {outcome.out}` makes a page of it")
    say(*outcome.notes, err=True)


def _show(outcome: Result, of_servers: bool = False) -> None:
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
