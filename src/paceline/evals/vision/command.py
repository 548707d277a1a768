"""A run: a model's figures on a data set, written down so that a page can be made of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline import __version__
from paceline.errors import PacelineError
from paceline.evals.vision.dataset import Data, read_data
from paceline.evals.vision.evaluate import score
from paceline.evals.vision.models.names import EndpointOptions, open_model, read_name
from paceline.evals.vision.scores import overall
from paceline.evals.vision.words import TITLES
from paceline.jsonl import write_whole

REPORT, SCORES = "report.json", "scores.npz"
Advance = Callable[..., None]


def run(
    source: Path, spec: str, subsets: Sequence[str], ties: str, batch: int, out: Path | None, advance: Advance
) -> dict[str, Any]:
    """Score the model `spec` names; the report, which is written to `out` too.

    Raises PacelineError if there is nothing to score."""
    name, options = read_name(spec)
    data = read_data(source, subsets)
    if not data.cases:
        raise PacelineError(f"{source} has no whole case; the first problem: {'; '.join(data.problems[:1])}")
    report: dict[str, Any] = {"data": str(source.resolve()), "model": spec, "paceline": __version__, "ties": ties}
    report["labels"] = label_histograms(data)
    if isinstance(options, EndpointOptions):
        report |= _ask(data, options, out, advance)
    else:
        model = open_model(name, options)
        if hasattr(model, "describe"):
            report["settings"] = model.describe()
        report |= _history(getattr(options, "checkpoint", ""))
        scored = score(model, data, batch=batch, progress=_counted(advance, len(data.cases)))
        if not scored.matrices:
            raise PacelineError(f"no case of {source} could be scored; the first problem: {scored.problems[0]}")
        report["results"] = scored.results(ties)
        report["problems"] = scored.problems
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(out / SCORES, **scored.matrices)  # type: ignore[arg-type]
    report["mean"] = overall(report["results"])
    if out is not None:
        write_whole(out / REPORT, json.dumps(report, indent=1) + "\n")
    return report


def _counted(advance: Advance, total: int) -> Callable[[int], None]:
    """`advance`, which wants how much is done in all, for a caller who says how much more."""
    done = 0

    def more(number: int) -> None:
        nonlocal done
        done += number
        advance(done, total)

    return more


def _history(folder: str) -> dict[str, Any]:
    """How a model that `paceline train vision` wrote came to be."""
    names = {"training": "training.json", "frontier": "frontier.json"} if folder else {}
    return {
        key: json.loads(file.read_text("utf-8"))
        for key, name in names.items()
        if (file := Path(folder) / name).is_file()
    }


def _ask(data: Data, options: EndpointOptions, out: Path | None, advance: Advance) -> dict[str, Any]:
    from paceline.evals.vision.ask.run import ask_all, figures

    with tempfile.TemporaryDirectory() as scratch:
        lines = asyncio.run(ask_all(data, options, out or Path(scratch), advance))
    results, habits = figures(data, lines, options)
    sizes = {data.picture(case.images[0]).size for case in data.cases[:20]}
    habits |= {"detail": options.detail, "sent": sorted(f"{w} x {h}" for w, h in sizes), "blind": options.blind}
    habits["options"] = {key: value for key, value in dataclasses.asdict(options).items() if key != "key"}
    return {"results": results, "replies": habits, "problems": data.problems}


def label_histograms(data: Data) -> dict[str, dict[str, list[int]]]:
    """How often the right key stands at each place, by subset and direction: whether keys were shuffled."""
    places: dict[str, dict[str, list[int]]] = {}
    for case in data.cases:
        ways = places.setdefault(case.subset, {"i2t": [0] * case.k, "t2i": [0] * case.k})
        for way, keys in (("i2t", case.i2t_keys), ("t2i", case.t2i_keys)):
            for query, order in enumerate(keys.tolist()):
                ways[way][order.index(query)] += 1
    return places


def table(report: dict[str, Any]) -> str:
    """The figures as lines of text."""
    known = ("i2t", "t2i", "mean", "group", "question", "circular")
    heads = [head for head in known if any(head in one for one in report["results"])]
    lines = [f"{'':18} {'cases':>6} {'chance':>7} " + " ".join(f"{head:>8}" for head in heads)]
    for one in report["results"]:
        cells = " ".join(f"{one[head]:8.2f}" if head in one else f"{'':8}" for head in heads)
        lines.append(f"{TITLES[one['subset']]:18} {one['cases']:6} {one['chance']['i2t']:7.2f} {cells}")
    cells = " ".join(f"{report['mean'][head]:8.2f}" if head in report["mean"] else f"{'':8}" for head in heads)
    lines.append(f"{'mean':18} {'':6} {'':7} {cells}")
    return "\n".join(lines)
