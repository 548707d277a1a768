"""The page of drafters made for a real model: their data, budgets and held-out figures, as their config.json has them.

    python -m zoo page smollm2 --out models --work build/smollm2"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from paceline.errors import PacelineError

SHIP = ("eagle3", "medusa", "kangaroo")
"""In OUT, as MODEL-NAME. The others are in WORK."""
DRAFTERS = (*SHIP, "dflash", "hydra", "amphista", "eagle", "draft")
COLUMNS = (
    "drafter", "parameters", "MB", "answers", "tokens read", "minutes", "right at depth 1", "2", "3",
    "simulated length",
)  # fmt: skip


def write(model: str, out: Path, work: Path) -> None:
    """Write MODEL.md, with the rows that it had of drafters that are not there. PacelineError without a drafter."""
    file = out / f"{model}.md"
    before = file.read_text("utf-8") if file.exists() else ""
    file.write_text(page(model, out, work, before), "utf-8")


def page(model: str, out: Path, work: Path, before: str = "") -> str:
    """Markdown. before: the page of earlier, whose line stays where a drafter that does not ship is not in `work`.
    PacelineError if `out` has no drafter of the model."""
    places = {name: out / f"{model}-{name}" if name in SHIP else work / name for name in DRAFTERS}
    configs = {
        name: json.loads((folder / "config.json").read_text("utf-8"))
        for name, folder in places.items()
        if (folder / "config.json").exists()
    }
    if not any(name in configs for name in SHIP):
        raise PacelineError(f"{out} has no drafter of {model}")
    target = next(iter(configs.values()))["target"]
    ship, made = (
        [
            _row(name, folder, configs[name]) if name in configs else _kept(f"| {_spec(name, folder)} |", before)
            for name, folder in places.items()
            if (name in SHIP) == shipped
        ]
        for shipped in (True, False)
    )
    lines = [
        f"# Drafters of {target['name']}",
        "",
        "<!-- Written by `python -m zoo page`; do not edit by hand. -->",
        "",
        f"Weights' fingerprint of the target {target['weights_fingerprint']}, of its tokenizer "
        f"{target['tokenizer_fingerprint']}. All learnt from the target's own answers, half of them greedy and half at "
        "temperature 1; `answers` says how many tokens of them, `tokens read` how many with prompts and repeats.",
        "",
        *_table(ship),
    ]
    noise = _noise(work / "noise") or _kept(f"`{work / 'noise'}` ", before)
    if any(made) or noise:
        lines += [
            "",
            f"These do not ship; `python -m zoo make zoo/{model}.toml --out {out} --work {work}` makes them. The "
            "figures are those of the weights that were measured:",
            "",
            *_table(made),
        ]
    return "\n".join([*lines, *(["", noise] if noise else [])]) + "\n"


def _spec(name: str, folder: Path) -> str:
    return f"`{'model' if name == 'draft' else name}:{folder}`"


def _row(name: str, folder: Path, config: dict[str, Any]) -> str:
    """A drafter's line of the table."""
    weights = folder / "model.safetensors"
    with safe_open(weights, "pt") as opened:
        shapes = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118  not a dict
    blocks = config.get("blocks") or config.get("quantization_config", {}).get("kinds", {})
    size = sum(math.prod(shape) * (32 / 34 if key in blocks else 1) for key, shape in shapes.items())
    spent, fits = config["recipe"]["spent"], config["held_out"]["all"]
    cells = [_spec(name, folder), f"{size / 1e6:.1f} M"]
    cells += [f"{weights.stat().st_size / 1e6:.1f}", f"{sum(config['learnt_tokens'].values()):,}"]
    cells += [f"{spent['tokens']:,}", f"{spent['minutes']:.1f}"]
    cells += [*(f"{fit['top1']:.3f}" for fit in fits[:3]), f"{config['accepted_length']:.2f}"]
    return f"| {' | '.join(cells)} |"


def _kept(begin: str, before: str) -> str:
    """The line of the page of earlier that begins so, or nothing."""
    return next((line for line in before.splitlines() if line.startswith(begin)), "")


def _noise(folder: Path) -> str:
    """What there is to say of the model's adapter that was tuned with noise; nothing without it."""
    weights = folder / "adapter_model.safetensors"
    if not weights.exists():
        return ""
    about = json.loads((folder / "noise.json").read_text("utf-8"))
    size, tokens = f"{weights.stat().st_size / 1e6:.1f} MB", f"{about['recipe']['spent']['tokens']:,} tokens"
    return (
        f"`{folder}` is the model itself, tuned with noise for [jacobi](../docs/methods/jacobi.md) on {tokens}: an "
        f"adapter of {size}, which is given as a model. Its answers are not those of the model that was not tuned."
    )


def _table(rows: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1), *filter(None, rows)]
