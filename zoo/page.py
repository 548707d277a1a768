"""The page of drafters made for a real model: their data, budgets and held-out figures, as their config.json has them.

    python -m zoo page smollm2 --out models"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open

from paceline.errors import PacelineError

DRAFTERS = ("eagle3", "dflash", "medusa", "hydra", "amphista", "eagle", "kangaroo", "draft")
COLUMNS = (
    "drafter", "parameters", "MB", "answers", "tokens read", "minutes", "right at depth 1", "2", "3",
    "simulated length",
)  # fmt: skip
NOT_OURS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The target's, in a draft model's folder: config.json has the tokenizer's fingerprint."""


def write(model: str, out: Path) -> None:
    """Write MODEL.md, and remove from the draft's folder what is the target's. PacelineError without a drafter."""
    text = page(model, out)
    for file in NOT_OURS:
        (out / f"{model}-draft" / file).unlink(missing_ok=True)
    (out / f"{model}.md").write_text(text)


def page(model: str, out: Path) -> str:
    """Markdown. PacelineError if `out` has no drafter of the model."""
    rows, configs = [], []
    for name in DRAFTERS:
        folder = out / f"{model}-{name}"
        if not (folder / "config.json").exists():
            continue
        config = json.loads((folder / "config.json").read_text("utf-8"))
        configs.append(config)
        weights = folder / "model.safetensors"
        with safe_open(weights, "pt") as opened:
            shapes = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118  not a dict
        blocks = config.get("blocks") or config.get("quantization_config", {}).get("kinds", {})
        size = sum(math.prod(shape) * (32 / 34 if key in blocks else 1) for key, shape in shapes.items())
        spent, fits = config["recipe"]["spent"], config["held_out"]["all"]
        cells = [f"`{'model' if name == 'draft' else name}:{folder}`", f"{size / 1e6:.1f} M"]
        cells += [f"{weights.stat().st_size / 1e6:.1f}", f"{sum(config['learnt_tokens'].values()):,}"]
        cells += [f"{spent['tokens']:,}", f"{spent['minutes']:.1f}"]
        rows.append([*cells, *(f"{fit['top1']:.3f}" for fit in fits[:3]), f"{config['accepted_length']:.2f}"])
    if not rows:
        raise PacelineError(f"{out} has no drafter of {model}")
    target = configs[0]["target"]
    lines = [
        f"# Drafters of {target['name']}",
        "",
        "<!-- Written by `python -m zoo page`; do not edit by hand. -->",
        "",
        f"Weights' fingerprint of the target {target['weights_fingerprint']}, of its tokenizer "
        f"{target['tokenizer_fingerprint']}. All learnt from the target's own answers, half of them greedy and half at "
        "temperature 1; `answers` says how many tokens of them, `tokens read` how many with prompts and repeats.",
        "",
        *_table(rows),
        *_tuned(out / f"{model}-noise"),
    ]
    return "\n".join(lines) + "\n"


def _tuned(folder: Path) -> list[str]:
    """What there is to say of the model's adapter that was tuned with noise; nothing without it."""
    weights = folder / "adapter_model.safetensors"
    if not weights.exists():
        return []
    about = json.loads((folder / "noise.json").read_text("utf-8"))
    size, tokens = f"{weights.stat().st_size / 1e6:.1f} MB", f"{about['recipe']['spent']['tokens']:,} tokens"
    return [
        "",
        f"`{folder}` is the model itself, tuned with noise for [jacobi](../docs/methods/jacobi.md) on {tokens}: an "
        f"adapter of {size}, which is given as a model. Its answers are not those of the model that was not tuned.",
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    return [*head, *("| " + " | ".join(row) + " |" for row in rows)]
