"""`paceline report`: a benchmark's folder as a page, a Markdown table or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import PacelineError
from paceline.records import write_whole

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
    from paceline.pages.bench import page
    from paceline.pages.bench_run import read_run
    from paceline.pages.markdown import markdown as table

    if markdown + as_json + (out is not None) > 1:
        raise PacelineError("--out is for the page, --markdown and --json print something else: choose one")
    run = read_run(folder)
    if as_json:
        print(json.dumps(run.summary, indent=2))
    elif markdown:
        print(table(run), end="")
    else:
        file = out if out is not None else folder / PAGE
        write_whole(file, page(run))
        print(f"wrote {file}")
