"""`paceline quality`: what a quantised model has lost, on held-out text."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.errors import PacelineError


def quality(
    model: options.Model,
    text: Annotated[Path, typer.Option(help="Held-out text, plain or gzip-compressed.")],
    against: Annotated[str | None, typer.Option(help="The model that it was made from. [default: MODEL]")] = None,
    dtype: options.Dtype = "auto",
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Most tokens of the text.", min=1)] = 16_384,
    threads: options.Threads = None,
    save: Annotated[
        bool, typer.Option("--save", help="Also write it into MODEL's folder; loading the model then says it.")
    ] = False,
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

    if against is None and dtype == "auto":
        raise PacelineError("there is one model and one dtype: name another with --against or --dtype")
    if save and not Path(model).is_dir():
        raise PacelineError(f"--save writes into a model's folder, and {model} is none")
    check_folder(Path(model) if save else None)
    words = _read(text)
    if threads is not None:
        torch.set_num_threads(threads)
    precision, rest = split_dtype(dtype)
    reference = load(against or model, dtype=rest if precision else "auto")
    ids = load_tokenizer(against or model).encode_text(words[: 16 * tokens])[:tokens]
    measured = compare(load(model, dtype=dtype), reference, ids)
    print("\n".join(measured.lines()))
    if save:
        facts = {"sentence": measured.sentence(), "text": text.name, "against": reference.name, **asdict(measured)}
        write_whole(Path(model) / MEASURED, json.dumps(facts, indent=2) + "\n")
    return 0


def _read(text: Path) -> str:
    try:
        data = text.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise PacelineError(f"{text} cannot be read as text: {getattr(error, 'strerror', None) or error}") from error
