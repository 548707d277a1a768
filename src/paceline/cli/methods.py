"""`paceline methods`: list the values of --draft."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli import options
from paceline.cli.parameters import with_options
from paceline.cli.show import plain_table, say
from paceline.draft.spec import option

if TYPE_CHECKING:
    from paceline.draft.registry import MethodInfo


@with_options
def methods(
    name: Annotated[str | None, typer.Argument(help="Method to show in full.")] = None,
    as_json: options.AsJson = False,
    as_markdown: bool = option(False, "Print the table of docs/methods/README.md.", names=("--markdown",)),
) -> int:
    """List the drafting methods, or show one with its options.

    \b
    paceline methods
    paceline methods sam
    paceline generate smollm2 "Hello" --draft sam,draft=20+prompt-lookup
    """
    from paceline.draft.registry import describe, names

    infos = [describe(each) for each in ([name] if name is not None else names())]
    console = Console(highlight=False)
    if as_json:
        plain = [asdict(info) for info in infos]
        print(json.dumps(plain if name is None else plain[0], indent=2))
    elif as_markdown:
        print("\n".join(_markdown(infos)))
    elif name is None:
        console.print(_overview(infos))
        console.print("One in full: paceline methods NAME", soft_wrap=True)
    else:
        _in_full(console, infos[0])
    return 0


def spelling(info: MethodInfo) -> str:
    """How --draft names the method, without options."""
    return info.name + {"no": "", "optional": "[:PATH]", "required": ":PATH"}[info.checkpoint]


def _markdown(infos: list[MethodInfo]) -> list[str]:
    """The table of docs/methods/README.md."""
    lines = ["| method | lossless | what it drafts | paper |", "|---|---|---|---|"]
    for info in infos:
        name = f"[`{spelling(info)}`]({info.name}.md)"
        lines.append(f"| {name} | {info.lossless} | {info.summary} | {info.paper} |".replace("| - |", "| |"))
    return lines


def _overview(infos: list[MethodInfo]) -> Table:
    table = plain_table("method", "lossless", "what it drafts", text=("what it drafts",), left=True)
    for info in infos:
        table.add_row(spelling(info).replace("[", "\\["), info.lossless, info.summary)
    return table


def _in_full(console: Console, info: MethodInfo) -> None:
    say(f"{spelling(info)}: {info.summary}", f"lossless: {info.lossless}", f"paper: {info.paper}")
    if not info.options:
        console.print("It has no options.")
        return
    table = plain_table("option", "type", "default", "meaning", text=("type", "default", "meaning"), left=True)
    for one in info.options:
        kind = one.type.replace("choice", ", ".join(map(str, one.choices)))
        in_front = "" if one.in_front is None else f" ({one.in_front} before a +)"
        table.add_row(one.name, kind, f"{one.default}{in_front}", one.help)
    console.print(table)
