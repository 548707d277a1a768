"""Command line of the training recipes.

python -m paceline.train --help          the same as `paceline train --help`
"""

import importlib.util
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from paceline.errors import PacelineError, install
from paceline.interrupt import STATUS

SETTINGS: dict[str, Any] = {"rich_markup_mode": "markdown", "pretty_exceptions_enable": False}


def new_app(help: str) -> typer.Typer:
    """A command line without commands; `later` adds them."""
    return typer.Typer(help=help, no_args_is_help=True, add_completion=False, **SETTINGS)


RECIPES: dict[str, str] = {}
"""The function of each command, "package.module:function", with annotations for Typer."""


def recipe(name: str) -> Any:
    """The command `name` with its options. Imports its module, and thereby torch."""
    module, _, function = RECIPES[name].partition(":")
    single = typer.Typer(add_completion=False, **SETTINGS)
    run: Callable[..., Any] = getattr(importlib.import_module(module), function)
    single.command(name)(run)
    return typer.main.get_command(single)


app = new_app(
    "Train drafters for a model: draft models, heads, adapters, and what they need. pip install '.[train]' in a "
    "checkout brings the packages for that, '.[vision]' those for `vision`."
)


def later(name: str, where: str, summary: str, app: typer.Typer = app) -> None:
    """Register a command. Its module is imported when the command runs, not when commands are listed."""
    RECIPES[name] = where

    def command(context: typer.Context) -> None:
        # Before an answer is generated; --help needs no extra.
        if "--help" not in context.args and name != "vision" and importlib.util.find_spec("accelerate") is None:
            raise PacelineError(f"training needs packages that are not installed; {install('train')}")
        with recipe(name).make_context(context.command_path, context.args) as own:
            if (done := own.command.invoke(own)) is False:
                raise typer.Exit(STATUS)
            raise typer.Exit(0 if done is True else done or 0)

    unread = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, short_help=summary, add_help_option=False, context_settings=unread)(command)


for name, (where, summary) in tomllib.loads(Path(__file__).with_name("recipes.toml").read_text("utf-8")).items():
    later(name, where, summary)


def main(app: typer.Typer = app) -> None:
    """Run a command line; a mistake of the user is one line and status 2."""
    try:
        app()
    except PacelineError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
