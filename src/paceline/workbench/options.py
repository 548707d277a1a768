"""Options of a command: the fields of the dataclasses that it takes, and parameters whose default is an `option`.

    @app.command()
    @with_options
    def align(asked: Asked, show: bool = option(False, "Print answers too.")) -> int: ...    # --data, ..., --show
"""

import copy
import dataclasses
import functools
import inspect
import shlex
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.jsonl import OUTPUTS, check_apart

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Keys:
    """Whose API key is sent to the servers that are asked; every command has these options that asks servers."""

    GROUP: ClassVar = "API keys"

    api_key_env: str | None = option(
        None, "Environment variable that holds the API key of the servers that are asked. [default: OPENAI_API_KEY, "
        "for https://api.openai.com alone]",
    )
    api_key_file: str | None = option(
        None, "File with the API key of the servers that are asked, on one line.", metavar="FILE"
    )
    key_over_http: bool = option(
        False, "Allow sending the API key to another machine over plain http, where others can read it.",
        names=("--key-over-http",),
    )

    def of(self, spec: str) -> str | None:
        """The key for the servers of "URL[,URL...][#model]", None if there is none for them. Raises PacelineError."""
        from paceline.workbench.client import api_key

        return api_key(spec, self.api_key_env, self.api_key_file, over_http=self.key_over_http)

    @property
    def words(self) -> str:
        """The options as they were given, for a command that is shown."""
        given = {"--api-key-env": self.api_key_env, "--api-key-file": self.api_key_file}
        flags = "".join(f" {name} {shlex.quote(value)}" for name, value in given.items() if value)
        return flags + " --key-over-http" * self.key_over_http


def check_server(spec: str, keys: Keys) -> None:
    """PacelineError unless "URL[,URL...][#model]" has addresses, and there is the key that is to be sent to them."""
    from paceline.workbench.client import parse
    from paceline.workbench.endpoint import check_addresses

    check_addresses(parse(spec)[0])
    keys.of(spec)


def with_options(command: Callable[..., T]) -> Callable[..., T]:
    """`command` as Typer takes it: a parameter whose type is a dataclass becomes the options of its fields.

    What the command writes is apart from what it reads, or PacelineError: see `jsonl.check_apart`."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if dataclasses.is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            parameters += options_of(parameter.annotation)
        elif isinstance(parameter.default, dataclasses.Field):
            parameters.append(_parameter(name, parameter.default, parameter.annotation))
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    names = {parameter.name: _shown(parameter) for parameter in parameters}
    outputs = {p.name for p in parameters if any(getattr(one, "callback", None) in OUTPUTS for one in _infos(p))}

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


def _infos(parameter: inspect.Parameter) -> Any:
    return getattr(parameter.annotation, "__metadata__", ())


def _shown(parameter: inspect.Parameter) -> str:
    """How users know a parameter: --name, or an argument's word."""
    for info in _infos(parameter):
        if isinstance(info, ArgumentInfo):
            return str(info.metavar or parameter.name.upper())
        # Typer keeps the first name of an annotated option as its default.
        if long := [name for name in (info.default, *(info.param_decls or ())) if str(name).startswith("--")]:
            return str(long[0])
    return f"--{parameter.name.replace('_', '-')}"


def options_of(group: Any) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters of a command.

    Options are fields made by `draft.spec.option`, those whose type is Annotated for Typer, and such fields of a
    dataclass within the dataclass. GROUP of a dataclass names the group of the help that its options stand in. What
    `option` was given goes to `typer.Option`; `names` are the option's names."""
    panel = getattr(group, "GROUP", None)
    found: list[inspect.Parameter] = []
    for field, hint in _options(group):
        found += options_of(hint) if dataclasses.is_dataclass(hint) else [_parameter(field.name, field, hint, panel)]
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
    if "help" in field.metadata:
        settings: dict[str, Any] = {"min": field.metadata.get("least"), "max": field.metadata.get("most")}
        settings |= {key: value for key, value in field.metadata.items() if key not in ("least", "most", "in_front")}
        hint = Annotated[hint, typer.Option(*settings.pop("names", ()), **settings)]
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    if panel is not None and hasattr(hint, "__metadata__"):
        infos = tuple(copy.copy(info) for info in hint.__metadata__)
        for info in infos:
            info.rich_help_panel = panel
        hint = Annotated[(hint.__origin__, *infos)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def checked(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """The callback of an option that `check` refuses with a PacelineError: each of its values, if it is given."""

    def callback(value: Any) -> Any:
        for one in value if isinstance(value, list | tuple) else () if value is None else (value,):
            check(one)
        return value

    return callback


def listed(text: str | None) -> list[str]:
    """The words that a text joins by commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def listed_numbers(text: str, name: str) -> list[int]:
    """The whole numbers that an option's text joins by commas, ascending. PacelineError if it says anything else."""
    words = listed(text)
    if not words or not all(word.isdecimal() and 1 <= int(word) <= 1024 for word in words):
        raise PacelineError(f"{name} is {text!r}; give whole numbers from 1 to 1024, joined by commas: 1,8,32")
    return sorted({*map(int, words)})


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
            param.show_envvar = False  # every option has one, by its name
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

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)


class _Commands(TyperGroup):
    """A command with commands of its own."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def app_of(**more: Any) -> typer.Typer:
    """A command line without commands, in plain text."""
    return typer.Typer(cls=_Commands, rich_markup_mode=None, pretty_exceptions_enable=False, **more)
