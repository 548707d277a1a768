"""`paceline report`: the folder of a benchmark or of an evaluation as a page, a Markdown table or JSON."""

import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import PacelineError
from paceline.jsonl import PAGE, check_file, write_whole, writes
from paceline.workbench.options import with_options
from paceline.workbench.runs import is_run

NAME = "report.html"


@with_options
def report(
    folder: Annotated[Path, typer.Argument(help="What paceline bench or eval wrote to --out.", metavar="DIR")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help=f"Where to write the page. [default: DIR/{NAME}]", callback=writes(PAGE)),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a README instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object instead.")] = False,
) -> None:
    """Make a page of a benchmark: speed-ups, accepted tokens, time by part, answers in colour, all in one file.
    Or of an evaluation: its figures with intervals, verdicts by rule, what it cost, answers to read.

    The page loads nothing from anywhere. A run that is not finished can be shown too.

    \b
    paceline report runs/demo
    paceline report runs/demo --output report.html
    paceline report runs/demo --markdown >> README.md
    """
    if markdown + as_json + (output is not None) > 1:
        raise PacelineError("--output is for the page, --markdown and --json print something else: choose one")
    made: tuple[Callable[[Any], Any], ...]
    if is_run(folder, "align"):
        from paceline.evals.align import page

        run: Any = folder
        made = page.summary, page.markdown, page.page
    else:
        from paceline.bench import page as pages
        from paceline.bench import report as reports

        run = reports.read_run(folder)
        made = attrgetter("summary"), reports.markdown, pages.page
    figures, table, html = made
    if as_json:
        print(json.dumps(figures(run), indent=2))
    elif markdown:
        print(table(run), end="")
    else:
        file = output if output is not None else folder / NAME
        check_file(file, PAGE)
        write_whole(file, html(run))
        print(f"wrote {file}")
