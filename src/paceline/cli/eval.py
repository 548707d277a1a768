"""`paceline eval`: evaluations of what a model says. Each command is one module, imported when it runs."""

from __future__ import annotations

import typer

from paceline.cli.eval_align import align

evaluate = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
evaluate.command("align", short_help="How well answers keep a scenario's written rules.")(align)


@evaluate.callback()
def _group() -> None:
    """Keeps `align` a command of its own while it is the only one."""
