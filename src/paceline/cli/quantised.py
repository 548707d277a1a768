"""`paceline quantize`: copy a model with weights of eight or four bits. `paceline quality`: measure its loss."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.parameters import with_options
from paceline.cli.show import Steps
from paceline.core.rules import check_precision
from paceline.draft.spec import option
from paceline.engine.options import ModelOptions
from paceline.errors import PacelineError
from paceline.formats.place import check_place
from paceline.given import checked
from paceline.outputs import check_folder, check_new_folder, write_json
from paceline.textfiles import readable, text_of


@with_options
def quantize(
    model: Annotated[
        str, typer.Argument(
            help="Model with weights of 16 or 32 bits: a folder or a Hugging Face id.",
            callback=checked(check_place),
        )
    ],
    out: Annotated[Path, typer.Argument(help="New folder to write the model to.", callback=check_new_folder)],
    dtype: str = option(
        "int8", "Kind of weights: int8 (Q8_0) or int4 (Q4_0; embedding and output head Q8_0).",
        callback=checked(check_precision),
    ),
) -> int:
    """Write a model with weights of eight or four bits to a new folder, which every command takes as a model.

    Its weights are those that --dtype int8 and int4 make on every load. Made once, the model loads faster and takes
    half or a quarter of the disk space. It is another model than its checkpoint.

    \b
    paceline quantize path/to/model model-int4 --dtype int4
    paceline generate demo-int4 "Hello! What can you do?"
    """
    from paceline.target.load import quantise_folder

    size = quantise_folder(model, out, dtype)
    print(f"wrote {out}: {size / 1e6:.1f} MB of weights")
    return 0


@with_options
def quality(
    model: options.Model,
    text: Path = option(help="File of held-out text, plain or packed.", callback=readable),
    against: str | None = option(
        None, "Model from which the quantised one was made. [default: MODEL]", callback=checked(check_place)
    ),
    tokens: int = option(
        16_384, "Largest number of tokens of the text that are read.", least=1, names=("--max-tokens", "-n")
    ),
    running: ModelOptions = ModelOptions(),
    save: bool = option(
        False,
        "Also write the result into MODEL's folder; commands that load the model then show it.",
        names=("--save",),
    ),
) -> int:
    """Compare a model of eight or four bits with the model it was made from: perplexity, KL divergence, and how often
    both find the same token most probable. With --dtype int8-float32 both compute in float32.

    \b
    paceline quality path/to/model --dtype int4 --text held-out.txt
    paceline quality model-int4 --against path/to/model --text held-out.txt --save
    paceline quality model-Q4_K_M.gguf --against original-folder --text held-out.txt
    """
    folder, original = Path(model), against or model
    if against is None and running.dtype == "auto":
        raise PacelineError("there is one model and one dtype: name another with --against or --dtype")
    if save and not folder.is_dir():
        raise PacelineError(f"--save writes into a model's folder, and {folder} is none")
    check_folder(folder if save else None)

    from paceline.core.rules import split_dtype
    from paceline.evals.quality import WINDOW, compare
    from paceline.target.load import MEASURED, load, load_tokenizer

    words = text_of(text, PacelineError)
    running.use_threads()
    precision, rest = split_dtype(running.dtype)
    reference = load(original, dtype=rest if precision else "auto", device=running.device)
    ids = load_tokenizer(original).encode_text(words[: 16 * tokens])[:tokens]
    measuring = load(model, **asdict(running))
    with Steps("comparing", len(ids) // WINDOW, "windows") as steps:
        measured = compare(measuring, reference, ids, steps.advance)
    print("\n".join(measured.lines()))
    if save:
        about = {"sentence": measured.sentence(), "text": text.name, "against": reference.name}
        write_json(folder / MEASURED, about | asdict(measured), indent=2)
    return 0
