"""What all commands have in common: settings from a file, and names that changed.

    paceline serve smollm2 --config paceline.toml          # [serve]  draft = "sam"  max-batch = 8
    PACELINE_SERVE_MAX_BATCH=8 paceline serve smollm2      # every option has such a variable
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from paceline.errors import PacelineError, meant

COMMANDS = {
    "train draft": "train model",
    "train sorted": "train s2d",
    "train noise": "train jacobi",
    "train vocab": "train tools vocab",
    "train tree": "train tools tree",
    "train vllm": "export vllm",
    "train vision": "eval vision train",
    "eval vision report": "report",
}
"""Commands that have another name now. The old one works for a version."""
OPTIONS = {
    "generate": {"--batch": "--batch-size", "--out": "--output"},
    "bench": {"--batch": "--batch-size", "--endpoint": "--server"},
    "certify": {"--batch": "--batch-size", "--endpoint": "--server"},
    "tune": {"--batches": "--batch-sizes", "--traffic": "--log"},
    "quality": {"--tokens": "--max-tokens"},
    "report": {"--out": "--output"},
}
"""Options that have another name now, by command."""
GROUPED = ("eval vision", "train tools", "eval", "train", "corpus", "export")  # commands with commands of their own


def path_of(argv: Sequence[str]) -> list[str]:
    """The words of `argv` that name the command: one, two or three."""
    path: list[str] = []
    for word in argv:
        if word.startswith("-") or (path and " ".join(path) not in GROUPED):
            break
        path.append(word)
    return path


def modern(argv: Sequence[str]) -> list[str]:
    """`argv` with today's names for old ones, and a line on standard error for each."""
    words = list(argv)
    path = " ".join(path_of(words))
    if path in COMMANDS:
        _say(f"paceline {path}", f"paceline {COMMANDS[path]}")
        words[: len(path.split())] = COMMANDS[path].split()
        path = COMMANDS[path]
    renamed = OPTIONS.get(path, {})
    for i, word in enumerate(words):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name in renamed:
            _say(name, renamed[name])
            words[i] = renamed[name] + equals + value
    return words


def _say(old: str, new: str) -> None:
    print(f"note: {old} is called {new} now", file=sys.stderr)


def configured(argv: Sequence[str], command: Any) -> tuple[list[str], dict[str, Any]]:
    """`argv` without --config FILE, and the settings of that file as Click's default_map.

    Raises PacelineError for a file that cannot be read, and for a setting that no command has."""
    words, file = list(argv), ""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--config":
            file = value if equals else next(iter(words[i + 1 : i + 2]), "")
            del words[i : i + (1 if equals else 2)]
            if not file:
                raise PacelineError("--config needs a file: --config paceline.toml")
            break
        if word == "--":
            break
    return words, (_settings(file, command) if file else {})


def _settings(file: str, command: Any) -> dict[str, Any]:
    try:
        given = tomllib.loads(Path(file).expanduser().read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PacelineError(f"the settings in {file} cannot be read: {error}") from None
    return _named(given, command, file, "")


def _named(given: Mapping[str, Any], command: Any, file: str, where: str) -> dict[str, Any]:
    """Settings by the names of parameters, of a command or of the commands in a group."""
    if isinstance(command, TyperGroup):
        known = {name: name for name in command.commands}
    else:
        spelt = ((name, param.name) for param in command.params for name in param.opts)
        known = {option.lstrip("-"): name for option, name in spelt if not option.startswith("-") or len(option) > 2}
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            inside = f"[{where}] of {file}" if where else file
            kinds = "commands" if isinstance(command, TyperGroup) else "settings"
            raise PacelineError(f"{inside} has {name!r}.{meant(name, known)} Its {kinds}: {', '.join(sorted(known))}")
        if isinstance(command, TyperGroup):
            if not isinstance(value, dict):
                raise PacelineError(f"{name} in {file} must be a table of settings, [{name}]")
            value = _named(value, command.commands[name], file, f"{where}.{name}" if where else name)
        settings[known[name]] = value
    return settings
