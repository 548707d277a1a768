"""`paceline train vision`: hard-negative tuning of a dual encoder, or a small one from nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from paceline.errors import PacelineError
from paceline.evals.vision.dataset import Data, read_data
from paceline.evals.vision.models.small import small
from paceline.evals.vision.models.towers import Towers
from paceline.evals.vision.retention import PairFile, read_pairs
from paceline.evals.vision.tune import Config, tune
from paceline.evals.vision.wise import Weights, choose, frontier, mix, weights
from paceline.jsonl import Appender, check_folder, write_whole

EVERY = 20
"""Steps between two lines of the log."""


def train_command(
    model: Annotated[
        str, typer.Argument(help="A folder or hub name of a CLIP-like model, or `small`: one of our own, from nothing.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.", callback=check_folder)],
    data: Annotated[
        Path | None, typer.Option(help="Cases to learn from: what `eval vision build --split train` wrote.")
    ] = None,
    generic: Annotated[Path | None, typer.Option(help="Plain pairs mixed in: pairs.jsonl, or its folder.")] = None,
    validate: Annotated[Path | None, typer.Option(help="Cases to choose the interpolation on.")] = None,
    retention: Annotated[
        Path | None, typer.Option(help="Pairs whose zero-shot accuracy should last: pairs.jsonl, or its folder.")
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Folder of the checkpoint and the log; OUT-run if left out.", callback=check_folder),
    ] = None,
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    batch: Annotated[int, typer.Option(help="Plain pairs a step.", min=1)] = 256,
    cases: Annotated[int, typer.Option(help="Cases a step.", min=1)] = 32,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", min=0)] = 5e-6,
    warmup: Annotated[int, typer.Option(help="Steps until the peak.", min=1)] = 50,
    mu: Annotated[float, typer.Option(help="Weight of the hard negatives.", min=0)] = 0.2,
    scope: Annotated[
        Literal["own", "batch"], typer.Option(help="Hard negatives of the own case, or of the whole batch.")
    ] = "own",
    negatives: Annotated[Literal["both", "text", "image"], typer.Option(help="Of which modality.")] = "both",
    lora: Annotated[int, typer.Option(help="Train adapters of this rank; 0 trains the weights.", min=0)] = 0,
    tolerance: Annotated[float, typer.Option(help="Points of zero-shot accuracy that may be lost.", min=0)] = 2.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: str = "cpu",
    threads: Annotated[int, typer.Option(help="torch threads.", min=1)] = 1,
) -> None:
    """Tune a dual encoder on cases whose pictures and captions are each other's hard negatives.

    paceline train vision openai/clip-vit-base-patch32 --data build/spec-train --generic coco/pairs.jsonl
    --validate build/spec-dev --retention imagenet/pairs.jsonl --out build/spec-clip

    With --validate and --retention the weights written are the best mixture of before and after that loses at most
    --tolerance points; frontier.json lists all of them. Ctrl-C saves; the same command goes on from there.
    """
    torch.set_num_threads(threads)
    if (validate is None) != (retention is None):
        raise PacelineError("--validate and --retention belong together: one is weighed against the other")
    config = Config(steps, batch, cases, lr, warmup, mu=mu, scope=scope, negatives=negatives, lora=lora, seed=seed)
    plain, kept = (read_pairs(place) if place else None for place in (generic, retention))
    learnt, checked = (read_data(place) if place else None for place in (data, validate))
    towers = small(plain.captions if plain else (), seed=seed) if model == "small" else Towers.load(model, device)
    before, run = weights(towers), checkpoints or out.with_name(out.name + "-run")
    run.mkdir(parents=True, exist_ok=True)
    try:
        tune(towers, plain, learnt, config, run / "checkpoint.pt", _log(run / "log.jsonl", steps))
    except KeyboardInterrupt:
        typer.echo(f"saved in {run}; the same command goes on", err=True)
        raise typer.Exit(130) from None
    facts: dict[str, Any] = {"model": model, "data": str(data), "generic": str(generic), **asdict(config)}
    if checked is not None and kept is not None:
        facts["share"] = _weigh(towers, before, checked, kept, tolerance, out)
    towers.save(out)
    _write_json(out / "training.json", facts)
    typer.echo(f"written to {out}")


def _log(file: Path, steps: int) -> Callable[[int, dict[str, float]], None]:
    """A function that writes losses to `file` and to the terminal, every EVERY steps."""
    began = time.perf_counter()

    def report(step: int, losses: dict[str, float]) -> None:
        if step % EVERY == 0 or step == steps:
            with Appender.open(file) as log:
                log.append([{"step": step, "seconds": round(time.perf_counter() - began, 1), **losses}])
            typer.echo(
                f"step {step}/{steps}  " + "  ".join(f"{n} {value:.3f}" for n, value in losses.items()), err=True
            )

    return report


def _weigh(towers: Towers, before: Weights, data: Data, pairs: PairFile, tolerance: float, out: Path) -> float:
    """Give `towers` the best mixture, write all of them to `out`, and return the share."""
    after = weights(towers)
    points = frontier(towers, before, after, data, pairs)
    share = float(choose(points, tolerance)["share"])
    mix(towers, before, after, share)
    _write_json(out / "frontier.json", {"tolerance": tolerance, "chosen": share, "points": points})
    for p in points:
        mark = "  <- written" if p["share"] == share else ""
        typer.echo(f"share {p['share']:.1f}  SPEC {p['spec']:5.1f}  zero-shot {p['retention']:5.1f}{mark}")
    return share


def _write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")
