"""`paceline eval`: the suites, each a command or a group of its own."""

from paceline.cli.eval_align import align
from paceline.cli.eval_vision import vision
from paceline.cli.parameters import Grouped, app_of
from paceline.errors import install

app = app_of(no_args_is_help=True)
app.command("align", cls=Grouped, short_help="How well answers keep a scenario's written rules.")(align)
app.add_typer(
    vision, name="vision", short_help="Whether a vision-language model sees size, place and number.",
    epilog=f"{install('packages/evals[vision]')} brings the packages that this needs.",
)  # fmt: skip
