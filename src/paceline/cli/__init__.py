"""The command line. Each command is one module here; torch is imported by those that need it, when they run.

    paceline generate models/demo "Tell me about the sea." --draft sam --compare
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli.bench import bench
from paceline.cli.chat import chat
from paceline.cli.corpus import corpus
from paceline.cli.demo import demo
from paceline.cli.eval import evaluate
from paceline.cli.generate import generate
from paceline.cli.methods import methods
from paceline.cli.options import one_line
from paceline.cli.replay import replay
from paceline.cli.report import report
from paceline.cli.train import train
from paceline.errors import PacelineError

CORPUS_HELP = """Build a corpus to copy from, or say what is in one.

\b
paceline corpus build build/answers --text answers.jsonl --tokenizer MODEL
paceline corpus info build/answers
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command(short_help="Answer a prompt, or a file of prompts.")(generate)
app.command(short_help="Talk with a model.")(chat)
app.command(short_help="See what drafts gain on six prompts.")(demo)
app.command(short_help="List the drafting methods.")(methods)
app.add_typer(corpus, name="corpus", help=CORPUS_HELP)
app.command(short_help="Try drafters on recorded answers.")(replay)
app.command(short_help="Measure drafters and other engines.")(bench)
app.command(short_help="Make a page of a measurement.")(report)
app.add_typer(evaluate, name="eval", short_help="Evaluate what a model says.")
app.add_typer(train, name="train", short_help="Train drafters, or a model family.")

# Typer brings a copy of Click along; this is the copy's UsageError.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def paceline(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Language models answer several times faster without changing what they say.

    A drafter proposes tokens, the model verifies them in one forward, and the output is the model's own.

    \b
    paceline generate MODEL "What is the sea?"            as it is written
    paceline generate MODEL "What is the sea?" --compare  against no drafts
    paceline generate MODEL --prompts FILE.jsonl --json   many prompts
    paceline chat MODEL --draft sam                       a conversation
    paceline methods                                      what --draft takes
    paceline corpus build OUT --text FILE --tokenizer MODEL   text to copy from
    paceline bench MODEL -d sam --peer transformers       how fast, against what
    paceline train --help                                 drafters for your model
    paceline generate --help                              every option
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command (default: the process's own arguments) and return its exit status.

    0: all is well. 1: some prompts of a file could not be answered. 2: the caller's mistake, said in one line.
    130: Ctrl-C. Anything else that goes wrong is a bug of ours and keeps its traceback."""
    try:
        return int(app(args=argv, prog_name="paceline", standalone_mode=False) or 0)
    except PacelineError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except UsageError as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "paceline"
        message = error.format_message()  # type: ignore[attr-defined]
        print(f"error: {one_line(message)} (see {where} --help)", file=sys.stderr)
        return 2
