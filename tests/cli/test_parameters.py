"""Commands whose options are the fields of dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.parameters import with_options
from paceline.draft.spec import option


@dataclass(frozen=True)
class Sampling:
    max_tokens: int = option(42, "Most new tokens.", least=1, names=("--max-tokens", "-n"))
    seed: int | None = option(None, "Makes sampling reproducible.")


@dataclass(frozen=True)
class Asked:
    model: str = option(help="A folder.")
    sampling: Sampling = field(default_factory=Sampling)
    mode: Literal["joint", "single"] = option("joint", "How.")
    rate: Annotated[float, typer.Option(help="Of learning.", max=1)] = 0.5
    judge: list[str] = field(default_factory=list, metadata={"help": "May be repeated."})
    inner: str = "no option"


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command()
    @with_options
    def command(asked: Asked, out: Annotated[Path, typer.Option(help="Folder.")] = Path("runs")) -> None:
        """Does it."""
        print(repr(asked), out)

    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output


@pytest.mark.parametrize(("arguments", "wanted", "out"), [
    (["--model", "m"], Asked("m"), "runs"),
    (["--model", "m", "-n", "7", "--seed", "1"], Asked("m", Sampling(7, 1)), "runs"),
    (["--model", "m", "--judge", "a", "--judge", "b", "--out", "o"], Asked("m", judge=["a", "b"]), "o"),
    (["--model", "m", "--mode", "single", "--rate", "0.1"], Asked("m", mode="single", rate=0.1), "runs"),
])
def test_fields_are_filled_from_options(arguments: list[str], wanted: Asked, out: str) -> None:
    assert run(*arguments) == (0, f"{wanted!r} {out}\n")


@pytest.mark.parametrize(("arguments", "says"), [
    ([], "--model"), (["--model", "m", "-n", "0"], "greater than or equal to 1"),
    (["--model", "m", "--mode", "other"], "single"), (["--model", "m", "--rate", "2"], "less than or equal to 1"),
    (["--model", "m", "--inner", "x"], "--inner"),
])
def test_what_no_field_takes_is_refused(arguments: list[str], says: str) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert says in output


def test_help_is_that_of_the_fields() -> None:
    _, output = run("--help")
    words = " ".join(output.split())
    assert "Does it." in words
    assert "-n, --max-tokens" in words
    assert "Most new tokens. [default: 42; x>=1]" in words


Rate = Annotated[float, option(help="Of learning.", least=0, most=1)]


@dataclass(frozen=True)
class Trained:
    """As a recipe declares its options, without Typer."""

    target: Annotated[str, option(help="A model.", argument=True)]
    rate: Rate = 0.5


@pytest.mark.parametrize(("arguments", "says"), [
    (["m", "--out", "o"], "m 0.5 o None"), (["m", "f", "--out", "o", "--rate", "1"], "m 1.0 o f"),
    (["--out", "o"], "Missing argument"), (["m"], "--out"),
    (["m", "--out", "o", "--rate", "2"], "less than or equal to 1"),
])  # fmt: skip
def test_a_function_of_dataclasses_becomes_a_command(arguments: list[str], says: str) -> None:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command()
    @with_options
    def command(
        asked: Trained, out: Annotated[Path, option(help="Folder.")],
        file: Path | None = option(None, "A file.", argument=True),
    ) -> None:  # fmt: skip
        print(asked.target, asked.rate, out, file)

    assert says in CliRunner().invoke(app, arguments).output
