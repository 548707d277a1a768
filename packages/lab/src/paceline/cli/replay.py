"""`paceline replay`: count the tokens that drafters would have had accepted on recorded answers, without the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from paceline.cli import options
from paceline.cli.parameters import with_options
from paceline.cli.show import Steps, plain_table, say, standard_output
from paceline.draft.spec import option
from paceline.errors import PacelineError, printable
from paceline.given import listed
from paceline.outputs import REPLAYED, write_json, writes_in
from paceline.textfiles import readable_or_folders, seekable

if TYPE_CHECKING:
    from paceline.interrupt import Interrupt
    from paceline.logs.formats import Conversation
    from paceline.replay.report import Cost, Report

COPYING = "suffix", "sam", "prompt-lookup"
"""What is replayed on the sessions of coding agents, unless drafters are named."""
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # On the hub.
MONTH = 30 * 86_400.0
AGENTS_KEEP = "agents keep neither their tools nor all of their system prompt: real prompts are longer than these"
DRAFTERS_PER_TABLE = 8  # Drafters have a column each, and a table must fit 80 columns.
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(kw_only=True)
class ReplayOptions:
    """What is replayed, with which drafters, and what is reported."""

    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files of recorded answers (- is standard input), and of their prompts if these are in other files; "
            "or folders with sessions of coding agents.", metavar="TRACE...", callback=readable_or_folders,
        ),
    ] = None
    agents: bool = option(
        False,
        "Replay the sessions of the last month that coding agents keep on this machine (codex, claude, aider, "
        "opencode, cline), each in a row of its own. Nothing of them is sent anywhere. Without --tokenizer their "
        "tokens are smollm2's.",
        names=("--agents",),
    )
    tokenizer: options.Tokenizer = ""
    draft: options.Drafts = None
    template: options.Template = None
    questions: Path | None = option(None, "Spec-Bench's question.jsonl, if the recording is one of its answer files.")
    limit: int | None = option(None, "Replay only this many conversations, the first ones.", least=1)
    categories: str | None = option(None, "Replay only these categories, joined by commas.")
    ignore: options.Ignore = None
    sweep: str | None = option(
        None, "Replay every drafter that has this option with each of the values: option=value,value,..."
    )
    workers: int | None = option(None, "Number of processes. [default: one for each core]", least=1)
    ray: options.Ray = None
    verify_cost: str | None = option(
        None,
        "Predict a speed-up if verifying costs this: flat, linear:X (X of a forward a token), or a JSON file of "
        "nodes and times.",
    )
    forward_ms: float | None = option(
        None, "Milliseconds of a plain forward; the prediction then counts drafting time too.", least=1e-6
    )
    out: Path | None = option(
        None, "Folder to write replay.json to; `paceline report` makes a page of it.",
        callback=writes_in(replay_json=REPLAYED),
    )
    redact: bool = option(False, "Write only figures: no names of categories, and no reasons why lines were skipped.")
    as_json: options.AsJson = False

    @property
    def reads(self) -> dict[str, Any]:
        """What is read of the recordings."""
        return {"questions": self.questions, "categories": listed(self.categories) or None, "ignore": self.ignore or ()}


@with_options
def replay(asked: ReplayOptions) -> int:
    """Replay recorded answers, and say how many tokens of each drafter would have been accepted on your own text. It
    needs no model and no GPU.

    Without --draft all drafters are replayed that need no checkpoint. Drafters that read only tokens make the same
    drafts on a recording of the model's greedy answers as beside the model, and the same tokens are accepted.

    \b
    paceline replay --agents                                 what drafts would have brought in your own sessions
    paceline replay log.jsonl --tokenizer MODEL
    paceline replay log.jsonl.gz --tokenizer MODEL -d sam -d sam,draft=10 --out runs/log
    paceline replay log.jsonl --tokenizer MODEL -d sam --sweep draft=5,10,20,40 --verify-cost linear:0.01
    paceline replay /data/*.jsonl.gz --tokenizer MODEL -d sam --ray=head:6379
    """
    if asked.forward_ms is not None and asked.verify_cost is None:
        raise PacelineError("--forward-ms needs --verify-cost, such as --verify-cost flat")
    if asked.agents == bool(asked.traces):
        raise PacelineError("give files of recorded answers, or --agents for what coding agents keep on this machine")
    if not asked.tokenizer and not asked.agents:
        raise PacelineError("give the model's tokenizer: --tokenizer MODEL")
    has_engine = find_spec("paceline.formats.gguf_file") is not None  # Which reads the tokenizer in smollm2's file.
    asked.tokenizer = asked.tokenizer or ("smollm2" if has_engine else SMOLLM2)
    if asked.ray is not None and asked.limit is not None:
        raise PacelineError("--limit reads a recording from its beginning, and --ray all of it at once; leave one out")

    from paceline.draft.recording import Recording
    from paceline.draft.registry import create
    from paceline.interrupt import Interrupt
    from paceline.logs.transcript import open_tokenizer
    from paceline.replay.report import read_cost
    from paceline.replay.walk import judged
    from paceline.replay.workers import sweep

    cost = read_cost(asked.verify_cost, asked.forward_ms) if asked.verify_cost is not None else None
    for spec in asked.draft or ():
        create(spec)  # A wrong option fails before a tokenizer is read.
    recording = Recording.of(open_tokenizer(asked.tokenizer))
    if asked.agents:
        asked.traces, asked.draft = _sessions_here(), asked.draft or [*COPYING]
    every, left_out = (asked.draft, {}) if asked.draft else judged(recording)
    base_of = sweep(every, asked.sweep)
    specs = list(base_of)
    with Interrupt() as interrupt, seekable(asked.traces or ()) as traces:
        asked.traces = traces
        began = perf_counter()
        report = _here(asked, specs, recording, interrupt) if asked.ray is None else _on_ray(asked, specs, interrupt)
        seconds = perf_counter() - began
    names = ", ".join(map(str, asked.traces or ()))
    if not interrupt.pressed:
        report.reading.check(names)
    if asked.redact:
        report.redact()
    notes = [*report.reading.notes(asked.redact), *([AGENTS_KEEP] if asked.agents else [])]
    facts = {
        "trace": names,
        "tokenizer": asked.tokenizer,
        "template": asked.template,
        "answers": report.answers,
        "lines": report.reading.lines,
        "skipped": report.reading.skipped,
        "notes": notes,
        "complete": report.is_complete and not interrupt.pressed,
        "seconds": round(seconds, 2),
        "left_out": left_out,
        "results": report.results(cost),
        "variants": base_of,
    }
    if asked.out is not None:
        from paceline.replay.report import REPLAY

        asked.out.mkdir(parents=True, exist_ok=True)
        write_json(asked.out / REPLAY, facts, indent=1)
    if asked.as_json:
        print(json.dumps(facts, indent=2))
    else:
        _show(report, cost, seconds)
        for line in _notes(report, left_out):
            print(line)
    notes += ["interrupted; the figures above are of what was replayed"] if interrupt.pressed else []
    say(*map(printable, notes), err=True)
    return 130 if interrupt.pressed else 0


def _sessions_here() -> list[Path]:
    """The files of coding agents' sessions that changed in the last month, oldest first. PacelineError without any."""
    from paceline.logs.sessions import AGENTS, found

    changed = {path: path.stat().st_mtime for _, path in found(Path.home())}
    recent = sorted((path for path, at in changed.items() if at > time() - MONTH), key=changed.__getitem__)
    if not recent:
        names = ", ".join(dict.fromkeys(agent.name for agent in AGENTS))
        has = f", and {len(changed)} older files" if changed else ""
        raise PacelineError(f"no session of the last month below {Path.home()} ({names}){has}; give files or folders")
    return recent


def _named(exchanges: Sequence[Conversation]) -> list[Conversation]:
    """Sessions with categories of their own: the agent, the day, and the end of the file's or the folder's name."""
    named: dict[str, Conversation] = {}
    for one in exchanges:
        path = Path(one.where)
        day = datetime.fromtimestamp(path.stat().st_mtime).strftime("%d %b")
        own = path.stem if one.category in ("codex", "claude") else path.parent.name
        name = f"{one.category} {day} {own[-8:]}"
        numbers = chain([name], (f"{name}/{number}" for number in count(2)))
        category = next(name for name in numbers if name not in named)
        named[category] = replace(one, category=category)
    return [*named.values()]


def _here(asked: ReplayOptions, specs: Sequence[str], recording: Any, interrupt: Interrupt) -> Report:
    """On this machine's cores."""
    from paceline.logs.conversations import Reading, read_trace
    from paceline.logs.transcript import Transcriber
    from paceline.replay.report import Report
    from paceline.replay.workers import start
    from paceline.runs.environment import cores
    from paceline.serve.reading import usual_marks

    reading = Reading()
    exchanges = read_trace(*asked.traces or (), limit=asked.limit, reading=reading, **asked.reads)
    if asked.agents:
        exchanges = _named(exchanges)
    tokenizer = recording.tokenizer
    transcriber, transcripts = Transcriber(tokenizer, asked.template, usual_marks(tokenizer.chat_template)), []
    with Steps("reading", len(exchanges), "conversations") as steps:
        for transcript in transcriber.conversations(exchanges, reading):
            transcripts.append(transcript)
            steps.advance()
            if interrupt.pressed:
                break
    report = Report(specs, transcripts, reading)
    # Workers start before the thread of a progress bar does: a fork must not copy threads.
    replays = start(transcripts, specs, recording, asked.workers or cores(), lambda: interrupt.pressed)
    total = len(specs) * sum(transcript.new_tokens for transcript in transcripts)
    with Steps("replaying", total, "tokens") as steps, closing(replays):
        for done in replays:
            report.add(done)
            steps.advance(transcripts[done.conversation].new_tokens)
    return report


def _on_ray(asked: ReplayOptions, specs: Sequence[str], interrupt: Interrupt) -> Report:
    """On a Ray cluster."""
    from paceline.replay.cluster import spread
    from paceline.replay.report import Report
    from paceline.replay.workers import Replayer, ShardedReplay

    assert asked.ray is not None
    job = ShardedReplay(asked.traces or (), specs, asked.tokenizer, asked.template, **asked.reads)
    report, shards = Report(specs), job.shards()
    parts = spread(Replayer, (job,), shards, asked.ray, asked.workers)
    with Steps("replaying", len(shards), "pieces") as steps, closing(parts):
        for shard, part in zip(shards, parts, strict=True):
            report.merge(part, shard.numbers)
            steps.advance()
            if interrupt.pressed:
                return report
    if absent := [name for name in job.categories or () if name not in report.categories]:
        raise PacelineError(f"{', '.join(map(str, job.traces))} has no category {absent[0]!r}")
    return report


def _show(report: Report, cost: Cost | None, seconds: float) -> None:
    from paceline.replay.report import predict

    console = standard_output()
    console.print(_overview(report, cost))
    if cost is not None and len(report.specs) > 1:
        gains = [predict(tally, cost) for tally in report.overall]
        fastest = report.specs[gains.index(max(gains))]
        console.print(f"\nfastest at this cost: {escape(fastest)}", soft_wrap=True)
    for first in range(0, len(report.specs), DRAFTERS_PER_TABLE):
        numbers = range(first, min(first + DRAFTERS_PER_TABLE, len(report.specs)))
        if len(report.categories) > 1:
            by_category = {}
            for category in report.categories:
                tallies = [report.tallies[s, category] for s in numbers]
                by_category[category] = [f"{t.mean_accepted_tokens:.3f}" if t.answers else "-" for t in tallies]
            console.print("\ntokens a round, by category")
            console.print(_by_drafter("category", numbers, by_category))
        shares = [report.overall[s].accepted_by_depth() for s in numbers]
        by_depth = {
            str(depth): [f"{share[depth - 1]:.1%}" if len(share) >= depth else "-" for share in shares]
            for depth in DEPTHS
            if any(len(share) >= depth for share in shares)
        }
        console.print("\ndrafts accepted to a depth, of those that reach it")
        console.print(_by_drafter("depth", numbers, by_depth))
    if cost is None and len(report.specs) > 1 and report.answers:
        most = max(zip(report.specs, report.overall, strict=True), key=lambda pair: pair[1].mean_accepted_tokens)[0]
        advice = "a long draft costs more than a short one, which --verify-cost counts"
        console.print(f"\nmost tokens a round: {escape(most)}; {advice}", soft_wrap=True)
    drafters = f"{len(report.specs)} drafter{'s' if len(report.specs) > 1 else ''}"
    console.print(f"\n{report.answers:,} answers, {drafters}, {seconds:.1f} s", soft_wrap=True)


def _overview(report: Report, cost: Cost | None) -> Table:
    from paceline.replay.report import predict

    columns = ["tokens\n/round", "rounds\ndrafted", "verified\n/token", "drafter\nus/round"]
    table = plain_table("#", "draft", *columns, *(["speed-up\npredicted"] if cost is not None else []), text=("draft",))
    for s, (spec, tally) in enumerate(zip(report.specs, report.overall, strict=True), 1):
        part = "" if tally.answers == report.answers else f" ({tally.answers:,} answers)"
        cells = [f"{tally.mean_accepted_tokens:.3f}", f"{tally.draft_rate:.1%}"]
        cells += [f"{tally.verified_per_token:.2f}", f"{tally.draft_us_per_round:.1f}"]
        cells += [f"{predict(tally, cost):.2f}"] if cost is not None else []
        table.add_row(str(s), escape(spec + part), *cells)
    return table


def _by_drafter(what: str, numbers: range, rows: Mapping[str, Sequence[str]]) -> Table:
    """A column for each drafter."""
    table = plain_table(what, *(f"#{s + 1}" for s in numbers), text=("category",))
    for name, cells in rows.items():
        table.add_row(escape(name), *cells)
    return table


def _notes(report: Report, left_out: Mapping[str, str]) -> Iterator[str]:
    """Name the drafters that a recording cannot judge."""
    from paceline.draft.base import unmet
    from paceline.draft.registry import create

    if left_out:
        reasons = ", ".join(f"{name} ({why})" for name, why in left_out.items())
        yield f"left out, because a recording does not have what they need: {reasons}"
    for spec, tally in zip(report.specs, report.overall, strict=True):
        if tally.draft_tokens == 0 and (why := unmet(create(spec))):
            yield f"{spec} drafted nothing: {why}"
