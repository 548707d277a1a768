"""Drafters for a real model, by one command: prompts, the model's answers, every recipe on the same answers.

A TOML file says which model, text and budgets; `smollm2.toml` is that of the drafters in `models/smollm2-*`. Each step
is a command of its own, as in `family`: one that is done is skipped, an interrupted one goes on.

    python -m zoo drafters zoo/smollm2.toml --out models --checkpoints build/smollm2 --dry-run
"""

import json
import math
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from paceline.errors import PacelineError
from zoo.family import RECIPES, Step, place
from zoo.prompts import KINDS

HEADS = ("eagle3", "dflash", "medusa", "hydra", "amphista", "eagle", "kangaroo")
ROWS = ("--length", "768", "--rows", "1", "--threads", "2")
"""Rows hold a long prompt and its answer. A batch is one row: a budget of minutes is a few hundred steps."""
TOKENS = 8192
"""Tokens that heads learn to draft, and that `vocab=FILE` keeps."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A file of this kind. minutes: of each training; options: of each recipe, as on its command line."""

    model: str
    answers: int
    max_tokens: int
    minutes: float
    sources: tuple[str, ...]
    evaluations: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]


def read_plan(path: Path) -> Plan:
    """The plan in a TOML file; its paths are relative to its folder. PacelineError for a file that is none."""
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
        options = {name: tuple(shlex.split(text)) for name, text in table["options"].items()}
        return Plan(
            model=str(table["model"]),
            answers=int(table["answers"]),
            max_tokens=int(table["max_tokens"]),
            minutes=float(table["minutes"]),
            sources=tuple(f"{name}={place(path, file)}" for name, file in table["sources"].items()),
            evaluations=tuple(str(place(path, file)) for file in table["evaluations"]["files"]),
            options=options,
        )
    except (OSError, ValueError, UnicodeDecodeError) as error:  # TOMLDecodeError is a ValueError
        raise PacelineError(f"{path} cannot be read: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise PacelineError(f"{path} is no plan for drafters ({error}): see zoo/smollm2.toml") from None


def steps(plan: Plan, out: Path, checkpoints: Path) -> list[Step]:
    """The commands, in order."""
    asked, counts = checkpoints / "prompts", checkpoints / "vocab.safetensors"
    answers = counts.with_suffix(".answers.jsonl")
    without = [part for file in plan.evaluations for part in ("--without", file)]
    prompts = [part for kind in KINDS for part in ("--prompts", f"{kind}={asked / kind}.jsonl")]
    writes = ("--generate", str(plan.answers), "--max-tokens", str(plan.max_tokens), "--threads", "2")

    def recipe(name: str, into: Path, *more: str) -> Step:
        folder = str(checkpoints / f"run-{name}")
        budget = ("--minutes", str(plan.minutes), "--states", str(checkpoints / "states"), *ROWS)
        places = ("--data", str(answers), "--out", str(into), "--checkpoints", folder)
        arguments = (name, plan.model, *places, *budget, *plan.options.get(name, ()), *more)
        return Step(name, arguments, into / "config.json", module=RECIPES)

    draft, small = checkpoints / "draft", out / f"{plan.model}-draft"
    table = out / f"{plan.model}-vocab.safetensors"
    return [
        Step("prompts", ("prompts", *plan.sources, *without, "--out", str(asked)), asked / f"{KINDS[-1]}.jsonl"),
        Step("answers", ("vocab", plan.model, *prompts, *writes, "--out", str(counts)), counts, module=RECIPES),
        Step("overlap", ("overlap", str(answers), "--model", plan.model, *without), checkpoints / "never"),
        *(recipe(name, out / f"{plan.model}-{name}", "--stored", "int8") for name in HEADS),
        recipe("draft", draft),
        Step("quantize", ("quantize", str(draft), str(small)), small / "config.json", module="paceline"),
        Step(
            "vocab",
            ("vocab", plan.model, "--text", str(answers), "--keep", str(TOKENS), "--out", str(table)),
            table,
            module=RECIPES,
        ),
    ]


def drop_tokenizer(folder: Path) -> None:
    """Remove the target's tokenizer and chat template from a draft model's folder: they are not ours to ship, and
    config.json has the tokenizer's fingerprint."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).unlink(missing_ok=True)


# What was made ---------------------------------------------------------------------------------------------------

COLUMNS = ("drafter", "parameters", "MB", "minutes", "tokens read", "right at depth 1", "2", "3", "simulated length")


def card(plan: Plan, out: Path) -> str:
    """The page of the drafters in `out`: their data, budgets and held-out figures, as their config.json has them."""
    rows, configs = [], {}
    for name in (*HEADS, "draft"):
        folder = out / f"{plan.model}-{name}"
        if not (folder / "config.json").exists():
            continue
        config = configs[name] = json.loads((folder / "config.json").read_text("utf-8"))
        weights = folder / "model.safetensors"
        with safe_open(weights, "pt") as opened:
            shapes = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118  not a dict
        blocks = config.get("blocks") or config.get("quantization_config", {}).get("kinds", {})
        sizes = [math.prod(shape) * (32 / 34 if key in blocks else 1) for key, shape in shapes.items()]
        spent, fits = config["recipe"]["spent"], config["held_out"]["all"]
        depths = [f"{fit['top1']:.3f}" for fit in fits[:3]]
        size = f"{weights.stat().st_size / 1e6:.1f}"
        spec = f"`{'model' if name == 'draft' else name}:{folder}`"
        figures = (f"{sum(sizes) / 1e6:.1f} M", size, f"{spent['minutes']:.1f}", f"{spent['tokens']:,}", *depths)
        rows.append((spec, *figures, f"{config['accepted_length']:.2f}"))
    if not rows:
        raise PacelineError(f"{out} has no drafter of {plan.model}")
    any_config = next(iter(configs.values()))
    learnt, target = any_config["learnt_tokens"], any_config["target"]
    lines = [
        f"# Drafters of {target['name']}",
        "",
        "<!-- Written by `python -m zoo drafters`; do not edit by hand. -->",
        "",
        f"Weights' fingerprint of the target {target['weights_fingerprint']}, of its tokenizer "
        f"{target['tokenizer_fingerprint']}. All learnt from the same {sum(learnt.values()):,} tokens of the target's "
        f"own answers, half of them greedy and half at temperature 1: "
        + ", ".join(f"{name} {count:,}" for name, count in sorted(learnt.items()))
        + ".",
        "",
        *table(COLUMNS, rows),
    ]
    return "\n".join(lines) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown; all columns but the first are numbers."""
    head = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    return [*head, *("| " + " | ".join(row) + " |" for row in rows)]
