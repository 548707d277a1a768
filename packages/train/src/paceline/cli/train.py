"""`paceline train`: the training recipes, whose modules are imported when they run."""

import tomllib
from pathlib import Path

from paceline.cli.later import later
from paceline.cli.parameters import app_of
from paceline.train.options import DrafterOptions

RESUMES = "The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there."
"""In the help of every command that trains a drafter."""
RECIPES: dict[str, dict[str, list[str]]] = tomllib.loads(Path(__file__).with_name("train.toml").read_text("utf-8"))
"""By group and command: its function, with annotations for Typer, and what it does."""
app = app_of(no_args_is_help=True, help="Train drafters for a model: draft models, heads, adapters.")
tools = app_of(no_args_is_help=True, help="Make what recipes and drafters need besides weights.")
for name, (where, summary) in RECIPES["recipes"].items():
    later(name, where, summary, app, DrafterOptions, RESUMES)
for name, (where, summary) in RECIPES["tools"].items():
    later(name, where, summary, tools)
app.add_typer(tools, name="tools", short_help="Make what recipes and drafters need besides weights.")
