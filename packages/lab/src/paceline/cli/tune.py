"""`paceline tune`: measure our engine, or with `server` a running server, and say what to draft at each load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.bench.options import GoalOptions
from paceline.cli import options
from paceline.cli.parameters import with_options
from paceline.cli.show import Steps, plain_table, say, standard_output
from paceline.draft.spec import option, quoted
from paceline.engine.options import ModelOptions
from paceline.errors import PacelineError, printable
from paceline.given import listed_numbers
from paceline.interrupt import Interrupt
from paceline.net.keys import Keys, check_server
from paceline.outputs import TABLE, check_folder, write_json, writes

if TYPE_CHECKING:
    from paceline.logs.transcript import RecordedAnswer
    from paceline.replay.advice import Choice
    from paceline.replay.tune import Tuning

MOST_ANSWERS = 64  # Most answers of a log to replay for our engine.
MOST_CONVERSATIONS = 512  # Most conversations of a log to send to a server and replay.
FEW = 20  # Fewer answers give a warning.


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a measurement is made on."""

    log: options.Log = None
    template: options.Template = None
    ignore: options.Ignore = None
    batch: str = option(
        "1,2,4,8,16,32", "Numbers of rows, or of requests to a server, at once, joined by commas.",
        names=("--batch", "-b"),
    )
    as_json: options.AsJson = False


@with_options
def tune(
    model: options.Model,
    asked: Recorded,
    draft: options.Drafts = None,
    seconds: float = option(2.0, "Seconds for which rounds are timed at each number of --batch.", least=0.1),
    out: Path = option(
        Path("tune.json"), "File for the table that --draft auto,table=FILE reads.", names=("--out", "-o"),
        callback=writes(TABLE),
    ),
    running: ModelOptions = ModelOptions(),
) -> int:
    """Measure what rounds of our engine cost, replay your log, and write a table of what to draft at each load.

    With this table `auto` knows from the start what it would otherwise learn in its first seconds, and its choices can
    be repeated. It chooses among the drafters of --draft, by default sam and suffix. Drafters that see more than tokens
    (a draft model, heads) cannot be replayed; `auto` learns their costs as it runs.

    \b
    paceline tune smollm2
    paceline tune MODEL --log log.jsonl -o tune.json
    paceline serve MODEL --draft auto,table=tune.json
    paceline generate MODEL -p prompts.jsonl --batch 8 --draft auto --tune tune.json
    paceline tune server --help           a running server
    """
    sizes = listed_numbers(asked.batch, "--batch")

    from paceline.draft.registry import create
    from paceline.replay.tune import Tuning

    drafts = list(dict.fromkeys(draft or ("sam", "suffix")))
    for spec in drafts:
        create(spec)  # A wrong option fails before a model is read.
    engine = options.open_engine(model, "none", running)
    assert engine.tokenizer is not None
    with Interrupt() as interrupt, Steps("tuning", 1 + len(sizes) + len(drafts)) as steps:
        tuning = Tuning(
            engine.target, engine.tokenizer, drafts, sizes, seconds, steps.advance, lambda: interrupt.pressed
        )
        tuning.check()
        answers = _answers(tuning, asked)
        steps.advance()
        table = tuning.measure(answers) if answers else None
        if table is None or interrupt.pressed:
            say(f"interrupted; {out} was not written", err=True)
            return 130
    write_json(out, {"paceline": "tune", **table}, indent=2)
    _say_few(answers)
    if asked.as_json:
        print(json.dumps({"out": str(out), "table": table}))
        return 0
    console = standard_output()
    shown = plain_table("round, ms", *next(iter(table["round_ms"].values())), text=("round, ms",))
    for rows, times in table["round_ms"].items():
        shown.add_row(rows, *(f"{milliseconds:.1f}" for milliseconds in times.values()))
    console.print(shown)
    for spec, shares in table["acceptance"].items():
        places = " ".join(f"{share:.0%}" for share in shares[:8])
        say(f"{spec}, accepted depth by depth: {places}")
    spec = quote(f"{tuning.spec},table={quoted(str(out))}")
    say(f"\nUse --draft {spec}: at each load it drafts what pays, or nothing.")
    return 0


def _answers(tuning: Tuning, asked: Recorded) -> list[RecordedAnswer]:
    """The answers to replay: the log's, or the model's own to the shipped questions."""
    if asked.log is None:
        from paceline.bench.suites import read_suite

        chat = tuning.tokenizer.has_chat_template
        turns = [question.turns[0] for question in read_suite("demo").questions]
        return tuning.answers([[{"role": "user", "content": turn}] if chat else turn for turn in turns], 96)
    from paceline.logs.conversations import Reading, read_trace
    from paceline.logs.transcript import Transcriber
    from paceline.serve.reading import usual_marks

    tokenizer, reading = tuning.tokenizer, Reading()
    transcriber = Transcriber(tokenizer, asked.template, usual_marks(tokenizer.chat_template))
    answers: list[RecordedAnswer] = []
    context, size = tuning.target.max_context, tuning.target.vocab_size
    exchanges = read_trace(asked.log, limit=MOST_ANSWERS, ignore=asked.ignore or (), reading=reading)
    for answer in (turn for one in transcriber.conversations(exchanges, reading) for turn in one.turns):
        if (highest := max(answer.prompt.max(), answer.answer.max())) >= size:
            raise PacelineError(f"{asked.log}: token {highest} is none of the model's {size}: another model's log")
        if len(answer.prompt) + len(answer.answer) + 64 < context:
            answers.append(answer)
    reading.check(str(asked.log))
    say(*map(printable, reading.notes()), err=True)
    if not answers:
        raise PacelineError(f"no answer in {asked.log} fits the model's context of {context} tokens")
    return answers[:MOST_ANSWERS]


