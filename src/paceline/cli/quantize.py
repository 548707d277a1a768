"""`paceline quantize`: a copy of a model with weights of eight or four bits."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.draft.spec import option
from paceline.jsonl import check_new_folder
from paceline.workbench.options import with_options


@with_options
def quantize(
    model: options.Model,
    out: Annotated[Path, typer.Argument(help="A new folder.", callback=check_new_folder)],
    dtype: str = option("int8", "int8 (Q8_0) or int4 (Q4_0; embedding and output head Q8_0)."),
) -> int:
    """Write a model with weights of eight or four bits to a new folder, which every command takes as a model.

    Its weights are those that --dtype int8 and int4 make on every load. Made once, the model loads faster and takes
    half or a quarter of the disk space. It is another model than its checkpoint.

    \b
    paceline quantize models/demo demo-int4 --dtype int4
    paceline generate demo-int4 "Hello! What can you do?"
    """
    from paceline.target.load import quantise_folder

    size = quantise_folder(model, out, dtype)
    print(f"wrote {out}: {size / 1e6:.1f} MB of weights")
    return 0
