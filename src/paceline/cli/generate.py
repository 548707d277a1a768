"""`paceline generate`: answer one prompt, or a file of them, with or without drafts, and print statistics."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.parameters import with_options
from paceline.cli.show import Screen, profile_table
from paceline.draft.spec import option
from paceline.engine.options import DraftOrBrought, EngineOptions
from paceline.errors import PacelineError, PromptError, printable
from paceline.formats.place import check_place
from paceline.outputs import ANSWERS, Appender, Writer, appends, standard_output
from paceline.runs.runs import rows
from paceline.textfiles import readable, text_of

if TYPE_CHECKING:
    from paceline.cli.prompts import Job
    from paceline.core.sampling import SamplingParams


@with_options
def generate(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"{options.WHAT_A_MODEL_IS} It may be left out: a single argument is a prompt for smollm2, unless it "
            "names a model (smollm2, a name in this folder, a path or id with a slash and no space, *.gguf)."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Argument(help="Prompt to answer; - reads it from standard input.")] = None,
    prompts: options.Prompts = None,
    file: options.Document = None,
    prediction: Path | None = option(
        None, "A text file that the answers will resemble; drafts are copied from it first, then --draft is asked.",
        callback=readable,
    ),
    draft: DraftOrBrought = None,
    tune: options.Tune = None,
    max_tokens: options.MaxTokens = 256,
    sampling: options.SamplingOptions = options.SamplingOptions(),
    ignore_eos: bool = option(False, "Go on past the model's end tokens.", names=("--ignore-eos",)),
    chat: bool | None = option(
        None,
        "Put the prompt into the chat template, or use it as it is. [default: --chat if there is a template]",
        names=("--chat/--raw",),
    ),
    batch: int = option(1, "Number of prompts answered at once.", least=1, names=("--batch", "-b")),
    schedule: options.Schedule = "ragged",
    compare: bool = option(
        False,
        "Also decode plainly, in turn and repeatedly; compare the speeds, and say whether the outputs are identical.",
        names=("--compare",),
    ),
    color: options.Color = False,
    profile: bool = option(False, "Show how much time each part of a round takes.", names=("--profile",)),
    as_json: bool = option(False, "Print one JSON object for each prompt and nothing else.", names=("--json",)),
    out: Path | None = option(
        None, "Write the JSON objects to this file as answers finish; the same command goes on where it stopped.",
        names=("--output", "-o"), callback=appends(ANSWERS),
    ),
    running: EngineOptions = EngineOptions(),
) -> int:
    """Answer a prompt, or a file of prompts, faster than the model alone would, with the same output.

    Standard output gets the text (or, with --json, one object a prompt); statistics go to standard error.

    \b
    paceline generate "What is the capital city of Italy? Answer in one sentence."
    paceline generate smollm2 "The mill was built in 1790. When was the mill built?" --color
    paceline generate smollm2 "The mill was built in 1790. When was the mill built?" --compare --json
    echo "Once upon a time" | paceline generate smollm2 - --raw -t 0.8
    paceline generate smollm2 "What is this text about?" --file text.txt
    paceline generate smollm2 -p prompts.jsonl -o answers.jsonl      again: it goes on
    paceline generate smollm2 -p edits.jsonl --prediction old.txt
    paceline generate smollm2 -p prompts.jsonl --batch 8 --schedule equal --json
    """
    model, prompt = told_apart(model, prompt, prompts)
    check_place(model)
    _check_sources(prompt, prompts, file)
    predicted = _expected(prediction)

    from paceline.cli.drive import Interrupt
    from paceline.cli.run import Run
    from paceline.draft.base import unmet

    params = sampling.params(max_tokens=max_tokens, ignore_eos=ignore_eos)
    draft = options.tuned(options.drafter_for(model, draft), tune)
    screen = Screen(color)
    jobs, broken = _jobs(prompt, prompts, params, predicted, file)
    has_predictions = any(job.expected for job in jobs)
    if has_predictions and draft != "none":
        draft = _from_predictions(draft)
    for error in broken:
        screen.note(f"error: {printable(error)}")
    with ExitStack() as stack:
        lines: Writer | None = standard_output() if as_json and out is None else None
        if out is not None:
            from paceline.cli.prompts import keyed

            asked = [model, draft, running.dtype, running.exact, running.activations, chat, schedule, compare]
            lines = answers = _appended(out, stack)
            total, jobs = len(jobs), _not_in(answers, out, keyed(jobs, asked))
            if len(jobs) < total:
                screen.note(f"{total - len(jobs):,} of {total:,} answers are in {out} already")
            if not jobs:
                return 1 if broken else 0
        engine = options.open_engine(
            model,
            draft,
            running,
            max_batch=batch,
            reuse=running.reuse and not compare,  # With reuse the later turns would have nothing to run.
            schedule=schedule,
            exact_profile=profile,
        )
        if lines is None:
            screen.note(*engine.target.notes, *engine.drafter.notes)
        stack.callback(screen.end_line)
        unsaid = sampling.unsaid(engine, screen if lines is None else None)
        jobs = [job.with_defaults(unsaid) for job in jobs]
        run = Run(engine, draft, screen, chat, lines, stack.enter_context(Interrupt()), schedule)
        run.compare(jobs) if compare else run.answer(jobs)
    screen.legend()
    if profile:
        reading = engine.prompt_profile
        screen.err.print(profile_table(reading, "a round that read a prompt"))
        screen.err.print(profile_table(engine.profile.without(reading), "a round of decoding"))
    if not run.drafted and not has_predictions and (why := unmet(engine.drafter)):
        screen.note(f"{engine.drafter.name} drafted nothing: {why}")
    if run.interrupt.pressed:
        screen.note("interrupted; the output above is all there was")
        return 130
    return 1 if broken or run.refused else 0


def told_apart(model: str | None, prompt: str | None, prompts: str | None) -> tuple[str, str | None]:
    """The model and the prompt, either of which may be left out."""
    if model is None:
        return options.SMOLLM2, prompt
    is_path = "/" in model and not any(map(str.isspace, model))
    names = model == options.SMOLLM2 or model.endswith(".gguf") or is_path or os.path.exists(model)
    return (model, prompt) if names or prompt is not None or prompts is not None else (options.SMOLLM2, model)


def _check_sources(prompt: str | None, prompts: str | None, file: Path | None) -> None:
    """PromptError unless there is one source of prompts."""
    if file is not None and prompts is not None:
        raise PromptError("--file stands in front of one prompt, and --prompts are many; leave one of them out")
    if file is None and (prompt is None) == (prompts is None):
        few = "there is no prompt" if prompt is None else "there are both a prompt and --prompts"
        raise PromptError(f"{few}; give one after the model (- reads standard input), or --prompts FILE or --file FILE")


def _jobs(
    prompt: str | None, prompts: str | None, params: SamplingParams, expected: str, file: Path | None
) -> tuple[list[Job], list[PromptError]]:
    from paceline.cli.prompts import from_file, from_words

    if file is not None:
        document = options.document_in(file)
        asked = [] if prompt is None else [str(from_words(prompt, params).prompt)]
        return [from_words("\n\n".join([document, *asked]), params, expected)], []
    return (
        ([from_words(prompt, params, expected)], [])
        if prompt is not None
        else from_file(str(prompts), params, expected)
    )


def _expected(file: Path | None) -> str:
    """The text of --prediction; "" without one."""
    if file is None:
        return ""
    text = text_of(file, PromptError)
    if not text:
        raise PromptError(f"{file} is empty; a prediction is the text that the answer is expected to be much like")
    return text


def _from_predictions(draft: str) -> str:
    """A drafter's spec, with the drafter that reads predictions in front of it, as on the server."""
    from paceline.draft.methods.prediction import Prediction
    from paceline.draft.spec import parse, split

    names = [parse(part, draft).name for part in split(draft)]
    return draft if Prediction.name in names else f"{Prediction.name}+{draft}"


def _appended(out: Path, stack: ExitStack) -> Appender:
    """The file of answers, which is made before a model is loaded. No other process can write into it."""
    lines = stack.enter_context(Appender.open(out, ANSWERS, then="; what was answered before is in it"))
    # A run that failed leaves no empty file.
    stack.callback(lambda: out.unlink() if out.is_file() and out.stat().st_size == 0 else None)
    return lines


def _not_in(lines: Appender, out: Path, jobs: list[Job]) -> list[Job]:
    """The jobs that have no answer in `out` yet; answers that Ctrl-C cut off, or that failed, are taken out of it.
    PacelineError if it holds anything that is no answer to one of the jobs."""
    if not out.is_file():
        return jobs
    records, known = [*rows(out)], {job.key for job in jobs}
    if any(record.get("key") not in known for record in records):
        raise PacelineError(f"{out} exists already and holds answers of another command; give another name")
    whole = [record for record in records if record.get("finish_reason") != "abort" and "error" not in record]
    if len(whole) < len(records):
        lines.replace(whole)
    return [job for job in jobs if job.key not in {record["key"] for record in whole}]
