"""`paceline replay`: what drafters would have had accepted on recorded answers, without the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TaskProgressColumn, TimeRemainingColumn
from rich.table import Table

from paceline.cli import options
from paceline.cli.show import plain_table, progress_bar
from paceline.errors import PacelineError
from paceline.jsonl import check_file, write_whole

if TYPE_CHECKING:
    from paceline.cli.drive import Interrupt
    from paceline.cost.replay import Cost
    from paceline.replay.report import Report
    from paceline.replay.shards import ShardedReplay
    from paceline.replay.tokens import Conversation, Transcriber
    from paceline.replay.walk import Recording
    from paceline.workbench.conversations import Conversation as Exchange

DRAFTERS_PER_TABLE = 8
"""Where each has a column, so that a table fits 80 columns."""
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def replay(
    traces: Annotated[list[Path], typer.Argument(help="Recorded answers: JSON Lines, .gz or not.", metavar="TRACE...")],
    tokenizer: Annotated[str, typer.Option(help="A Hugging Face folder, a tokenizer.json or a SentencePiece file.")],
    draft: Annotated[
        list[str] | None,
        typer.Option("--draft", "-d", help="A drafter; may be repeated. [default: all that need no checkpoint]"),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(help="vicuna, llama-2, chatml, none, or a Jinja file. [default: the tokenizer's own]"),
    ] = None,
    questions: Annotated[Path | None, typer.Option(help="Spec-Bench's question.jsonl, for an answer file.")] = None,
    limit: Annotated[int | None, typer.Option(help="Replay the first conversations only.", min=1)] = None,
    categories: Annotated[str | None, typer.Option(help="Replay these only, joined by commas.")] = None,
    ignore: options.Ignore = None,
    sweep: Annotated[
        str | None, typer.Option(help="option=value,value,...: every drafter that has it, with each value.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. [default: one a core]", min=1)] = None,
    ray: options.Ray = None,
    verify_cost: Annotated[
        str | None,
        typer.Option(help="Predict a speed-up: flat, linear:X, or a JSON file of nodes and forward times."),
    ] = None,
    forward_ms: Annotated[
        float | None, typer.Option(help="Milliseconds of a plain forward, to count the drafter's time too.", min=1e-6)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write the report to this file, as one page.", callback=check_file)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else.")] = False,
) -> int:
    """Replay recorded answers: what each drafter would have had accepted on your own text. No model, no GPU.

    Drafters that read tokens alone propose the same on a recording of the model's greedy answers as beside the model,
    and have the same accepted.

    \b
    paceline replay log.jsonl --tokenizer models/demo
    paceline replay log.jsonl.gz --tokenizer MODEL -d sam -d sam,draft=10 --html report.html
    paceline replay log.jsonl --tokenizer MODEL -d sam --sweep draft=5,10,20,40 --verify-cost linear:0.01
    paceline replay /data/*.jsonl.gz --tokenizer MODEL -d sam --ray=head:6379
    """
    from paceline.cli.drive import Interrupt
    from paceline.cost.replay import read_cost
    from paceline.draft.registry import create
    from paceline.replay.shards import ShardedReplay
    from paceline.replay.sweep import sweep as swept
    from paceline.replay.tokens import open_tokenizer
    from paceline.replay.walk import Recording, judged
    from paceline.workbench.conversations import read_trace

    if forward_ms is not None and verify_cost is None:
        raise PacelineError("--forward-ms needs --verify-cost, such as --verify-cost flat")
    if ray is not None and limit is not None:
        raise PacelineError("--limit reads a recording from its beginning, and --ray all of it at once; leave one out")
    cost = read_cost(verify_cost, forward_ms) if verify_cost is not None else None
    wanted = [c.strip() for c in categories.split(",")] if categories else None
    reads: dict[str, Any] = {"questions": questions, "categories": wanted, "ignore": ignore or ()}
    exchanges = [] if ray is not None else read_trace(*traces, limit=limit, **reads)
    for spec in draft or ():
        create(spec)  # a misspelt method is named before a tokenizer is read
    recording = Recording.of(open_tokenizer(tokenizer))
    every, left_out = (draft, {}) if draft else judged(recording)
    variants = swept(every, sweep)
    specs = [variant.spec for variant in variants]
    with Interrupt() as interrupt:
        began = perf_counter()
        if ray is not None:
            job = ShardedReplay(traces, specs, tokenizer, template, **reads)
            report = _on_ray(job, ray, workers, interrupt)
        else:
            report = _here(exchanges, specs, recording, template, workers, interrupt)
        seconds = perf_counter() - began
    facts = {
        "trace": ", ".join(map(str, traces)),
        "tokenizer": tokenizer,
        "template": template,
        "answers": report.answers,
        "complete": report.is_complete and not interrupt.pressed,
        "seconds": round(seconds, 2),
        "left_out": left_out,
        "results": report.results(cost),
    }
    if html is not None:
        from paceline.pages.replay import page

        write_whole(html, page(facts, [variant.base for variant in variants]))
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _show(report, cost, seconds)
        for line in _notes(report, left_out):
            print(line)
    if interrupt.pressed:
        Console(stderr=True).print("interrupted; the figures above are of what was replayed", soft_wrap=True)
    return 130 if interrupt.pressed else 0


def _here(
    exchanges: Sequence[Exchange],
    specs: Sequence[str],
    recording: Recording,
    template: str | None,
    workers: int | None,
    interrupt: Interrupt,
) -> Report:
    """On this machine's cores."""
    from paceline.replay.report import Report
    from paceline.replay.tokens import Transcriber
    from paceline.replay.workers import start

    assert recording.tokenizer is not None
    conversations = _transcribe(exchanges, Transcriber(recording.tokenizer, template), interrupt)
    report = Report(specs, conversations)
    # Workers start before the thread of a progress bar does: a fork must not copy threads.
    replays = start(conversations, specs, recording, workers or _cores())
    total = len(specs) * sum(conversation.new_tokens for conversation in conversations)
    with _bar("replaying", total) as bar, closing(replays):
        for done in replays:
            report.add(done)
            bar(conversations[done.conversation].new_tokens)
            if interrupt.pressed:
                break
    return report


def _on_ray(job: ShardedReplay, address: str, workers: int | None, interrupt: Interrupt) -> Report:
    """On a Ray cluster."""
    from paceline.replay.report import Report
    from paceline.replay.shards import Replayer
    from paceline.workbench.cluster import spread

    report, shards = Report(job.specs), job.shards()
    parts = spread(Replayer, (job,), shards, address, workers)
    with _bar("replaying", len(shards)) as bar, closing(parts):
        for shard, part in zip(shards, parts, strict=True):
            report.merge(part, shard.numbers)
            bar(1)
            if interrupt.pressed:
                return report
    if absent := [name for name in job.categories or () if name not in report.categories]:
        raise PacelineError(f"{', '.join(map(str, job.traces))} has no category {absent[0]!r}")
    return report


def _cores() -> int:
    import os

    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1


def _transcribe(exchanges: Sequence[Exchange], transcriber: Transcriber, interrupt: Interrupt) -> list[Conversation]:
    """The exchanges as tokens; after Ctrl-C those so far."""
    conversations: list[Conversation] = []
    with _bar("reading", len(exchanges)) as bar:
        for exchange in exchanges:
            conversations.append(transcriber.conversation(exchange))
            bar(1)
            if interrupt.pressed:
                break
    return conversations


@contextmanager
def _bar(what: str, total: int) -> Iterator[Any]:
    """A progress bar on standard error, if that is a terminal; yields a function that advances it."""
    err = Console(stderr=True)
    with progress_bar(err, TaskProgressColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def _show(report: Report, cost: Cost | None, seconds: float) -> None:
    console = Console(highlight=False)
    console.print(_overview(report, cost))
    if cost is not None and len(report.specs) > 1:
        console.print(f"\nfastest at this cost: {escape(_fastest(report, cost))}", soft_wrap=True)
    for first in range(0, len(report.specs), DRAFTERS_PER_TABLE):
        numbers = range(first, min(first + DRAFTERS_PER_TABLE, len(report.specs)))
        if len(report.categories) > 1:
            console.print("\ntokens a round, by category")
            console.print(_by_category(report, numbers))
        console.print("\ndrafts accepted to a depth, of those that reach it")
        console.print(_by_depth(report, numbers))
    drafters = f"{len(report.specs)} drafter{'s' if len(report.specs) > 1 else ''}"
    console.print(f"\n{report.answers:,} answers, {drafters}, {seconds:.1f} s", soft_wrap=True)


def _notes(report: Report, left_out: Mapping[str, str]) -> Iterator[str]:
    """Which drafters the recording says nothing about."""
    from paceline.draft.base import unmet
    from paceline.draft.registry import create
    from paceline.replay.report import OVERALL

    if left_out:
        reasons = ", ".join(f"{name} ({why})" for name, why in left_out.items())
        yield f"left out, because a recording does not have what they need: {reasons}"
    for s, spec in enumerate(report.specs):
        if report.tallies[s, OVERALL].drafted == 0 and (why := unmet(create(spec))):
            yield f"{spec} drafted nothing: {why}"


def _overview(report: Report, cost: Cost | None) -> Table:
    from paceline.cost.replay import predict
    from paceline.replay.report import OVERALL

    columns = ["tokens\n/round", "rounds\ndrafted", "verified\n/token", "drafter\nus/round"]
    columns += ["speed-up\npredicted"] if cost is not None else []
    table = plain_table("#", "draft", *columns, text=("draft",))
    for s, spec in enumerate(report.specs):
        tally = report.tallies[s, OVERALL]
        part = "" if tally.answers == report.answers else f" ({tally.answers:,} answers)"
        cells = [
            f"{tally.mean_accepted_tokens:.3f}",
            f"{tally.draft_rate:.1%}",
            f"{tally.verified_per_token:.2f}",
            f"{tally.draft_us_per_round:.1f}",
        ]
        cells += [f"{predict(tally, cost):.2f}"] if cost is not None else []
        table.add_row(str(s + 1), escape(spec + part), *cells)
    return table


def _fastest(report: Report, cost: Cost) -> str:
    """The drafter with the largest predicted speed-up."""
    from paceline.cost.replay import predict
    from paceline.replay.report import OVERALL

    gains = [predict(report.tallies[s, OVERALL], cost) for s in range(len(report.specs))]
    return report.specs[max(range(len(gains)), key=gains.__getitem__)]


def _by_category(report: Report, numbers: range) -> Table:
    table = plain_table("category", *(f"#{s + 1}" for s in numbers), text=("category",))
    for category in report.categories:
        tallies = [report.tallies[s, category] for s in numbers]
        table.add_row(escape(category), *(f"{t.mean_accepted_tokens:.3f}" if t.answers else "-" for t in tallies))
    return table


def _by_depth(report: Report, numbers: range) -> Table:
    from paceline.replay.report import OVERALL

    table = plain_table("depth", *(f"#{s + 1}" for s in numbers))
    shares = [report.tallies[s, OVERALL].accepted_by_depth() for s in numbers]
    for depth in DEPTHS:
        if any(len(share) >= depth for share in shares):
            cells = [f"{share[depth - 1]:.1%}" if len(share) >= depth else "-" for share in shares]
            table.add_row(str(depth), *cells)
    return table
