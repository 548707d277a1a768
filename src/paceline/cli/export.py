"""`paceline export`: models, heads and corpora in the files that other engines read."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.later import later
from paceline.cli.parameters import Grouped, app_of, with_options
from paceline.draft.spec import option
from paceline.outputs import GGUF, writes

export = app_of(help="Write models and drafters as other engines read them.", no_args_is_help=True)


@export.command(cls=Grouped, short_help="A model, an EAGLE-3 or DFlash head, or a corpus, for llama.cpp.")
@with_options
def gguf(
    what: Annotated[
        str, typer.Argument(
            help="What to write: a model, eagle3:FOLDER, dflash:FOLDER or corpus:FOLDER.", metavar="WHAT"
        )
    ],
    file: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE", callback=writes(GGUF))],
    dtype: Literal["f32", "f16", "q8_0"] = option(
        "f16", "Kind of numbers for matrices that are not in blocks already."
    ),
    target: str | None = option(None, "The model that a head drafts for."),
) -> None:
    """Write a file that llama.cpp reads. It can be a model of the Llama family with any tokenizer, a head for the draft
    types of llama.cpp's server, or a corpus for its type ngram-cache.

    \b
    paceline export gguf MODEL model.gguf --dtype f32
    paceline export gguf eagle3:build/eagle3 head.gguf --target smollm2 --dtype q8_0
    paceline export gguf corpus:build/corpus corpus.lookup
    """
    from paceline.plugins.to_gguf import export as write

    if option_of_the_server := write(what, file, dtype, target):
        print(option_of_the_server)
    print(f"wrote {file}")


later("vllm", "paceline.train.export:command", "Write Medusa heads in the layout that vLLM reads.", export)
