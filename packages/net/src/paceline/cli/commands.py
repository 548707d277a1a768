"""The commands: which there are, where each comes from, and how to install those that are not here.

A command is an entry point of the group `paceline.commands` of the distribution that brings it:

    "bench.server" = "paceline.cli.bench:servers"      # a dot stands for a space: `paceline bench server`

Its function, or its Typer app, is imported when the command runs or its own help is asked for. `commands.toml` says
what our commands do, so that help imports none of them, and names those that are not installed."""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

import typer

from paceline.cli.parameters import Grouped, Words, app_of
from paceline.errors import PacelineError, install

GROUP = "paceline.commands"


class Command(NamedTuple):
    """What is known of a command before it is imported.

    package  where in a checkout the distribution lies that brings it; needs: the same with an extra, if that brings
             packages that the command needs."""

    help: str
    package: str = "."
    needs: str = ""

    @property
    def place(self) -> str:
        """What brings it with all that it needs."""
        return self.needs or self.package


TABLE = {
    name: Command(**facts)
    for name, facts in tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8")).items()
}


class Commands(Mapping[str, Any]):
    """The commands by name, ours first. One that is looked up is imported; PacelineError for one of ours that is not
    installed."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    @cached_property
    def entries(self) -> dict[str, EntryPoint]:
        """Where commands that are installed come from. Of two with one name ours counts, or else the first."""
        found = sorted(entry_points(group=GROUP), key=lambda entry: not entry.value.startswith("paceline."))
        return {entry.name.replace(".", " "): entry for entry in reversed(found)}

    def __iter__(self) -> Iterator[str]:
        yield from TABLE
        yield from sorted(self.entries.keys() - TABLE.keys())

    def __len__(self) -> int:
        return len(TABLE.keys() | self.entries.keys())

    def __contains__(self, name: object) -> bool:
        return name in TABLE or name in self.entries

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            if name not in self:
                raise KeyError(name)
            if name not in self.entries:
                raise PacelineError(f"paceline {name} is not installed; {install(TABLE[name].place)}")
            self._made[name] = _made(name, self._brought(name))
        return self._made[name]

    def _brought(self, name: str) -> Any:
        """What an entry point names. PacelineError if it is not ours and cannot be imported."""
        entry = self.entries[name]
        try:
            return entry.load()
        except (ImportError, AttributeError) as error:
            if name in TABLE:
                raise
            raise PacelineError(f"paceline {name} ({entry.value}) cannot be imported: {error}") from error

    def help(self, name: str) -> str:
        """What a command does, in a line."""
        if name in TABLE:
            return TABLE[name].help
        of = self.entries[name].dist
        return f"Of {of.name}." if of is not None else ""

    def absent(self) -> dict[str, list[str]]:
        """The commands that are not installed, by what brings them."""
        found: dict[str, list[str]] = {}
        for name in TABLE.keys() - self.entries.keys():
            found.setdefault(TABLE[name].place, []).append(name)
        return {place: sorted(names) for place, names in sorted(found.items())}


def _made(name: str, brought: Any) -> Any:
    """The command of a function or a Typer app."""
    if isinstance(brought, typer.Typer):
        made: Any = typer.main.get_group(brought)
        made.name = name
        return made
    known = TABLE.get(name)
    ends = f"{install(known.needs)} brings the packages that this needs." if known and known.needs else None
    alone = app_of(add_completion=False)
    kind = getattr(brought, "command_class", Grouped)
    alone.command(name, cls=kind, short_help=known.help if known else None, epilog=ends)(brought)
    return typer.main.get_command(alone)


class Root(Words):
    """`paceline` itself. Its help names every command, and imports none."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.commands: Any = Commands()

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Without the examples of what is not installed."""
        text = self.help
        self.help = "\n".join(line for line in (text or "").split("\n") if self._is_here(line.split()))
        super().format_help_text(ctx, formatter)
        self.help = text

    def _is_here(self, words: list[str]) -> bool:
        """Whether a line of help is no example, or one of a command that is installed; a MODEL needs the engine."""
        if words[:1] != ["paceline"]:
            return True
        pair, needs_engine = " ".join(words[1:3]), words[2:3] == ["MODEL"]
        entries = self.commands.entries
        return (pair if pair in TABLE else words[1]) in entries and ("generate" in entries or not needs_engine)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        absent = self.commands.absent()
        missing = {name for names in absent.values() for name in names}
        if there := [(name, self.commands.help(name)) for name in self.commands if name not in missing]:
            with formatter.section("Commands"):
                formatter.write_dl(there)
        for place, names in absent.items():
            with formatter.section(f"Not installed; {install(place)}"):
                formatter.write_text(", ".join(names))
