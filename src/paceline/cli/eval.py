"""`paceline eval`: evaluations of what a model says. Each command is one module, imported when it runs."""

import typer

from paceline.cli.eval_align import align
from paceline.cli.eval_vision import vision

evaluate = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
evaluate.command("align", short_help="How well answers keep a scenario's written rules.")(align)
evaluate.add_typer(vision, name="vision", short_help="Whether a vision-language model sees size, place and number.")