@with_options
def tune_server(
    url: Annotated[str, typer.Argument(help="Running server, with its drafts if it has any.", metavar="URL[#model]")],
    asked: Recorded,
    tokenizer: options.Tokenizer,
    against: str | None = option(None, "The same model served without drafts, URL[#model].", metavar="URL"),
    out: Path = option(
        Path("tuned"), "Folder for measurements and the configuration; the same command goes on.",
        names=("--out", "-o"), callback=check_folder,
    ),
    minutes: float = option(10.0, "Largest number of minutes to send requests.", least=0.05),
    max_tokens: int = option(64, "Largest number of new tokens of an answer.", names=("--max-tokens", "-n"), least=8),
    goals: GoalOptions = GoalOptions(),
    keys: Keys = Keys(),
) -> int:
    """Measure a running server under your prompts, and write what belongs into its configuration: vLLM's, SGLang's,
    llama.cpp's or ours.

    \b
    paceline tune server http://a:8000 --against http://b:8000 --tokenizer MODEL --log log.jsonl -o tuned
    """
    sizes = listed_numbers(asked.batch, "--batch")
    if len(sizes) < 2:
        raise PacelineError("what drafted tokens cost shows in two loads or more: --batch 1,8")
    for server in filter(None, (url, against)):
        check_server(server, keys)

    from paceline.bench.suites import read_suite
    from paceline.logs.bodies import ConversationError
    from paceline.logs.conversations import Reading, read, read_trace
    from paceline.logs.formats import Conversation
    from paceline.logs.transcript import Transcriber, open_tokenizer
    from paceline.net.servers import Server
    from paceline.replay.advice import Goals
    from paceline.replay.server import DRAFTS, PLAIN, ServerTuning
    from paceline.serve.reading import usual_marks

    opened, reading = open_tokenizer(tokenizer), Reading()
    transcriber = Transcriber(opened, asked.template, usual_marks(opened.chat_template))
    if asked.log is not None:
        ignore = asked.ignore or ()
        try:
            found = read_trace(asked.log, limit=MOST_CONVERSATIONS, ignore=ignore, reading=reading)
        except ConversationError:  # The log has only prompts, or there is no log.
            found, reading = list(islice(read(asked.log, ignore=ignore), MOST_CONVERSATIONS)), Reading()
            reading.lines = len(found)
    else:
        turns = [question.turns[0] for question in read_suite("demo").questions]
        found = [Conversation([{"role": "user", "content": turn}]) for turn in turns]
    servers = {DRAFTS: Server.find(url, keys)}
    if against is not None:
        servers[PLAIN] = Server.find(against, keys)
    elif servers[DRAFTS].engine == "paceline":
        servers[PLAIN] = servers[DRAFTS]  # A request to our server may ask for no drafts.
    with Interrupt() as interrupt, Steps("tuning", 60 * minutes, "seconds") as steps:
        tuning = ServerTuning(
            servers, found, transcriber, sizes, 60 * minutes, max_tokens, lambda: interrupt.pressed, steps.advance,
            reading,
        )  # fmt: skip
        say(*map(printable, reading.notes()), err=True)
        _say_few(found)
        tuning.measure(out)
        if interrupt.pressed:
            say(f"interrupted; the same command goes on in {out}", err=True)
            return 130
        facts, choices = tuning.advise(out, Goals(goals.first_ms, goals.token_ms), asked.log)
    if asked.as_json:
        print(json.dumps({"out": str(out), **facts}))
        return 0
    _show(choices)
    lines = [
        f"{of['engine']} {of['version']} (written for {of['written_for']}), {of['method']}: {of['flags']}"
        for of in facts["configurations"]
    ]
    check = [f"{command}{keys.words}" for command in facts["check"]]
    lines += ["", *facts["notes"], "To check it, in turn on the same prompts:", *check]
    say(*lines, f"{out / 'configuration.json'} holds it all.")
    return 0


def _say_few(prompts: Sequence[object]) -> None:
    if len(prompts) < FEW:
        say(f"only {len(prompts)} prompts: on others what is accepted may be quite different; {FEW} say more", err=True)


def _show(choices: Sequence[Choice]) -> None:
    """What to expect at each load."""
    columns = ("at once", "context", "tokens", "gain", "95 %", "goodput", "without")
    table = plain_table("drafts", *columns, text=("drafts",))
    for choice in choices:
        for one in choice.expected:
            table.add_row(
                choice.method.name,
                str(one.load),
                "all" if one.context is None else f"{one.context:.0f}",
                str(one.k or "off"),
                f"{one.gain:.2f}",
                f"{one.low:.2f}-{one.high:.2f}",
                f"{one.goodput:.0%}",
                f"{choice.plain_goodput[one.load]:.0%}",
            )
    standard_output().print(table)
