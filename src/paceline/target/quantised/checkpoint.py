"""Folders of models with weights of eight or four bits, as `paceline quantize` makes them and `load` reads them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from paceline.errors import ModelError, PacelineError, meant
from paceline.jsonl import NotJSON, loads
from paceline.target.checks import check_shapes
from paceline.target.folder import INDEX, METHOD, SMALL_FILES, fingerprint, quantisation, shapes_of
from paceline.target.quantised.blocks import KINDS, PRECISIONS, Blocks, Weights, quantised
from paceline.target.shape import weight_shapes

MEASURED = "quality.json"  # in a model folder: the result of `paceline quality --save`


def read(folder: Path, config: PretrainedConfig, tensors: Mapping[str, Any]) -> tuple[Weights, str]:
    """Map the weights in a folder that `write` made. Returns them and the fingerprint of the weights before quantising.

    Raises ModelError, one line, for unknown kinds and if `check_shapes` fails."""
    method, wanted = quantisation(config), weight_shapes(config)
    known = {kind.name: kind for kind in KINDS.values()}
    words = {name: word for name, word in dict(method.get("kinds", {})).items() if name in wanted}
    for name, word in words.items():
        if word not in known:
            raise ModelError(f"{folder}: {name} is in blocks of kind {word!r}; there are {', '.join(known)}")
        rows, width = wanted[name]
        wanted[name] = rows, width // known[word].inputs * known[word].nbytes
    check_shapes(folder, wanted, shapes_of(tensors), config.num_hidden_layers)
    found = {name: tensors[name].get_tensor(name) for name in wanted}
    weights = {name: Blocks(known[words[name]], data) if name in words else data for name, data in found.items()}
    return weights, str(method.get("made_from", ""))


def measured(folder: Path) -> list[str]:
    """A sentence on the quality of the model in a folder, if `paceline quality` measured it."""
    try:
        return [str(loads((folder / MEASURED).read_bytes())["sentence"])]
    except (OSError, NotJSON, KeyError, TypeError):
        return []


def write(folder: Path, out: Path, config: PretrainedConfig, weights: Mapping[str, torch.Tensor], word: str) -> int:
    """Quantise the model in `folder` to the new folder `out`; returns the bytes of its weights.

    Raises PacelineError, one line, if `out` exists or cannot be written."""
    if word not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise PacelineError(f"unknown precision {word!r}; there are {known}.{meant(word, PRECISIONS)}")
    made = quantised(weights, word)
    kinds = {name: w.kind.name for name, w in made.items() if isinstance(w, Blocks)}
    if not kinds:
        raise ModelError(f"{folder}: no matrix has a width that is a multiple of 32, so there is nothing to quantise")
    values = json.loads((folder / "config.json").read_text("utf-8"))
    values["quantization_config"] = {
        "quant_method": METHOD,
        "precision": word,
        "kinds": kinds,
        "made_from": fingerprint(weights),
    }
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise PacelineError(f"{out} exists already; name a new folder") from None
    except OSError as error:
        raise PacelineError(f"{out} cannot be written: {error.strerror}") from None
    tensors = {name: w.data if isinstance(w, Blocks) else w.contiguous() for name, w in made.items()}
    try:
        (out / "config.json").write_text(json.dumps(values, indent=2) + "\n", "utf-8")
        copy_small(folder, out)
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
    except OSError as error:
        shutil.rmtree(out, ignore_errors=True)
        raise PacelineError(f"{out} cannot be written: {error.strerror or error}") from None
    return sum(tensor.nbytes for tensor in tensors.values())


def copy_small(folder: Path, out: Path) -> None:
    """Copy the tokenizer and what else is small from the model or adapter in `folder`, but not its configuration."""
    for file in sorted(folder.iterdir()):
        if any(map(file.match, SMALL_FILES)) and file.name not in ("config.json", "adapter_config.json", INDEX):
            shutil.copyfile(file, out / file.name)
