"""`paceline report`: a benchmark's folder as a page, a Markdown table or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import PacelineError

PAGE = "report.html"


def report(
    folder: Annotated[Path, typer.Argument(help="What paceline bench --out wrote.", metavar="DIR")],
    out: Annotated[Path | None, typer.Option(help=f"Where to write the page. [default: DIR/{PAGE}]")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a README instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object instead.")] = False,
) -> None:
    """Make a page of a benchmark: speed-ups, accepted tokens, time by part, answers in colour, all in one file.

    The page loads nothing from anywhere. A run that is not finished can be shown too.

    \b
    paceline report runs/demo
    paceline report runs/demo --out report.html
    paceline report runs/demo --markdown >> README.md
    """
    from paceline.pages.bench import markdown as table
    from paceline.pages.bench import page, read_run

    if markdown + as_json + (out is not None) > 1:
        raise PacelineError("--out is for the page, --markdown and --json print something else: choose one")
    run = read_run(folder)
    if as_json:
        print(json.dumps(run.summary, indent=2))
    elif markdown:
        print(table(run), end="")
    else:
        file = out if out is not None else folder / PAGE
        _write(file, page(run))
        print(f"wrote {file}")


def _write(file: Path, text: str) -> None:
    """A whole page or none."""
    draft = file.with_name(file.name + ".part")
    try:
        draft.write_text(text, "utf-8")
        draft.replace(file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise PacelineError(f"{file} cannot be written: {error.strerror}") from error
