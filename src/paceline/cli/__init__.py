"""The command line. Each command is one module here; torch is imported by those that need it, when they run.

paceline generate smollm2 "The mill was built in 1790. When was the mill built?" --draft sam --compare
"""

import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from paceline import __version__, interrupt
from paceline.cli.bench import bench, schedules, servers, sessions
from paceline.cli.certify import certify, certify_server
from paceline.cli.chat import chat
from paceline.cli.corpus import corpus
from paceline.cli.demo import demo
from paceline.cli.doctor import doctor
from paceline.cli.eval_align import align
from paceline.cli.eval_vision import vision
from paceline.cli.export import export
from paceline.cli.frame import configured
from paceline.cli.generate import generate
from paceline.cli.launch import Launching, launch
from paceline.cli.methods import methods
from paceline.cli.parameters import Grouped, app_of
from paceline.cli.quantised import quality, quantize
from paceline.cli.replay import replay
from paceline.cli.report import report
from paceline.cli.serve import Serving, serve
from paceline.cli.train import app as train
from paceline.cli.tune import tune, tune_server
from paceline.cli.warned import SAID, WARNED
from paceline.cli.watch import watch
from paceline.errors import PacelineError, install, out_of_memory, printable

CORPUS_HELP = """Build a corpus to copy from, or show what is in one.

\b
paceline corpus build build/answers --text answers.jsonl --tokenizer MODEL
paceline corpus info build/answers
"""


def _needs(extra: str, when: str = "") -> str:
    """The end of a command's help. when: as in "With --ray: "."""
    return f"{when}pip install '.[{extra}]' in a checkout brings the packages that this needs."


def _add(
    to: typer.Typer, command: Callable[..., Any], summary: str, needs: str = "", name: str | None = None,
    kind: type[Grouped] = Grouped,
) -> None:  # fmt: skip
    """needs: the end of its help."""
    to.command(name, cls=kind, short_help=summary, epilog=needs or None)(command)


evaluate = app_of(no_args_is_help=True)
_add(evaluate, align, "How well answers keep a scenario's written rules.", _needs("eval"), "align")
evaluate.add_typer(vision, name="vision", short_help="Whether a vision-language model sees size, place and number.")

app = app_of()
_add(app, generate, "Answer a prompt, or a file of prompts.")
_add(app, chat, "Talk with a model.")
_add(app, serve, "Serve a model with OpenAI's API.", _needs("serve"), kind=Serving)
_add(app, launch, "Start a coding agent with a server behind it.", _needs("serve"), kind=Launching)
_add(app, demo, "See what drafts gain on six prompts.")
_add(app, methods, "List the drafting methods.")
_add(app, doctor, "Say what this machine has, and what a model runs with.")
app.add_typer(corpus, name="corpus", help=CORPUS_HELP)
_add(app, replay, "Try drafters on recorded answers.")
_add(app, bench, "Measure drafters and other engines.")
_add(app, schedules, "Compare ways to schedule a batch.", name="bench schedules")
_add(app, servers, "Measure running servers under load.", _needs("bench"), "bench server")
_add(app, sessions, "Measure whole sessions of a coding agent.", _needs("bench"), "bench sessions")
_add(app, certify, "Say whether an engine is lossless.", _needs("certify"))
_add(app, certify_server, "Say whether a server is lossless.", _needs("certify"), "certify server")
_add(app, report, "Make a page of a measurement.")
_add(app, quantize, "Make a model of eight or four bits.")
_add(app, quality, "Say what a quantised model has lost.")
_add(app, tune, "Measure our engine, and say what to draft.")
_add(app, tune_server, "Measure a running server, and say what to draft.", _needs("tune"), "tune server")
_add(app, watch, "See what the drafts of a running server bring.", _needs("watch"))
app.add_typer(evaluate, name="eval", short_help="Evaluate what a model says.")
app.add_typer(train, name="train", short_help="Train drafters for a model.")
app.add_typer(export, name="export", short_help="Write models and drafters as other engines read them.")

