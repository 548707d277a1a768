"""`paceline eval vision`: data sets of size, position, existence and count, and models on them."""

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.parameters import Grouped, app_of, with_options
from paceline.cli.show import Steps, figures_table, standard_output
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.evals.vision.options import BuildOptions, RunOptions, TrainOptions, TuneOptions
from paceline.given import listed
from paceline.outputs import check_folder

HELP = """Does a vision-language model see size, position, existence and count? (SPEC, Peng et al. 2024)

\b
paceline eval vision build build/spec --seed 1              15,000 pictures
paceline eval vision run build/spec --model transformers:openai/clip-vit-base-patch32 --out runs/clip
paceline report runs/clip
paceline eval vision train --help                           tune a model on such data

pip install '.[vision]' in a checkout brings the packages that this needs.
"""

vision = app_of(no_args_is_help=True, help=HELP)

Data = Annotated[
    Path,
    typer.Argument(help="Data set to read: the folder or .zip of ours, or of the official one.", metavar="DATA"),
]

MARKS = {True: "ok", False: "FAILED", None: "-"}


@vision.command(cls=Grouped, short_help="Draw a data set.")
@with_options
def build(
    out: Annotated[
        Path,
        typer.Argument(
            help="Folder to write; the same command goes on with a build that was stopped.",
            metavar="OUT", callback=check_folder,
        ),
    ],
    asked: BuildOptions,
    cases: int = option(500, "Number of cases of each subset; the paper has 500.", least=1),
    subsets: str = option("", "Subsets, joined by commas; plain and classes are pairs in addition to the six."),
    workers: int = option(0, "Number of processes; 0: one for each core.", least=0),
    as_json: options.AsJson = False,
) -> int:
    """Draw cases of K pictures and K captions that differ in one value, in the layout of the official release.

    \b
    paceline eval vision build build/spec --seed 1
    paceline eval vision build build/tune --split train --cases 2000 --size 224
    paceline eval vision build build/plain --subsets plain --cases 20000 --size 224
    """
    from paceline.evals.vision.captions import VALUES
    from paceline.evals.vision.engine import PLAIN
    from paceline.evals.vision.writer import CONTACT
    from paceline.evals.vision.writer import build as write

    wanted = _names(subsets, (*VALUES, *PLAIN)) or [*VALUES]
    counts = {subset: cases for subset in (*VALUES, *PLAIN) if subset in wanted}
    pictures = sum(cases * len(VALUES.get(subset, "1")) for subset in counts)
    began = time.perf_counter()
    with Steps("drawing", unit="pictures") as steps:
        drawn = write(asked, counts, out, workers=workers, progress=steps.show)
    seconds = time.perf_counter() - began
    if as_json:
        facts = {"out": str(out), "pictures": pictures, "drawn": drawn, "seconds": round(seconds, 2), "cases": counts}
        print(json.dumps(facts))
    else:
        print(f"{out}: {pictures:,} pictures, {drawn:,} drawn in {seconds:.1f} s; {out / CONTACT} shows some of them")
    return 0


@vision.command(cls=Grouped, short_help="Check a data set: what it gives away, and whether its captions are true.")
def audit(data: Data, as_json: options.AsJson = False) -> int:
    """Check that each caption is true of its picture only, that pictures of a case differ only where they should, that
    no simple feature (mean colour, edges, covered area, JPEG size) reveals the answer, and more. Exit status 1 if a
    check fails.

    \b
    paceline eval vision audit build/spec
    """
    from paceline.evals.vision.audit import audit as check

    with Steps("checking", unit="cases") as steps:
        report = check(data, steps.show)
    if as_json:
        print(json.dumps(report))
    else:
        for one in report["checks"]:
            print(f"{MARKS[one['ok']]:6}  {one['name']}: {one['says']}")
    return 1 if any(one["ok"] is False for one in report["checks"]) else 0


@vision.command(cls=Grouped, short_help="Score a model on a data set.")
@with_options
def run(data: Data, asked: RunOptions, as_json: options.AsJson = False) -> int:
    """Accuracy of picture to text and text to picture, their mean, and group scores, of every subset.

    \b
    paceline eval vision run build/spec --model random,seed=3 --json
    paceline eval vision run SPEC/data.zip --model transformers:openai/clip-vit-base-patch32
    paceline eval vision run build/spec --model http://localhost:8000/v1#NAME,ask=yesno --out runs/vlm

    What cannot be read is named on standard error, the rest is scored, and the exit status is 1."""
    from paceline.evals.vision.evaluate import run as evaluate

    with Steps("scoring", unit="cases") as steps:
        report = evaluate(data, asked, steps.show)
    for problem in report["problems"]:
        print(f"skipped: {problem}", file=sys.stderr)
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)
        if asked.out is not None:
            print(f"\n{asked.out} holds it all; paceline report {asked.out} makes a page of it.")
    return 1 if report["problems"] else 0


@vision.command("train", cls=Grouped, short_help="Tune a dual encoder on size, position, existence, count.")
@with_options
def train_command(
    model: Annotated[
        str, typer.Argument(
            help="Model to tune: a folder or hub name of a CLIP-like model, or `small`, a new small one."
        )
    ],
    asked: TuneOptions,
    files: TrainOptions,
    threads: int = option(1, "Number of torch threads.", least=1, most=1024),
) -> None:
    """Tune a dual encoder on cases whose pictures and captions are each other's hard negatives.

    \b
    paceline eval vision train openai/clip-vit-base-patch32 --data build/spec-train --out build/spec-clip
    --generic coco/pairs.jsonl --validate build/spec-dev --retention imagenet/pairs.jsonl

    With --validate and --retention the weights written are the best mixture of before and after that loses at most
    --tolerance points; frontier.json lists all of them. Ctrl-C saves; the same command goes on from there."""
    import torch

    from paceline.evals.vision.train import train

    torch.set_num_threads(threads)
    try:
        train(model, asked, files)
    except KeyboardInterrupt:
        typer.echo(f"saved in {files.run}; the same command goes on", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"written to {files.out}")


def _names(text: str, known: Iterable[str]) -> list[str]:
    names = listed(text)
    wrong = [name for name in names if name not in known]
    if wrong:
        raise PacelineError(f"no subset {wrong[0]!r}; there are {', '.join(known)}")
    return names


def _show(report: dict[str, Any]) -> None:
    from paceline.evals.vision.captions import TITLES

    known = ("i2t", "t2i", "mean", "group", "question", "circular")
    heads = [(head, head, ".2f") for head in known if any(head in one for one in report["results"])]
    rows = [{**one, "title": TITLES[one["subset"]], "chance": one["chance"]["i2t"]} for one in report["results"]]
    rows.append({"title": "mean", **report["mean"]})
    columns = [("", "title", ""), ("cases", "cases", "d"), ("chance", "chance", ".2f"), *heads]
    standard_output().print(figures_table(rows, columns))
