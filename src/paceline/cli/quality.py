"""`paceline quality`: what a quantised model has lost, on held-out text."""

import json
from dataclasses import asdict
from pathlib import Path

from paceline.cli import options
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.jsonl import opened
from paceline.workbench.options import with_options


@with_options
def quality(
    model: options.Model,
    text: Path = option(help="Held-out text, plain or gzip-compressed."),
    against: str | None = option(None, "The model that it was made from. [default: MODEL]"),
    dtype: options.Dtype = "auto",
    tokens: int = option(16_384, "Most tokens of the text.", least=1, names=("--tokens", "-n")),
    threads: options.Threads = None,
    save: bool = option(False, "Also write it into MODEL's folder; loading the model then says it.", names=("--save",)),
) -> int:
    """Compare a model of eight or four bits with the model it was made from: perplexity, KL divergence, and how often
    both find the same token most probable. With --dtype int8-float32 both compute in float32.

    \b
    paceline quality models/demo --dtype int4 --text held-out.txt
    paceline quality demo-int4 --against models/demo --text held-out.txt --save
    paceline quality model-Q4_K_M.gguf --against original-folder --text held-out.txt
    """
    import torch

    from paceline.evals.quality import compare
    from paceline.jsonl import check_folder, write_whole
    from paceline.target.load import load, load_tokenizer
    from paceline.target.quantised.blocks import split_dtype
    from paceline.target.quantised.checkpoint import MEASURED

    folder, original = Path(model), against or model
    if against is None and dtype == "auto":
        raise PacelineError("there is one model and one dtype: name another with --against or --dtype")
    if save and not folder.is_dir():
        raise PacelineError(f"--save writes into a model's folder, and {folder} is none")
    check_folder(folder if save else None)
    words = _read(text)
    if threads is not None:
        torch.set_num_threads(threads)
    precision, rest = split_dtype(dtype)
    reference = load(original, dtype=rest if precision else "auto")
    ids = load_tokenizer(original).encode_text(words[: 16 * tokens])[:tokens]
    measured = compare(load(model, dtype=dtype), reference, ids)
    print("\n".join(measured.lines()))
    if save:
        about = {"sentence": measured.sentence(), "text": text.name, "against": reference.name}
        write_whole(folder / MEASURED, json.dumps(about | asdict(measured), indent=2) + "\n")
    return 0


def _read(text: Path) -> str:
    with opened(text, PacelineError) as file:
        try:
            return file.read().decode()
        except UnicodeDecodeError as error:
            raise PacelineError(f"{text} cannot be read as text: {error}") from error
