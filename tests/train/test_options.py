"""Groups of options on a command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer.testing import CliRunner

from paceline.train.options import with_options


@dataclass(kw_only=True)
class Places:
    source: Annotated[Path, typer.Argument(help="Where from.")]
    out: Annotated[Path, typer.Option("--to", help="Where to.")]
    often: int = 2


def test_the_fields_of_a_group_are_options_and_false_is_an_interruption() -> None:
    calls: list[tuple[Places, float]] = []

    @with_options
    def command(places: Places, rate: Annotated[float, typer.Option(help="How fast.")] = 0.5) -> bool:
        """Copy files."""
        calls.append((places, rate))
        return rate < 1

    app = typer.Typer()
    app.command()(command)
    run = CliRunner().invoke
    assert run(app, ["a", "--to", "b"]).exit_code == 0
    assert run(app, ["a", "--to", "b", "--often", "3", "--rate", "7"]).exit_code == 130
    first, second = Places(source=Path("a"), out=Path("b")), Places(source=Path("a"), out=Path("b"), often=3)
    assert calls == [(first, 0.5), (second, 7.0)]
    assert run(app, ["a"]).exit_code == 2  # --to is missing
    shown = run(app, ["--help"]).output
    assert all(text in shown for text in ("Copy files.", "Where from.", "--to", "--often", "How fast."))
