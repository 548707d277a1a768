"""`paceline report`: the folder of a benchmark or of an evaluation as a page, a Markdown table or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import PacelineError
from paceline.jsonl import check_file, write_whole
from paceline.workbench.runs import is_run

PAGE = "report.html"


def report(
    folder: Annotated[Path, typer.Argument(help="What paceline bench or eval wrote to --out.", metavar="DIR")],
    out: Annotated[
        Path | None, typer.Option(help=f"Where to write the page. [default: DIR/{PAGE}]", callback=check_file)
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a README instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object instead.")] = False,
) -> None:
    """Make a page of a benchmark: speed-ups, accepted tokens, time by part, answers in colour, all in one file.
    Or of an evaluation: its figures with intervals, verdicts by rule, what it cost, answers to read.

    The page loads nothing from anywhere. A run that is not finished can be shown too.

    \b
    paceline report runs/demo
    paceline report runs/demo --out report.html
    paceline report runs/demo --markdown >> README.md
    """
    if markdown + as_json + (out is not None) > 1:
        raise PacelineError("--out is for the page, --markdown and --json print something else: choose one")
    if is_run(folder, "align"):
        _of_alignment(folder, out, markdown, as_json)
        return
    from paceline.bench.page import page
    from paceline.bench.report import markdown as table
    from paceline.bench.report import read_run

    run = read_run(folder)
    if as_json:
        print(json.dumps(run.summary, indent=2))
    elif markdown:
        print(table(run), end="")
    else:
        file = out if out is not None else folder / PAGE
        write_whole(file, page(run))
        print(f"wrote {file}")


def _of_alignment(folder: Path, out: Path | None, markdown: bool, as_json: bool) -> None:
    """The same of an alignment run's folder."""
    from paceline.evals.align import page

    if as_json:
        print(json.dumps(page.summary(folder), indent=2))
    elif markdown:
        print(page.markdown(folder), end="")
    else:
        file = out if out is not None else folder / PAGE
        write_whole(file, page.page(folder))
        print(f"wrote {file}")
