"""Commands whose options are known only to the module that runs them: it is imported when they run, with torch."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import typer
from typer.models import ArgumentInfo

from paceline.cli.parameters import Grouped, app_of, options_of, with_options
from paceline.formats.place import check_place
from paceline.interrupt import STATUS

UNREAD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def recipe(where: str, ends: str | None = None) -> Any:
    """The command whose function is "package.module:function", with options as in `with_options`. Imports its module,
    and thereby torch.

    ends  the end of its help."""
    module, _, function = where.partition(":")
    single = app_of(add_completion=False)
    run: Callable[..., Any] = getattr(importlib.import_module(module), function)
    single.command(cls=Grouped, epilog=ends)(with_options(run))
    return typer.main.get_command(single)


def later(name: str, where: str, summary: str, app: typer.Typer, shared: Any = None, ends: str | None = None) -> None:
    """Register a command. Its module is imported when the command runs, not when commands are listed.

    shared  a dataclass with options that it has in common with others, which are checked before that.
    ends    the end of its help."""

    def command(context: typer.Context) -> None:
        settings = {"default_map": context.default_map, "auto_envvar_prefix": context.auto_envvar_prefix}
        if shared is not None and "--help" not in context.args:
            if not [*context.args, "-"][0].startswith("-"):
                check_place(context.args[0])
            _check_shared(shared, context, **settings)
        with recipe(where, ends).make_context(context.command_path, context.args, **settings) as own:
            if (done := own.command.invoke(own)) is False:
                raise typer.Exit(STATUS)
            raise typer.Exit(0 if done is True else done or 0)

    app.command(name, short_help=summary, add_help_option=False, context_settings=UNREAD)(command)


def _check_shared(group: Any, context: typer.Context, **settings: Any) -> None:
    """Raise PacelineError, or Click's error, for wrong options of the dataclass.
    Other options and arguments are not read."""
    options = [one for one in options_of(group) if not isinstance(one.annotation.__metadata__[0], ArgumentInfo)]

    def check(**values: Any) -> None:
        group(**{field.name: values.get(field.name) for field in dataclasses.fields(group)})

    check.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    check.__annotations__ = {one.name: one.annotation for one in options}
    alone = app_of(add_completion=False)
    alone.command(add_help_option=False, context_settings=UNREAD)(check)
    command = typer.main.get_command(alone)
    with command.make_context(context.command_path, [*context.args], **settings) as own:
        command.invoke(own)