# Typer brings a copy of Click along; this is the copy's UsageError.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
NoCommand: type[Exception] = next(one for one in UsageError.__subclasses__() if one.__name__ == "NoArgsIsHelpError")
OWN_EXTRAS = ("serve", "bench", "tune", "watch", "certify", "eval", "train", "vision")  # Each has its own extra.
EXTRAS = {
    **dict.fromkeys(("accelerate", "datasets"), "train"),
    **dict.fromkeys(("openai", "httpx2", "prometheus_client"), "watch"),
    **dict.fromkeys(("yaml", "pyarrow", "pydantic"), "eval"),
    **dict.fromkeys(("PIL", "peft", "sklearn"), "vision"),
    **dict.fromkeys(("scipy", "jsonschema"), "certify"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "llguidance", "pathspec"), "serve"),
    "diffusers": "diffusion",
    "ray": "ray",
}
"""Packages that not every installation has, and the extra that brings them to commands without one of their own."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # Errors of a full disk.


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
    """Language models answer faster without changing what they say.

    A drafter proposes tokens, the model verifies them in one forward, and the output is the model's own.
    Every command takes --config FILE, a TOML file with a table of its options ([serve], then draft = "sam"), and an
    environment variable for each (PACELINE_SERVE_DRAFT).

    \b
    paceline generate MODEL "Hello! What can you do?"     text as it grows
    paceline generate MODEL "Built in 1790. Built when?" --compare  with and without
    paceline generate MODEL --prompts FILE.jsonl --json   many prompts
    paceline chat MODEL --draft sam                       a conversation
    paceline serve MODEL --draft sam                      OpenAI's API on a port
    paceline launch codex MODEL                           a coding agent, and its server
    paceline methods                                      what --draft takes
    paceline corpus build OUT --text FILE --tokenizer MODEL   text to copy from
    paceline bench MODEL -d sam --peer transformers       how fast, against what
    paceline certify MODEL -d sam                         is it lossless?
    paceline train --help                                 drafters for your model
    paceline generate --help                              every option
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def _say_what_takes_long() -> None:
    """Show in lines that functions are compiled, which `paceline.compiled` logs."""
    compiling = logging.getLogger("paceline.compiling")
    compiling.addHandler(SAID)
    compiling.setLevel(logging.INFO)
    compiling.propagate = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command (default: the process's own arguments) and return its exit status.

    0: all is well. 1: some prompts of a file could not be answered. 2: the caller's mistake, or a full disk, reported
    in one line. 130: Ctrl-C. 141: the reader of a pipe has left (`| head`). Any other error is a bug and keeps its
    traceback."""
    WARNED.seen.clear()
    logging.getLogger("paceline").addHandler(WARNED)
    _say_what_takes_long()
    with interrupt.ByException() as ctrl_c:
        try:
            status = _run(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
            return status
        except (KeyboardInterrupt, typer.Abort):
            return _interrupted()
        except BrokenPipeError:
            _forget_output()
            return 141
        except Exception as error:
            if ctrl_c.pressed:
                return _interrupted()
            if (line := _in_a_line(error, sys.argv[1:] if argv is None else argv)) is None:
                raise
            print(f"error: {printable(line)}", file=sys.stderr)
            return 2


def _run(argv: Sequence[str]) -> int:
    """Run a command; Typer's own `main` would end silently on Ctrl-C."""
    command = typer.main.get_command(app)
    words, settings = configured(argv, command)
    how: dict[str, Any] = {"default_map": settings, "auto_envvar_prefix": "PACELINE"}
    try:
        with command.make_context("paceline", _with_addresses(words), **how) as context:
            return int(command.invoke(context) or 0)
    except NoCommand as asked:  # A group's name alone asks for its help.
        print(asked.format_message())  # type: ignore[attr-defined]
        return 0
    except typer.Exit as done:
        return int(done.exit_code)


def _with_addresses(argv: Sequence[str]) -> list[str]:
    """`--ray` with its default address where it has none: Typer has no options whose value may be left out."""
    after = [*argv[1:], "-"][: len(argv)]
    bare = [word == "--ray" and following.startswith("-") for word, following in zip(argv, after, strict=True)]
    return ["--ray=auto" if alone else word for word, alone in zip(argv, bare, strict=True)]


def _in_a_line(error: Exception, argv: Sequence[str]) -> str | None:
    """The message for an error that the caller can mend; None for a bug."""
    if isinstance(error, UsageError):
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "paceline"
        return f"{error.format_message()} (see {where} --help)"  # type: ignore[attr-defined]
    if isinstance(error, OSError) and error.errno in FULL:
        _forget_output()
        return f"{error.filename or 'the output'} cannot be written: {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get(str(error.name).partition(".")[0])):
        command = "vision" if "vision" in argv[:2] else next(iter(argv), "")
        own = command in OWN_EXTRAS and extra not in ("ray", "diffusion")
        return f"{error.name} is not installed; {install(command if own else extra)}"
    return str(error) if isinstance(error, PacelineError) else out_of_memory(error)


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return interrupt.STATUS


def _forget_output() -> None:
    """Drop what standard output still buffers; Python would try to write it at exit, and complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
