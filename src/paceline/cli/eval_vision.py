"""`paceline eval vision`: data sets of size, position, existence and count; checks of them, and models run on them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.errors import PacelineError
from paceline.jsonl import check_file, check_folder

HELP = """Does a vision-language model see size, position, existence and count? (SPEC, Peng et al. 2024)

\b
paceline eval vision build build/spec --seed 1              15,000 pictures
paceline eval vision run build/spec --model transformers:openai/clip-vit-base-patch32 --out runs/clip
paceline eval vision report runs/clip
paceline train vision --help                                tune a model on such data
"""

vision = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)

Data = Annotated[Path, typer.Argument(help="A data set's folder or .zip: ours, or the official one.", metavar="DATA")]
Subsets = Annotated[str, typer.Option(help="Joined by commas; all if left out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]

MARKS = {True: "ok", False: "FAILED", None: "-"}


@vision.command(short_help="Draw a data set.")
def build(
    out: Annotated[
        Path,
        typer.Argument(help="Folder to write; the same command goes on in it.", metavar="OUT", callback=check_folder),
    ],
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.", min=0)] = 0,
    cases: Annotated[int, typer.Option(help="Cases of each subset; the paper has 500.", min=1)] = 500,
    size: Annotated[int, typer.Option(help="Pixels of a picture's side.", min=32)] = 512,
    subsets: Annotated[str, typer.Option(help="Joined by commas; plain and classes are pairs beside the six.")] = "",
    split: Annotated[
        Literal["all", "train", "test"], typer.Option(help="Objects and templates: all, or one of two disjoint parts.")
    ] = "all",
    objects: Annotated[
        str, typer.Option(help="procedural, diffusion:MODEL, or a folder of RGBA cut-outs with objects.json.")
    ] = "procedural",
    backgrounds: Annotated[
        str | None, typer.Option(help="A folder of pictures, or inpaint:MODEL; drawn if left out.")
    ] = None,
    renderer: Annotated[Literal["auto", "skia", "pillow"], typer.Option(help="What draws the objects.")] = "auto",
    count_size: Annotated[
        Literal["case", "image"], typer.Option(help="Counted objects: one size for a case, or another in each picture.")
    ] = "case",
    workers: Annotated[int, typer.Option(help="Processes; 0: one for each core.", min=0)] = 0,
    as_json: AsJson = False,
) -> int:
    """Draw cases of K pictures and K captions that differ in one value, in the layout of the official release.

    \b
    paceline eval vision build build/spec --seed 1
    paceline eval vision build build/tune --split train --cases 2000 --size 224
    paceline eval vision build build/plain --subsets plain --cases 20000 --size 224
    """
    from paceline.evals.vision.engine import PLAIN, Plan
    from paceline.evals.vision.words import VALUES
    from paceline.evals.vision.writer import build as write

    wanted = _names(subsets, (*VALUES, *PLAIN)) or [*VALUES]
    plan = Plan(seed, size, split, objects, backgrounds, renderer, count_size)
    counts = {subset: cases for subset in (*VALUES, *PLAIN) if subset in wanted}
    pictures = sum(cases * len(VALUES.get(subset, "1")) for subset in counts)
    began = time.perf_counter()
    with _bar("drawing", pictures) as advance:
        drawn = write(plan, counts, out, workers=workers, progress=advance)
    seconds = time.perf_counter() - began
    facts = {"out": str(out), "pictures": pictures, "drawn": drawn, "seconds": round(seconds, 2), "cases": counts}
    if as_json:
        print(json.dumps(facts))
    else:
        some = out / "contact.png"
        print(f"{out}: {pictures:,} pictures, {drawn:,} drawn in {seconds:.1f} s; {some} shows some of them")
    return 0


@vision.command(short_help="Check a data set: what it gives away, and whether its captions are true.")
def audit(data: Data, as_json: AsJson = False) -> int:
    """Check that captions are true of their pictures alone, that pictures of a case differ only where they should, that
    nothing trivial (mean colour, edges, covered area, JPEG size) gives the answer away, and more. Exit status 1 if a
    check fails.

    \b
    paceline eval vision audit build/spec
    """
    from paceline.evals.vision.audit import audit as check

    with _bar("checking", None) as advance:
        report = check(data, advance)
    if as_json:
        print(json.dumps(report))
    else:
        for one in report["checks"]:
            print(f"{MARKS[one['ok']]:6}  {one['name']}: {one['says']}")
    return 1 if any(one["ok"] is False for one in report["checks"]) else 0


@vision.command(short_help="Score a model on a data set.")
def run(
    data: Data,
    model: Annotated[
        str,
        typer.Option(help="oracle, random, constant, transformers:PATH, open_clip:NAME, endpoint:URL,model=NAME, ..."),
    ],
    subsets: Subsets = "",
    ties: Annotated[
        Literal["shared", "first"], typer.Option(help="Ties share the credit, or go to the first key, as officially.")
    ] = "shared",
    batch: Annotated[int, typer.Option(help="Pictures encoded at once.", min=1)] = 64,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.json, scores.npz and replies.", callback=check_folder)
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Accuracy of picture to text and text to picture, their mean, and group scores, of every subset.

    \b
    paceline eval vision run build/spec --model random,seed=3 --json
    paceline eval vision run SPEC/data.zip --model open_clip:ViT-B-32,pretrained=openai,quick_gelu=true
    paceline eval vision run build/spec --model endpoint:http://localhost:8000/v1,model=NAME,ask=yesno --out runs/vlm

    What cannot be read is named on standard error, the rest is scored, and the exit status is 1.
    """
    from paceline.evals.vision.command import run as evaluate
    from paceline.evals.vision.words import VALUES

    with _bar("scoring", None) as advance:
        report = evaluate(data, model, _names(subsets, VALUES), ties, batch, out, advance)
    for problem in report["problems"]:
        print(f"skipped: {problem}", file=sys.stderr)
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)
        if out is not None:
            print(f"\n{out} holds it all; paceline eval vision report {out} makes a page of it.")
    return 1 if report["problems"] else 0


@vision.command(short_help="Make a page of runs.")
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="What `run --out` wrote; several are laid side by side.", metavar="RUN...")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page. [default: RUN/report.html]", callback=check_file)
    ] = None,
) -> int:
    """Make a page of one or more runs: scores beside published ones, confusion, pictures that were taken right and
    wrong. All in one file, which loads nothing.

    \b
    paceline eval vision report runs/before runs/after --out report.html
    """
    from paceline.evals.vision.report import write_page

    file = out or runs[0] / "report.html"
    write_page(runs, file)
    print(f"wrote {file}")
    return 0


def _names(text: str, known: Iterable[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise PacelineError(f"no subset {wrong[0]!r}; there are {', '.join(known)}")
    return names


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A bar on a terminal. What it yields takes how much was done, or (done, total)."""
    err = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=total)

        def advance(done: int, of: int | None = None) -> None:
            if of is None:
                bar.advance(task, done)
            else:
                bar.update(task, completed=done, total=of)

        yield advance


def _show(report: dict[str, object]) -> None:
    from paceline.evals.vision.command import table

    print(table(report))
