"""Shared by all commands: settings from a file, and old names.

    paceline serve smollm2 --config paceline.toml          # [serve]  draft = "sam"  batch = 8
    PACELINE_SERVE_BATCH=8 paceline serve smollm2          # every option has such a variable
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Old(NamedTuple):
    """An option that has a new form; the old one works for a version.

    new    the option's new name; "" if its value became another command's argument, or several joined by commas.
    to     the command that replaces `command`.
    when   a pattern, if only values that match it are old; value: their new form, by the pattern's groups."""

    command: str
    option: str
    new: str = ""
    to: str = ""
    when: str = ".*"
    value: str = r"\g<0>"


SUITES = r"demo|code-edits|spec-bench|humaneval|speed-bench(?:-\d+k)?"  # Suites by name; anything else is a file.
LIMITED = (
    "waiting", "rows-per-key", "connections", "body", "messages", "parts", "prompts", "answers", "stops", "stop-length",
    "stop-ids", "logit-bias", "logprobs", "tools", "schema", "text", "ids", "values",
)  # fmt: skip
"""Limits of a server that had an option each."""
OPTIONS = [
    *(Old(command, "--batch-size", "--batch") for command in ("generate", "bench", "bench schedules", "certify")),
    *(Old(command, "--out", "--output") for command in ("generate", "report")),
    *(Old("bench", option, to="bench server") for option in ("--server", "--endpoint")),
    Old("bench", "--schedule", "--schedule", to="bench schedules"),
    Old("bench server", "--concurrency", "--batch"),
    Old("bench server", "--suite", "--log", when=f"(?!({SUITES})$).*"),
    *(Old("certify", option, to="certify server") for option in ("--server", "--endpoint")),
    Old("certify", "--engine", to="certify server", when="https?://.*"),
    *(Old(command, "--reference", "--against") for command in ("certify", "certify server")),
    Old("certify server", "--batch-size", "--batch"),
    Old("tune", "--server", to="tune server"),
    Old("tune server", "--without", "--against"),
    *(Old(command, old, "--batch") for command in ("tune", "tune server") for old in ("--batch-sizes", "--batches")),
    *(Old(command, "--traffic", "--log") for command in ("tune", "tune server")),
    Old("eval align", "--concurrency", "--batch"),
    Old("quality", "--tokens", "--max-tokens"),
    Old("serve", "--max-batch", "--batch"),
    *(Old("serve", f"--max-{name}", "--limit", value=rf"{name}=\g<0>") for name in LIMITED),
    Old(
        "eval vision run", "--model", "--model", when=r"endpoint:([^,]*)(.*?),model=([^,]*)(.*)", value=r"\1#\3\2\4"
    ),
]  # fmt: skip
"""Options that are said in another way now. Those of `serve` are `launch`'s, too."""
MODEL_OF = {"tune server": "--tokenizer", "certify server": "--against"}
"""For commands that an option made of another: the option that says what that one's argument said."""


def path_of(argv: Sequence[str], group: Any) -> list[str]:
    """The words of `argv` that name a command of `group`, and one that it lacks."""
    commands = getattr(group, "commands", None)
    if not commands or not argv or argv[0].startswith("-"):
        return []
    if " ".join(argv[:2]) in commands:
        return list(argv[:2])
    return [argv[0], *path_of(argv[1:], commands.get(argv[0]))]


def modern(argv: Sequence[str], group: Any) -> list[str]:
    """`argv` with today's names for old ones, and a line on standard error for each."""
    words = list(argv)
    path = " ".join(path_of(words, group))
    if path in COMMANDS:
        _say(f"paceline {path}", f"paceline {COMMANDS[path]}")
        words[: len(path.split())] = COMMANDS[path].split()
    asked = path_of(words, group)
    while (said := _without_one_old(words, group)) is not None:
        words = said
    return words if path_of(words, group) == asked else _with_model(words, group)


