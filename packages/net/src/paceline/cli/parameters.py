"""Options of a command: the fields of the dataclasses that it takes, and parameters whose default is an `option`.

    @app.command()
    @with_options
    def align(asked: Asked, show: bool = option(False, "Print answers too.")) -> int: ...    # --data, ..., --show
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from paceline.outputs import OUTPUTS, check_apart

T = TypeVar("T")


def with_options(command: Callable[..., T]) -> Callable[..., T]:
    """`command` as Typer takes it: a parameter whose type is a dataclass becomes the options of its fields.

    What the command writes is apart from what it reads, or PacelineError: see `outputs.check_apart`."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if dataclasses.is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            parameters += options_of(parameter.annotation)
        elif isinstance(parameter.default, dataclasses.Field):
            parameters.append(_parameter(name, parameter.default, parameter.annotation))
        else:
            hint = _typed(parameter.annotation)
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint))

    names = {parameter.name: _shown(parameter) for parameter in parameters}
    outputs = {p.name for p in parameters if any(one.callback in OUTPUTS for one in _infos(p.annotation))}

    @functools.wraps(command)
    def generated(**values: Any) -> T:
        check_apart(
            {names[name]: values[name] for name in outputs},
            {names[name]: value for name, value in values.items() if name in names and name not in outputs},
        )
        return command(**{name: _filled(group, values) for name, group in groups.items()}, **values)

    generated.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    generated.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return generated


def _infos(hint: Any) -> Any:
    return getattr(hint, "__metadata__", ())


def _shown(parameter: inspect.Parameter) -> str:
    """How users know a parameter: --name, or an argument's word."""
    for info in _infos(parameter.annotation):
        if isinstance(info, ArgumentInfo):
            return str(info.metavar or parameter.name.upper())
        # Typer keeps the first name of an annotated option as its default.
        if long := [name for name in (info.default, *(info.param_decls or ())) if str(name).startswith("--")]:
            return str(long[0])
    return f"--{parameter.name.replace('_', '-')}"


def options_of(group: Any) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters of a command.

    Options are fields made by `draft.spec.option`, those whose type is Annotated, and such fields of a dataclass
    within the dataclass. GROUP of the class that declares a field names the group of the help that its option stands
    in, unless it has a `group` of its own. What `option` was given goes to `typer.Option`; `names` are the option's
    names, and argument=True makes an argument."""
    found: list[inspect.Parameter] = []
    for field, hint in _options(group):
        if dataclasses.is_dataclass(hint):
            found += options_of(hint)
        else:
            declares = next(one for one in group.__mro__ if field.name in inspect.get_annotations(one))
            found.append(_parameter(field.name, field, hint, declares.__dict__.get("GROUP")))
    return found


def _options(group: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """The fields of a dataclass that are options, or dataclasses of options, with their types."""
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        hint = hints[field.name]
        is_option = "help" in field.metadata or hasattr(hint, "__metadata__")
        if is_option or (dataclasses.is_dataclass(hint) and next(_options(hint), None)):
            yield field, hint


def _parameter(name: str, field: dataclasses.Field[Any], hint: Any, panel: str | None = None) -> inspect.Parameter:
    """panel: the group of the help that the option stands in."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    hint = Annotated[hint, field] if "help" in field.metadata else hint
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_typed(hint, panel))


def _typed(hint: Any, panel: str | None = None) -> Any:
    """`hint` as Typer reads it, with an option of Typer's for each of ours that it is annotated with."""
    infos = [_info(one.metadata) if isinstance(one, dataclasses.Field) else copy.copy(one) for one in _infos(hint)]
    for info in infos if panel else ():
        info.rich_help_panel = info.rich_help_panel or panel
    return Annotated[(hint.__origin__, *infos)] if infos else hint


def _info(metadata: Mapping[str, Any]) -> Any:
    settings: dict[str, Any] = {"min": metadata.get("least"), "max": metadata.get("most")}
    settings["rich_help_panel"] = metadata.get("group")
    ours = ("least", "most", "in_front", "argument", "group")
    settings |= {key: value for key, value in metadata.items() if key not in ours}
    return (typer.Argument if metadata.get("argument") else typer.Option)(*settings.pop("names", ()), **settings)


def _filled(group: Any, values: dict[str, Any]) -> Any:
    """The dataclass with the options that a command was given; they are taken out of `values`."""
    known = {field.name: hint for field, hint in _options(group)}
    nested = {name: _filled(hint, values) for name, hint in known.items() if dataclasses.is_dataclass(hint)}
    return group(**nested, **{name: values.pop(name) for name in known if name not in nested})


def _format_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Arguments, options, and those of each dataclass with a GROUP, each under its title."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        if not getattr(param, "envvar", True):
            param.show_envvar = False  # Every option has a variable by its name.
        if (record := param.get_help_record(ctx)) is not None:
            is_argument = param.param_type_name == "argument"
            panel = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
            sections.setdefault(panel, []).append(record)
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


class Grouped(TyperCommand):
    """A command whose help shows its options in groups."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """A context, with one prefix of variables for commands of one word and of two."""
        if parent is not None and parent.auto_envvar_prefix and info_name:
            extra.setdefault("auto_envvar_prefix", f"{parent.auto_envvar_prefix} {info_name}".replace(" ", "_"))
        return super().make_context(info_name, args, parent, **extra)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)


class Words(TyperGroup):
    """A command with commands of its own, whose names may have two words: `bench server` beside `bench`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        pair = " ".join(args[:2])
        return super().resolve_command(ctx, [pair, *args[2:]] if pair in self.commands else args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def app_of(**more: Any) -> typer.Typer:
    """A command line without commands, in plain text."""
    return typer.Typer(**{"cls": Words, "rich_markup_mode": None, "pretty_exceptions_enable": False} | more)
