"""`paceline train vision`: hard-negative tuning of a dual encoder, or a small one from nothing."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline.errors import PacelineError
from paceline.records import Appender, write_whole

SHARES = tuple(tenth / 10 for tenth in range(11))


def train_command(
    model: Annotated[
        str, typer.Argument(help="A folder or hub name of a CLIP-like model, or `small`: one of our own, from nothing.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    data: Annotated[
        Path | None, typer.Option(help="Cases to learn from: what `eval vision build --split train` wrote.")
    ] = None,
    generic: Annotated[Path | None, typer.Option(help="Plain pairs mixed in: pairs.jsonl, or its folder.")] = None,
    validate: Annotated[Path | None, typer.Option(help="Cases to choose the interpolation on.")] = None,
    retention: Annotated[
        Path | None, typer.Option(help="Pairs whose zero-shot accuracy should last: pairs.jsonl, or its folder.")
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint and the log; OUT-run if left out.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    batch: Annotated[int, typer.Option(help="Plain pairs a step.", min=1)] = 256,
    cases: Annotated[int, typer.Option(help="Cases a step.", min=1)] = 32,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 5e-6,
    warmup: Annotated[int, typer.Option(help="Steps until the peak.", min=1)] = 50,
    mu: Annotated[float, typer.Option(help="Weight of the hard negatives.", min=0)] = 0.2,
    scope: Annotated[
        Literal["own", "batch"], typer.Option(help="Hard negatives of the own case, or of the whole batch.")
    ] = "own",
    negatives: Annotated[Literal["both", "text", "image"], typer.Option(help="Of which modality.")] = "both",
    lora: Annotated[int, typer.Option(help="Train adapters of this rank; 0 trains the weights.", min=0)] = 0,
    tolerance: Annotated[float, typer.Option(help="Points of zero-shot accuracy that may be lost.", min=0)] = 2.0,
    seed: int = 0,
    device: str = "cpu",
    threads: Annotated[int, typer.Option(help="torch threads.", min=1)] = 1,
) -> None:
    """Tune a dual encoder on cases whose pictures and captions are each other's hard negatives.

    paceline train vision openai/clip-vit-base-patch32 --data build/spec-train --generic coco/pairs.jsonl
    --validate build/spec-dev --retention imagenet/pairs.jsonl --out build/spec-clip

    With --validate and --retention the weights written are the best mixture of before and after that loses at most
    --tolerance points; frontier.json lists all of them. Ctrl-C saves; the same command goes on from there.
    """
    import torch

    from paceline.evals.vision.dataset import read_data
    from paceline.evals.vision.models.small import small
    from paceline.evals.vision.models.towers import Towers
    from paceline.evals.vision.retention import read_pairs
    from paceline.evals.vision.tune import Config, tune

    torch.set_num_threads(threads)
    if (validate is None) != (retention is None):
        raise PacelineError("--validate and --retention belong together: one is weighed against the other")
    config = Config(
        steps=steps,
        batch=batch,
        cases=cases,
        lr=lr,
        warmup=warmup,
        mu=mu,
        scope=scope,
        negatives=negatives,
        lora=lora,
        seed=seed,
    )
    plain = read_pairs(generic) if generic else None
    learnt, checked = (_cases(place, read_data) for place in (data, validate))
    kept = read_pairs(retention) if retention else None
    towers = small(plain.captions if plain else (), seed=seed) if model == "small" else Towers.load(model, device)
    before = copy.deepcopy(towers.model.state_dict())
    run = checkpoints or out.with_name(out.name + "-run")
    run.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def report(step: int, losses: dict[str, float]) -> None:
        if step % 20 and step != steps:
            return
        line = {"step": step, "seconds": round(time.perf_counter() - began, 1), **losses}
        with Appender.open(run / "log.jsonl") as log:
            log.append([line])
        typer.echo(
            f"step {step}/{steps}  " + "  ".join(f"{name} {value:.3f}" for name, value in losses.items()), err=True
        )

    try:
        tune(towers, plain, learnt, config, run / "checkpoint.pt", report)
    except KeyboardInterrupt:
        typer.echo(f"saved in {run}; the same command goes on", err=True)
        raise typer.Exit(130) from None
    facts: dict[str, Any] = {"model": model, "data": str(data), "generic": str(generic), **asdict(config)}
    if checked is not None and kept is not None and model != "small":
        points = frontier(towers, before, checked, kept)
        chosen = choose(points, tolerance)
        facts["share"] = chosen["share"]
        towers.model.load_state_dict(_mixed(before, points[-1]["weights"], chosen["share"]))
        listed = [{key: value for key, value in point.items() if key != "weights"} for point in points]
        _write_json(out / "frontier.json", {"tolerance": tolerance, "chosen": chosen["share"], "points": listed})
        for point in listed:
            mark = "  <- written" if point["share"] == chosen["share"] else ""
            typer.echo(
                f"share {point['share']:.1f}  SPEC {point['spec']:5.1f}  zero-shot {point['retention']:5.1f}{mark}"
            )
    towers.save(out)
    _write_json(out / "training.json", facts)
    typer.echo(f"written to {out}")


def _write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def _cases(place: Path | None, read: Any) -> Any:
    return None if place is None else read(place)


def _mixed(before: Any, after: Any, share: float) -> Any:
    from paceline.evals.vision.tune import interpolate

    return interpolate(before, after, share)


def frontier(towers: Any, before: dict[str, Any], data: Any, pairs: Any) -> list[dict[str, Any]]:
    """SPEC's mean and zero-shot accuracy of eleven mixtures, from the weights `before` to those of `towers` now."""
    from paceline.evals.vision.evaluate import score
    from paceline.evals.vision.retention import zero_shot

    after = copy.deepcopy(towers.model.state_dict())
    points = []
    for share in SHARES:
        towers.model.load_state_dict(_mixed(before, after, share))
        scored = score(towers, data)
        results = scored.results()
        point = {"share": share, "spec": scored.overall()["mean"], "retention": round(zero_shot(towers, pairs), 2)}
        points.append(point | {"subsets": {one["subset"]: one["mean"] for one in results}})
    points[-1]["weights"] = after
    return points


def choose(points: list[dict[str, Any]], tolerance: float) -> dict[str, Any]:
    """The mixture with the best SPEC mean among those that lose at most `tolerance` points of accuracy."""
    least = points[0]["retention"] - tolerance
    return max((p for p in points if p["retention"] >= least), key=lambda point: float(point["spec"]))