def _without_one_old(words: list[str], group: Any) -> list[str] | None:
    """`words` with the first old option said as it is now; None if there is none."""
    path = path_of(words, group)
    command = "serve" if path == ["launch"] else " ".join(path)
    for i in range(len(path), words.index("--") if "--" in words else len(words)):
        name, equals, value = words[i].partition("=")
        if not equals:
            value = " ".join(words[i + 1 : i + 2])
        before, after = words[len(path) : i], words[i + (1 if equals else 2) :]
        for old in OPTIONS:
            if (old.command, old.option) == (command, name) and (found := re.fullmatch(old.when, value)):
                said = found.expand(old.value)
                _say(*_spelt(old, value, said))
                first = [*(old.to.split() or path), *([] if old.new else said.split(","))]
                return [*first, *before, *([old.new, said] if old.new else []), *after]
    return None


def _with_model(words: list[str], group: Any) -> list[str]:
    """The words of a command that an option made of another, whose own argument is an option now."""
    path = path_of(words, group)
    if (option := MODEL_OF.get(" ".join(path))) is not None:
        command = group.commands[" ".join(path)]
        left = command.make_parser(command.context_class(command)).parse_args(words[len(path) :])[1]
        if left:
            words.remove(left[0])
            words[len(path) + 1 : len(path) + 1] = [option, left[0]]
    return words


def _spelt(old: Old, value: str, said: str) -> tuple[str, str]:
    """How an option was said, and how it is."""
    if value != said:
        return f"{old.option} {value}", f"{old.new} {said}"
    return old.option, f"paceline {old.to} {old.new}".strip() if old.to else old.new


def _say(old: str, new: str) -> None:
    print(f"note: {old} is called {new} now", file=sys.stderr)


def configured(argv: Sequence[str], group: Any) -> tuple[list[str], dict[str, Any]]:
    """`argv` in today's names and without --config FILE, and the settings of that file as Click's default_map.

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
    given = _read(file) if file else {}
    path = path_of(words, group)
    old = [*_old_settings(given), *_old_variables()]
    words[len(path) : len(path)] = [f"{option}={value}" for command, option, value in old if command == path]
    return modern(words, group), _named(given, group, file, "")


def _old_settings(given: dict[str, Any]) -> Iterator[tuple[list[str], str, Any]]:
    """The settings of a file whose names are old, with their commands; they are taken out of it."""
    for old in OPTIONS:
        table: Any = given
        for word in old.command.split():
            table = table.get(word, {}) if isinstance(table, dict) else {}
        name = old.option.removeprefix("--")
        given_here = table.get(name) if isinstance(table, dict) else None
        if isinstance(given_here, str | int | float) and re.fullmatch(old.when, str(given_here)):
            yield old.command.split(), old.option, table.pop(name)


def _old_variables() -> Iterator[tuple[list[str], str, str]]:
    """The environment's variables of options whose names are old, with their commands."""
    for old in OPTIONS:
        value = os.environ.get(re.sub("[ -]", "_", f"PACELINE {old.command} {old.option.removeprefix('--')}").upper())
        if value and re.fullmatch(old.when, value):
            yield old.command.split(), old.option, value


def _read(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).expanduser().read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PacelineError(f"the settings in {file} cannot be read: {error}") from None


def _named(given: Mapping[str, Any], command: Any, file: str, where: str) -> dict[str, Any]:
    """Settings by the names of parameters, of a command or of the commands in a group."""
    if isinstance(command, TyperGroup):
        known = {name: name for name in command.commands}
    else:
        spelt = ((name, param.name) for param in command.params for name in param.opts)
        known = {option.lstrip("-"): name for option, name in spelt if not option.startswith("-") or len(option) > 2}
    settings: dict[str, Any] = {}
    for name, value in _flat(given, known):
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


def _flat(given: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The tables of a file by command: the one of `bench server` stands in that of `bench`."""
    for name, value in given.items():
        inner = {f"{name} {part}" for part in value} & known.keys() if isinstance(value, dict) else set()
        yield name, {part: one for part, one in value.items() if f"{name} {part}" not in inner} if inner else value
        yield from ((pair, value[pair.removeprefix(f"{name} ")]) for pair in inner)
