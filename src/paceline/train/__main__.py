"""Command line of the training recipes.

python -m paceline.train --help          the same as `paceline train --help`
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import typer

from paceline.errors import PacelineError, install
from paceline.interrupt import STATUS

SETTINGS: dict[str, Any] = {"rich_markup_mode": "markdown", "pretty_exceptions_enable": False}


def new_app(help: str) -> typer.Typer:
    """A command line without commands; `later` adds them."""
    made = typer.Typer(help=help, no_args_is_help=True, add_completion=False, **SETTINGS)
    made.callback()(_check_extra)
    return made


def _check_extra() -> None:
    # Runs before a recipe is imported, so that the package works without the extra for training.
    if importlib.util.find_spec("accelerate") is None:
        raise PacelineError(f"training needs packages that are not installed; {install('train')}")


RECIPES: dict[str, str] = {}
"""The function of each command, "package.module:function", with annotations for Typer."""


def recipe(name: str) -> Any:
    """The command `name` with its options. Imports its module, and thereby torch."""
    module, _, function = RECIPES[name].partition(":")
    single = typer.Typer(add_completion=False, **SETTINGS)
    run: Callable[..., Any] = getattr(importlib.import_module(module), function)
    single.command(name)(run)
    return typer.main.get_command(single)


app = new_app("Train drafters for a model: draft models, heads, adapters, and what they need.")


def later(name: str, where: str, summary: str, app: typer.Typer = app) -> None:
    """Register a command. Its module is imported when the command runs, not when commands are listed."""
    RECIPES[name] = where

    def command(context: typer.Context) -> None:
        with recipe(name).make_context(context.command_path, context.args) as own:
            if (done := own.command.invoke(own)) is False:
                raise typer.Exit(STATUS)
            raise typer.Exit(0 if done is True else done or 0)

    unread = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, short_help=summary, add_help_option=False, context_settings=unread)(command)


later("draft", "paceline.train.draft:command", "Train a draft model on the target's own answers.")
later("streams", "paceline.train.draft:streams_command", "Train a draft model to propose several tokens a forward.")
later("vocab", "paceline.train.vocab:command", "Count which tokens the target writes, for `vocab=K`.")
later("sorted", "paceline.train.s2d:command", "Cut a draft with several exits from a model's first layers.")
later("noise", "paceline.train.noise:command", "Fine-tune a model with noise, so that it drafts for itself.")
later("kangaroo", "paceline.train.kangaroo:command", "Train an adapter with which a target drafts for itself.")
later("medusa", "paceline.train.heads:medusa_command", "Train Medusa's heads over a target's last state.")
later("hydra", "paceline.train.heads:hydra_command", "Train Hydra's heads, which read the drafted tokens before them.")
later("tree", "paceline.train.measure:command", "Measure heads that came without a tree file, by depth and rank.")
later("amphista", "paceline.train.amphista:command", "Train Amphista's network: heads that see each other.")
later("eagle", "paceline.train.eagle:command", "Train a layer that drafts by predicting the target's next state.")
later("eagle3", "paceline.train.eagle:eagle3_command", "Train a layer that drafts from three states; vLLM reads it.")
later("dflash", "paceline.train.dflash:command", "Train layers that fill a block of tokens in one pass.")
later("mtp", "paceline.train.mtp:command", "Tune a multi-token-prediction head for several steps, or begin one.")
later("vllm", "paceline.train.export:command", "Write Medusa heads in the layout that vLLM reads.")
later("vision", "paceline.cli.eval_vision:train_command", "Tune a dual encoder on size, position, existence, count.")


def main(app: typer.Typer = app) -> None:
    """Run a command line; a mistake of the user is one line and status 2."""
    try:
        app()
    except PacelineError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
