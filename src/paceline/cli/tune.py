"""`paceline tune`: measure this machine, replay your own log, and say which drafter to use under which load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn

from paceline.cli import options
from paceline.cli.show import plain_table, progress_bar
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.jsonl import check_file, write_whole
from paceline.workbench.options import with_options

if TYPE_CHECKING:
    from paceline.replay.tune import Speeds, Tuning
    from paceline.workbench.walk import RecordedAnswer

CHECKED = (1, 8)
"""Batch sizes at which predictions are compared with measurements, if they are among those tuned."""
MOST_ANSWERS = 64
"""Of a log: answers that are replayed."""


@dataclass(kw_only=True)
class TuneOptions:
    """What is measured, on what text, and where the table goes."""

    model: options.Model
    traffic: Path | None = option(
        None,
        "Your log: prompts and answers, JSON Lines, as `paceline replay` reads. [default: answers of the model to the "
        "shipped questions]",
    )
    out: Path = option(
        Path("tune.json"), "The table, for --draft auto --tune.", names=("--out", "-o"), callback=check_file
    )
    draft: list[str] | None = option(
        None, "A drafter for auto to choose from; may be repeated. [default: sam, suffix]", names=("--draft", "-d")
    )
    batches: str = option("1,2,4,8,16,32", "Rows at once, joined by commas.")
    seconds: float = option(2.0, "Rounds timed at each batch size, seconds.", least=0.1)
    check: bool = option(True, "Compare predictions with a short run of the engine.")
    template: str | None = option(
        None, "The log's: vicuna, chatml, ..., or a Jinja file. [default: the tokenizer's own]"
    )
    ignore: options.Ignore = None
    dtype: options.Dtype = "auto"
    device: options.Device = "auto"
    threads: options.Threads = None
    as_json: options.AsJson = False


@with_options
def tune(asked: TuneOptions) -> int:
    """Measure what rounds cost here, replay your log, and say what to use and what it will gain.

    The table it writes makes `auto` start with what it would otherwise learn in its first seconds, and makes its
    choices repeatable. Drafters that see more than tokens (a draft model, heads) cannot be replayed; `auto` learns
    their costs as it runs.

    \b
    paceline tune models/demo
    paceline tune MODEL --traffic log.jsonl -o tune.json
    paceline generate MODEL -p prompts.jsonl --batch 8 --draft auto --tune tune.json
    """
    from paceline.cli.drive import Interrupt
    from paceline.draft.registry import create
    from paceline.replay.tune import Tuning

    out, sizes = asked.out, _sizes(asked.batches)
    drafts = list(dict.fromkeys(asked.draft or ("sam", "suffix")))
    for spec in drafts:
        create(spec)  # a misspelt method is named before a model is read
    engine = options.open_engine(asked.model, "none", dtype=asked.dtype, device=asked.device, threads=asked.threads)
    assert engine.tokenizer is not None
    checked = [size for size in sizes if size in CHECKED] if asked.check else []
    speeds = (2 + len(drafts)) * (len(sizes) + len(checked))
    total = 1 + len(sizes) + len(drafts) + speeds
    with Interrupt() as interrupt, _bar(total) as step:
        tuning = Tuning(engine.target, engine.tokenizer, drafts, sizes, asked.seconds, step, lambda: interrupt.pressed)
        tuning.check()
        answers = _answers(tuning, asked)
        step()
        table = tuning.measure(answers) if answers else None
        if table is None or interrupt.pressed:
            Console(stderr=True).print(f"interrupted; {out} was not written", soft_wrap=True)
            return 130
        write_whole(out, json.dumps({"paceline": "tune", **table}, indent=2) + "\n")
        predicted = tuning.predicted(table, str(out), answers)
        is_measured = tuning.measured(str(out), answers, checked)
    if interrupt.pressed:
        Console(stderr=True).print(f"interrupted; {out} is whole, predictions are not", soft_wrap=True)
        return 130
    _report(predicted, is_measured, table, out, asked.as_json)
    return 0


def _sizes(text: str) -> list[int]:
    """Batch sizes, ascending."""
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1 or sizes[-1] > 1024:
        raise PacelineError(f"--batches is {text!r}; give whole numbers from 1 to 1024, joined by commas: 1,8,32")
    return sizes


@contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error, if that is a terminal; yields a function that advances it."""
    with progress_bar(Console(stderr=True), MofNCompleteColumn()) as progress:
        task = progress.add_task("tuning", total=total)
        yield lambda: progress.advance(task)


def _answers(tuning: Tuning, asked: TuneOptions) -> list[RecordedAnswer]:
    """What is replayed: the log's answers, or the model's own to the shipped questions."""
    if asked.traffic is None:
        from paceline.bench.suites import read_suite

        chat = tuning.tokenizer.has_chat_template
        turns = [question.turns[0] for question in read_suite("demo").questions]
        return tuning.answers([[{"role": "user", "content": turn}] if chat else turn for turn in turns], 96)
    from paceline.workbench.conversations import ConversationError, read_trace
    from paceline.workbench.transcript import Transcriber

    transcriber = Transcriber(tuning.tokenizer, asked.template)
    answers: list[RecordedAnswer] = []
    context, size = tuning.target.max_context, tuning.target.vocab_size
    for exchange in read_trace(asked.traffic, limit=MOST_ANSWERS, ignore=asked.ignore or ()):
        for answer in transcriber.conversation(exchange).turns:
            if (highest := max(answer.prompt.max(), answer.answer.max())) >= size:
                raise ConversationError(
                    f"{exchange.where}: token {highest} is none of the model's {size}: another model's log"
                )
            if len(answer.prompt) + len(answer.answer) + 64 < context:
                answers.append(answer)
    if not answers:
        raise PacelineError(f"no answer in {asked.traffic} fits the model's context of {context} tokens")
    return answers[:MOST_ANSWERS]


def _report(predicted: Speeds, is_measured: Speeds, table: dict[str, Any], out: Path, as_json: bool) -> None:
    from paceline.replay.tune import advice

    text = advice(predicted, str(out))
    if as_json:
        facts = {"out": str(out), "advice": text, "predicted": predicted, "measured": is_measured, "table": table}
        print(json.dumps(facts))
        return
    console = Console(highlight=False)
    batches = list(predicted["none"])
    shown = plain_table("tokens/s, predicted", *map(str, batches), text=("tokens/s, predicted",))
    for name, speeds in predicted.items():
        shown.add_row(name, *(f"{speeds[batch]:.0f}" for batch in batches))
    console.print(shown)
    for batch in is_measured["none"]:
        pairs = ", ".join(
            f"{name} {predicted[name][batch]:.0f} and {speeds[batch]:.0f}" for name, speeds in is_measured.items()
        )
        console.print(f"{batch} at once, predicted and measured: {pairs}", markup=False, soft_wrap=True)
    console.print(f"\n{text}", markup=False, soft_wrap=True)
