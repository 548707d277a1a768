"""The command line. Each command is one module here, imported when it runs; `commands.py` says which there are.

paceline generate smollm2 "The mill was built in 1790. When was the mill built?" --draft sam --compare
"""

import errno
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pkgutil import extend_path
from typing import Annotated, Any

import typer

from paceline import __version__, interrupt
from paceline.cli.commands import TABLE, Root
from paceline.cli.frame import configured
from paceline.cli.parameters import app_of
from paceline.cli.warned import SAID, WARNED
from paceline.errors import PacelineError, install, out_of_memory, printable

__path__ = extend_path(__path__, __name__)  # Its modules come from several distributions.
app = app_of(cls=Root)

# Typer brings a copy of Click along; this is the copy's UsageError.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
NoCommand: type[Exception] = next(one for one in UsageError.__subclasses__() if one.__name__ == "NoArgsIsHelpError")
BROUGHT = {
    **dict.fromkeys(("torch", "transformers", "safetensors", "gguf", "paceline"), "."),
    **dict.fromkeys(("openai", "httpx2", "prometheus_client"), "packages/net"),
    **dict.fromkeys(("paceline.bench", "paceline.replay", "numba", "huggingface_hub"), "packages/lab"),
    **dict.fromkeys(("sklearn", "datasets"), "packages/lab[bench]"),
    **dict.fromkeys(("paceline.certify", "jsonschema"), "packages/certify"),
    **dict.fromkeys(("paceline.train", "accelerate"), "packages/train"),
    **dict.fromkeys(("paceline.evals", "yaml", "pyarrow", "scipy"), "packages/evals"),
    **dict.fromkeys(("PIL", "peft"), "packages/evals[vision]"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "pathspec"), ".[serve]"),
    **dict.fromkeys(("pydantic", "llguidance"), ".[local]"),
    "paceline.rollout": "packages/rl",
    "diffusers": "packages/evals[diffusion]",
    "ray": "packages/lab[ray]",
}
"""Packages that not every installation has, and what brings them to commands that do not say what they need."""
OF_ITSELF = ("packages/evals[diffusion]", "packages/lab[ray]")  # Whatever else a command needs.
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
    paceline replay LOG --tokenizer MODEL                 what drafts would bring on your own log
    paceline bench MODEL -d sam --peer transformers       how fast, against what
    paceline bench server URL                             a running server under load
    paceline certify MODEL -d sam                         is it lossless?
    paceline certify server URL --against URL             is a server lossless?
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
    if isinstance(error, ModuleNotFoundError) and (lacking := _lacking(str(error.name), argv)):
        ours = error.name.startswith("paceline.")  # type: ignore[union-attr]
        what = "a part of Paceline that this needs" if ours else error.name
        return f"{what} is not installed; {install(lacking)}"
    return str(error) if isinstance(error, PacelineError) else out_of_memory(error)


def _lacking(module: str, argv: Sequence[str]) -> str:
    """What brings a module that is not installed; "" for one that no command needs."""
    top = module.split(".")
    what = BROUGHT.get(".".join(top[:2])) or BROUGHT.get(top[0], "")
    own = next(filter(None, (TABLE[name].needs for name in (" ".join(argv[:2]), *argv[:1]) if name in TABLE)), "")
    own = "packages/evals[vision]" if list(argv[:2]) == ["eval", "vision"] else own
    return what if what in OF_ITSELF or not what else own or what


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return interrupt.STATUS


def _forget_output() -> None:
    """Drop what standard output still buffers; Python would try to write it at exit, and complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
