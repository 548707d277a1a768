"""`paceline report`: the folder of a benchmark, a replay, an evaluation or a certificate as a page, a table or JSON."""

import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from paceline.cli.parameters import with_options
from paceline.errors import PacelineError
from paceline.jsonl import loads
from paceline.outputs import PAGE, check_file, write_whole, writes
from paceline.runs.runs import is_run

NAME = "report.html"
CERTIFICATE, REPLAY, VISION = "certificate.json", "replay.json", "report.json"  # A file that tells each kind of folder.


class Pages(NamedTuple):
    """The outputs of a run: page, figures, and a table (None: there is none)."""

    run: Any
    page: Callable[[Any], str]
    figures: Callable[[Any], Any]
    table: Callable[[Any], str] | None = None


@with_options
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that bench, replay, eval or certify wrote to --out; several of `eval vision` are shown "
            "side by side.",
            metavar="DIR...",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help=f"Where to write the page. [default: DIR/{NAME}]", callback=writes(PAGE)),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a README instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object instead.")] = False,
) -> None:
    """Make a page of a benchmark, an evaluation, a replay or a certificate. The page of a benchmark shows speed-ups,
    accepted tokens and time by part. That of an evaluation shows figures with intervals, costs, and answers. The page
    is one file and loads nothing from anywhere. A run that is not finished can be shown too.

    \b
    paceline report runs/demo
    paceline report runs/demo --output report.html
    paceline report runs/demo --markdown >> README.md
    paceline report runs/clip runs/clip-tuned --output both.html
    """
    if markdown + as_json + (output is not None) > 1:
        raise PacelineError("--output is for the page, --markdown and --json print something else: choose one")
    pages = pages_of(folders)
    if as_json:
        print(json.dumps(pages.figures(pages.run), indent=2))
    elif markdown:
        if pages.table is None:
            raise PacelineError(f"{folders[0]} has no table for --markdown; its page and --json have the figures")
        print(pages.table(pages.run), end="")
    else:
        file = output if output is not None else folders[0] / NAME
        check_file(file, PAGE)
        write_whole(file, pages.page(pages.run))
        print(f"wrote {file}")


def pages_of(folders: list[Path]) -> Pages:
    """The outputs of a folder, or of several of `eval vision`. Raises PacelineError if it is no run."""
    folder = folders[0]
    if all((one / VISION).is_file() for one in folders):
        from paceline.evals.vision.report import page, read_reports

        return Pages(folders, page, read_reports)
    if len(folders) > 1:
        raise PacelineError("only runs of `paceline eval vision` are laid side by side; name one folder")
    if (folder / CERTIFICATE).is_file():
        from paceline.certify import page as certificates

        return Pages(loads((folder / CERTIFICATE).read_bytes()), certificates.page, lambda certificate: certificate)
    if (folder / REPLAY).is_file():
        from paceline.replay import report as replays

        return Pages(loads((folder / REPLAY).read_bytes()), replays.page, lambda facts: facts)
    if is_run(folder, "sessions"):
        from paceline.bench import sessions

        return Pages(folder, sessions.page, sessions.summary)
    if is_run(folder, "align"):
        from paceline.evals.align import page as answers

        return Pages(folder, answers.page, answers.summary, answers.markdown)
    from paceline.bench import page as benchmarks
    from paceline.bench import report as reports

    return Pages(reports.read_run(folder), benchmarks.page, attrgetter("summary"), reports.markdown)
