"""Weights by one command: the steps of a TOML file, which are commands of their own.

    python -m zoo make zoo/zoo.toml --out models --work build/zoo --dry-run

A step that is done is skipped; an interrupted one goes on when it runs again. `zoo.toml` makes the demo family,
`smollm2.toml` the drafters of a real model."""

import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.errors import PacelineError


@dataclass(frozen=True)
class Step:
    """A command of the module `words[0]`, and the file that it writes last.

    processes: it can use several; threads: it gets threads instead."""

    name: str
    words: tuple[str, ...]
    done: Path
    processes: bool = False
    threads: bool = False

    def command(self, count: int) -> list[str]:
        """With so many processes or threads."""
        several, (module, *words) = count > 1, self.words
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        more = ["--threads", str(count)] if several and self.threads else []
        return [sys.executable, *(launcher if several and self.processes else []), "-m", module, *words, *more]


def read_steps(path: Path, out: Path, work: Path, scale: float = 1.0) -> list[Step]:
    """The steps of a TOML file, in order. scale: multiplies the numbers of every step.

    In braces stand {out}, {work}, the step's numbers, and any text of the file's top level. A table or list of files is
    named in capitals: SOURCES is every NAME=FILE of [sources], SOURCES:a,b those of these names (all if it has none of
    them), and --option=SOURCES repeats the option. Files are relative to the TOML file, unless they begin in braces or
    are on the hub (hf:...). PacelineError for a file that is no plan."""
    try:
        plan: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
        places = {"out": str(out), "work": str(work)}
        texts = {name: value.format(**places) for name, value in plan.items() if isinstance(value, str)} | places
        files = {
            name.upper(): list(_files(path, value, texts))
            for name, value in plan.items()
            if name != "steps" and isinstance(value, dict | list)
        }
        return [_step(step, texts, files, scale) for step in plan["steps"]]
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise PacelineError(f"{path} cannot be read: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise PacelineError(f"{path} is no plan of steps ({error}): see zoo/zoo.toml") from None


def _step(step: dict[str, Any], texts: Mapping[str, str], files: Mapping[str, list[str]], scale: float) -> Step:
    texts = {**texts, **{name: str(max(int(n * scale), 1)) for name, n in step.items() if type(n) is int}}
    words = [part for word in shlex.split(step["run"].format(**texts)) for part in _named(word, files)]
    done = Path(step["done"].format(**texts))
    return Step(step["name"], tuple(words), done, step.get("processes", False), step.get("threads", False))


def _named(word: str, files: Mapping[str, list[str]]) -> list[str]:
    """A word, or what a name in capitals stands for."""
    option, _, name = word.rpartition("=")
    table, _, some = name.partition(":")
    if table not in files:
        return [word]
    chosen = [file for file in files[table] if not some or file.split("=")[0] in some.split(",")] or files[table]
    return [part for file in chosen for part in ([option, file] if option else [file])]


def _files(path: Path, table: Mapping[str, Any] | Sequence[str], texts: Mapping[str, str]) -> Iterator[str]:
    """NAME=FILE of a table, FILE of a list."""
    named = table.items() if isinstance(table, Mapping) else (("", file) for file in table)
    for name, some in named:
        for file in [some] if isinstance(some, str) else some:
            as_it_is = file.startswith(("hf:", "{"))
            place = file.format(**texts) if as_it_is else path.parent / Path(file).expanduser()
            yield f"{name}={place}" if name else str(place)


def run(steps: Sequence[Step], count: int = 1, dry_run: bool = False) -> int:
    """Run what is not done yet; the exit status of the first step that fails, or 0."""
    console = Console(stderr=True)
    for step in steps:
        if step.done.exists():
            console.print(f"[dim]{step.name}: done ({step.done})", highlight=False)
            continue
        command = step.command(count)
        console.print(f"[bold]{step.name}[/bold]: {shlex.join(command)}", highlight=False, soft_wrap=True)
        if not dry_run and (status := subprocess.call(command)):
            console.print(f"{step.name} ended with status {status}; the same command goes on from there")
            return status
    return 0
