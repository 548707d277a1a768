"""`paceline tune`: measure this machine, replay your own log, and say which drafter to use under which load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn

from paceline.cli import options
from paceline.cli.show import plain_table, progress_bar
from paceline.errors import PacelineError
from paceline.jsonl import check_file, write_whole

if TYPE_CHECKING:
    from paceline.replay.tokens import RecordedAnswer
    from paceline.replay.tune import Tuning

Speeds = dict[str, dict[int, float]]
"""Tokens a second, by drafter and batch size."""
CHECKED = (1, 8)
"""Batch sizes at which predictions are compared with measurements, if they are among those tuned."""
MOST_ANSWERS = 64
"""Of a log: answers that are replayed."""
MOST_BESIDE = 24
"""Of them: prompts that are answered to measure drafting on a second device."""


def tune(
    model: options.Model,
    traffic: Annotated[
        Path | None,
        typer.Option(
            help="Your log: prompts and answers, JSON Lines, as `paceline replay` reads. [default: answers "
            "of the model to the shipped questions]"
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The table, for --draft auto --tune.", callback=check_file)
    ] = Path("tune.json"),
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft", "-d", help="A drafter for auto to choose from; may be repeated. [default: sam, suffix]"
        ),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            help="A draft model, as mirror: takes it: would drafting on a second device pay, and from which size on?"
        ),
    ] = None,
    batches: Annotated[str, typer.Option(help="Rows at once, joined by commas.")] = "1,2,4,8,16,32",
    seconds: Annotated[float, typer.Option(help="Rounds timed at each batch size, seconds.", min=0.1)] = 2.0,
    check: Annotated[bool, typer.Option(help="Compare predictions with a short run of the engine.")] = True,
    template: Annotated[
        str | None, typer.Option(help="The log's: vicuna, chatml, ..., or a Jinja file. [default: the tokenizer's own]")
    ] = None,
    ignore: options.Ignore = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else.")] = False,
) -> int:
    """Measure what rounds cost here, replay your log, and say what to use and what it will gain.

    The table it writes makes `auto` start with what it would otherwise learn in its first seconds, and makes its
    choices repeatable. Drafters that see more than tokens (a draft model, heads) cannot be replayed; `auto` learns
    their costs as it runs.

    \b
    paceline tune models/demo
    paceline tune MODEL --traffic log.jsonl -o tune.json
    paceline tune MODEL --beside DRAFT                        # the question of docs/methods/mirror.md
    paceline generate MODEL -p prompts.jsonl --batch 8 --draft auto --tune tune.json
    """
    from paceline.cli.drive import Interrupt
    from paceline.draft.registry import create
    from paceline.replay.tune import Tuning

    sizes = _sizes(batches)
    drafts = list(dict.fromkeys(draft or ("sam", "suffix")))
    for spec in [*drafts, *([f"mirror:{beside}"] if beside else [])]:
        create(spec)  # a misspelt method is named before a model is read
    engine = options.open_engine(model, "none", dtype=dtype, device=device, threads=threads)
    assert engine.tokenizer is not None
    tuning = Tuning(engine.target, engine.tokenizer, drafts, sizes, seconds)
    tuning.check()
    checked = [size for size in sizes if size in CHECKED] if check else []
    names = ["none", *drafts, f"auto:{'|'.join(spec.replace(',', ';') for spec in drafts)}"]
    total = 1 + len(sizes) + len(drafts) + len(names) * (len(sizes) + len(checked)) + (beside is not None)
    with Interrupt() as interrupt, _bar(total) as step:
        answers = _answers(tuning, traffic, template, ignore or (), lambda: interrupt.pressed)
        step()
        table = tuning.measure(answers, step, lambda: interrupt.pressed) if answers else None
        if table is None or interrupt.pressed:
            Console(stderr=True).print(f"interrupted; {out} was not written", soft_wrap=True)
            return 130
        if beside is not None:
            table["beside"] = {"draft": beside, **_beside(tuning, beside, answers, lambda: interrupt.pressed)}
            step()
        write_whole(out, json.dumps({"paceline": "tune", **table}, indent=2) + "\n")
        predicted = _predicted(tuning, table, out, answers, names, step, lambda: interrupt.pressed)
        is_measured = _measured(tuning, out, answers, names, checked, step, lambda: interrupt.pressed)
    if interrupt.pressed:
        Console(stderr=True).print(f"interrupted; {out} is whole, predictions are not", soft_wrap=True)
        return 130
    _report(predicted, is_measured, table, out, as_json)
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


def _answers(
    tuning: Tuning, traffic: Path | None, template: str | None, ignore: Sequence[str], stopped: Callable[[], bool]
) -> list[RecordedAnswer]:
    """What is replayed: the log's answers, or the model's own to the shipped questions."""
    if traffic is None:
        from paceline.bench.suites import read_suite

        chat = tuning.tokenizer.has_chat_template
        turns = [question.turns[0] for question in read_suite("demo").questions]
        prompts: list[Any] = [[{"role": "user", "content": turn}] if chat else turn for turn in turns]
        return tuning.answers(prompts, 96, stopped)
    from paceline.replay.tokens import Transcriber
    from paceline.workbench.conversations import ConversationError, read_trace

    transcriber = Transcriber(tuning.tokenizer, template)
    answers: list[RecordedAnswer] = []
    room, size = tuning.target.max_context, tuning.target.vocab_size
    for exchange in read_trace(traffic, limit=MOST_ANSWERS, ignore=ignore):
        for answer in transcriber.conversation(exchange).turns:
            if (highest := max(answer.prompt.max(), answer.answer.max())) >= size:
                raise ConversationError(
                    f"{exchange.where}: token {highest} is none of the model's {size}: another model's log"
                )
            if len(answer.prompt) + len(answer.answer) + 64 < room:
                answers.append(answer)
    if not answers:
        raise PacelineError(f"no answer in {traffic} fits the model's context of {room} tokens")
    return answers[:MOST_ANSWERS]


def _spec(name: str, out: Path) -> str:
    """A drafter as an engine takes it: `auto` with its table."""
    return f"{name},table={out}" if name.startswith("auto") else name


def _requests(batch: int) -> int:
    return max(12, 4 * batch)


def _beside(
    tuning: Tuning, draft: str, answers: Sequence[RecordedAnswer], stopped: Callable[[], bool]
) -> dict[str, Any]:
    from paceline.cost.beside import measure

    prompts = [answer.prompt.tolist() for answer in answers[:MOST_BESIDE]]
    return measure(tuning.target, tuning.tokenizer, draft, prompts, stopped=stopped).to_json()


def _predicted(
    tuning: Tuning, table: dict[str, Any], out: Path, answers: Sequence[RecordedAnswer], names: Sequence[str],
    step: Callable[[], None], stopped: Callable[[], bool],
) -> Speeds:  # fmt: skip
    """Replayed in batches, every drafter anew for every size."""
    from paceline.draft.registry import create
    from paceline.replay.tune import predict

    speeds: Speeds = {name: {} for name in names}
    for name in names:
        for batch in tuning.batches:
            drafter = create(_spec(name, out))
            drafter.bind(tuning.target)
            speeds[name][batch] = predict(table, answers, drafter, batch, _requests(batch), stopped)
            step()
    return speeds


def _measured(
    tuning: Tuning, out: Path, answers: Sequence[RecordedAnswer], names: Sequence[str], batches: Sequence[int],
    step: Callable[[], None], stopped: Callable[[], bool],
) -> Speeds:  # fmt: skip
    """The engine itself, after a few requests to warm it up; the drafters in turn at every size."""
    from paceline.engine.engine import Engine
    from paceline.replay.tune import measured

    speeds: Speeds = {name: {} for name in names}
    for batch in batches:
        for name in names:
            engine = Engine(tuning.target, _spec(name, out), max_batch=batch, tokenizer=tuning.tokenizer)
            measured(engine, answers[:3], batch + 2, stopped)
            speeds[name][batch] = measured(engine, answers, _requests(batch), stopped)
            step()
    return speeds


def _report(predicted: Speeds, is_measured: Speeds, table: dict[str, Any], out: Path, as_json: bool) -> None:
    from paceline.replay.tune import advice

    said = advice(predicted, str(out))
    if as_json:
        facts = {"out": str(out), "advice": said, "predicted": predicted, "measured": is_measured, "table": table}
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
    console.print(f"\n{said}", markup=False, soft_wrap=True)
    if "beside" in table:
        from paceline.cost.beside import advice as second

        console.print(f"\n{second(table['beside'])}", markup=False, soft_wrap=True)
