"""Commands that README, pages and help show: the real parser knows their options, and none lacks an argument."""

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.cli import UsageError, _with_addresses, app
from paceline.cli.generate import told_apart
from paceline.cli.options import SMOLLM2
from paceline.train.__main__ import recipe
from tests.cli.command import WHERE
from tests.paths import REPOSITORY

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
HELP = sorted((REPOSITORY / "src" / "paceline" / "cli").glob("*.py"))
LINE = re.compile(r"^ *(?:\$ |[A-Z_]+=\S+ |echo .*\| )*(?:\S*/)?paceline (.*)$")
"""A line of a block of commands, or of a docstring."""
INLINE = re.compile(r"`paceline ([^`]+)`")
STOPS = {"|", ">", "2>", "&&", "&", "||", "<"}


def shown(file: Path) -> Iterator[tuple[str, bool]]:
    """Commands on a page or in a module, and whether each is a whole line; a name in a sentence may be all there is."""
    text = file.read_text("utf-8").replace("\\\\\n", "\\\n")
    for line in re.sub(r" *\\\n *", " ", text).splitlines():
        if found := LINE.match(line):
            # In help, what a command does stands beside it, without a #.
            yield found[1] if file.suffix == ".md" else found[1].split("  ")[0], True
    if file.suffix == ".md":
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        yield from ((re.sub(r"\s+", " ", command), False) for command in INLINE.findall(text))


def words_of(command: str) -> list[str]:
    """The arguments, up to what belongs to the shell or is left out ("...", "a|b")."""
    words = shlex.split(command, comments=True)
    if "|" in words[0]:
        return []
    ends = [i for i, word in enumerate(words) if word in STOPS or word.endswith(">") or "..." in word]
    words = words[: min(ends, default=len(words))]
    if "--config" in words:  # all commands take it, and it is taken out first
        at = words.index("--config")
        del words[at : at + 2]
    return _with_addresses(words)


@cache
def root() -> Any:
    return typer.main.get_command(app)


def complaint(words: list[str], whole: bool) -> str:
    """What the parser has against a command; nothing of one that it would run."""
    command, path = root(), []
    while True:
        context = command.context_class(command, info_name="paceline")
        try:
            options, rest, _ = command.make_parser(context).parse_args(list(words))
        except UsageError as error:
            return error.message if whole or "requires an argument" not in error.message else ""
        commands = getattr(command, "commands", None)
        if commands is None:
            break
        if not rest:
            return "names no command" if whole and not options else ""
        if rest[0] not in commands:
            return f"no command {rest[0]!r}" if whole or rest[0].islower() else ""
        path.append(rest[0])
        command = recipe(WHERE[tuple(path)]) if tuple(path) in WHERE else commands[rest[0]]
        words = rest[1:]
    if options.get("help") or not whole:
        return ""
    if rest:
        return f"{rest[0]} is one word too many"
    if path == ["generate"] and not options.get("prompts") and not options.get("prompt"):
        options["prompt"] = told_apart(str(options.get("model", "")).replace("MODEL", SMOLLM2), None, None)[1]
    missing = [one.name for one in command.params if one.required and options.get(one.name) in (None, (), [])]
    if path == ["generate"] and not any(options.get(name) for name in ("prompt", "prompts")):
        missing.append("prompt")
    return f"lacks {', '.join(missing)}" if missing else ""


@pytest.mark.parametrize("file", [*PAGES, *HELP], ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_the_commands_shown_are_ones_that_run(file: Path) -> None:
    wrong = {}
    for command, whole in shown(file):
        if why := complaint(words_of(command), whole):
            wrong[command] = why
    assert wrong == {}


def test_a_command_without_its_arguments_is_found() -> None:
    assert complaint(["generate", "MODEL", "--draft", "suffix"], True) == "lacks prompt"
    assert complaint(["replay", "LOG.jsonl"], True) == "lacks tokenizer"
    assert complaint(["train", "kangaroo", "MODEL"], True) == "lacks out"
    assert "--drafft" in complaint(["bench", "MODEL", "--drafft", "sam"], False)
    assert complaint(["bnech"], False) == "no command 'bnech'"
    assert complaint(["bench"], False) == ""


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_the_bodies_that_curl_sends_are_json(file: Path) -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```", file.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    for words in (shlex.split(block, comments=True) for block in blocks if "curl " in block):
        for body in (after for word, after in pairwise(words) if word == "-d" and "..." not in after):
            assert isinstance(json.loads(body), dict)


def test_many_commands_are_found() -> None:
    assert sum(whole for file in PAGES for _, whole in shown(file)) > 150
    assert sum(1 for file in HELP for _ in shown(file)) > 20
