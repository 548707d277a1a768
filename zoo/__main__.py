"""Command line of the demo family. Sources are files of yours, given as NAME=PATH or PATH.

python -m zoo --help
"""

from functools import partial

import typer

from paceline.cli.parameters import app_of
from paceline.cli.train import later
from paceline.errors import PacelineError

app = app_of(no_args_is_help=True, help="Make the weights in `models/` from text: all (make), or by one step.")
_later = partial(later, app=app)

_later("make", "zoo.commands:make", "Run the steps of a file; what is done is skipped, an interrupted step goes on.")
_later("tokenizer", "zoo.commands:tokenizer", "Learn a byte-level BPE vocabulary, with the chat template.")
_later("pretrain", "zoo.commands:pretrain", "Train the demo model from random weights on packed text.")
_later("chat", "zoo.commands:chat", "Tune a pretrained model on conversations.")
_later("settle", "zoo.commands:settle", "Unlearn loops: make the model's own repeats unlikely.")
_later("distil", "zoo.commands:distil", "Train a small draft model on the text that the target learnt from.")
_later("prompts", "zoo.commands:prompts", "Write prompts for a real model, without any of an evaluation.")
_later("page", "zoo.commands:page", "Write the page of a real model's drafters.")


def main(app: typer.Typer = app) -> None:
    """Run a command line; a mistake of the user is one line and status 2."""
    try:
        app()
    except PacelineError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
