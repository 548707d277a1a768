"""Models with weights of eight or four bits: made of a checkpoint when it is loaded, or once and for all.

    weights = quantised(weights, "int8")            # matrices become blocks
    write("models/demo", "demo-int4", "int4")       # a folder that `load` reads like any other

Such a model is another model than its checkpoint. Drafting does not change what *it* says.
"""

from __future__ import annotations

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
from paceline.target.folder import fingerprint
from paceline.target.quantised.blocks import KINDS, Q4_0, Q8_0, Blocks, Kind, quantise
from paceline.target.shape import weight_shapes

METHOD = "paceline"
"""quant_method in the config.json of a folder that `write` has made."""
MEASURED = "quality.json"
"""In such a folder: what `paceline quality --save` has measured."""
WORDS: dict[str, tuple[Kind, Kind]] = {"int8": (Q8_0, Q8_0), "int4": (Q4_0, Q8_0)}
"""Kind of the layers' matrices, and that of the embedding and the output head, which suffer most."""
_OUTER = ("model.embed_tokens.weight", "lm_head.weight")

Weights = dict[str, "torch.Tensor | Blocks"]


def split(dtype: str | torch.dtype) -> tuple[str | None, str | torch.dtype]:
    """What becomes of matrices, and the dtype of all else: "int8-float32" is ("int8", "float32"), "int8" ("int8",
    "auto"), "auto" ("auto", "auto"), "bfloat16" (None, "bfloat16").

    "int8" and "int4" make blocks of a checkpoint, "auto" keeps the blocks of a file, None leaves no blocks."""
    word, _, rest = dtype.partition("-") if isinstance(dtype, str) else ("", "", "")
    return (word, rest or "auto") if word in ("auto", *WORDS) else (None, dtype)


def exact_dtype(dtype: str | torch.dtype) -> str:
    """The same model with everything but its blocks in float32."""
    precision, _ = split(dtype)
    return f"{precision}-float32" if precision else "float32"


def quantised(weights: Mapping[str, torch.Tensor], word: str) -> Weights:
    """Matrices as blocks, all else as it is, and so is a matrix whose width is no multiple of a block's 32."""
    inner, outer = WORDS[word]
    made: Weights = {}
    for name, weight in weights.items():
        fits = weight.ndim == 2 and weight.shape[1] % inner.inputs == 0
        made[name] = quantise(weight, outer if name in _OUTER else inner) if fits else weight
    return made


def tensors_of(weights: Mapping[str, torch.Tensor | Blocks]) -> dict[str, torch.Tensor]:
    """The weights that are not in blocks: norms, biases, tables."""
    return {name: w for name, w in weights.items() if isinstance(w, torch.Tensor)}


def refuse_word(name: str | Path, kinds: str | None, precision: str) -> None:
    """ModelError if a model in blocks of `kinds` should be made into blocks of `precision`."""
    if kinds is not None and precision in WORDS:
        raise ModelError(
            f"{name} has its weights in {kinds} already, so {precision} cannot be made of it: leave dtype out to keep "
            "its blocks (auto-float32: all else in float32), or name float32, bfloat16 or float16 to expand them"
        )


def describe(weights: Mapping[str, torch.Tensor | Blocks]) -> str | None:
    """Types of the matrices, the most frequent first, and bits: "Q4_0 and Q8_0, 4.9 bits a weight", "F16 and Q8_0, 13.4
    bits a weight"; None if nothing is in blocks."""
    matrices = [w for w in weights.values() if len(w.shape) == 2]
    if not any(isinstance(w, Blocks) for w in matrices):
        return None
    sizes: dict[str, int] = {}
    for w in matrices:
        kind = w.kind.name if isinstance(w, Blocks) else "BF16" if w.dtype == torch.bfloat16 else f"F{8 * w.itemsize}"
        sizes[kind] = sizes.get(kind, 0) + w.shape.numel()
    names = sorted(sizes, key=lambda name: -sizes[name])
    bits = 8 * sum(w.nbytes for w in matrices) / sum(sizes.values())
    return f"{' and '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}, {bits:.1f} bits a weight"


# Folders -------------------------------------------------------------------------------------------------------------


def is_ours(config: PretrainedConfig) -> bool:
    """Whether `write` made the folder of this configuration."""
    return _method(config).get("quant_method") == METHOD


def _method(config: PretrainedConfig) -> dict[str, Any]:
    found = getattr(config, "quantization_config", None)
    return dict(found) if isinstance(found, Mapping) else {}


def read(folder: Path, config: PretrainedConfig, tensors: Mapping[str, Any]) -> tuple[Weights, str]:
    """The weights in a folder that `write` has made, mapped, and the fingerprint of those they were made from.

    Raises ModelError, one line, for kinds that are not known and for tensors of another size."""
    method, weights = _method(config), Weights()
    kinds = {kind.name: kind for kind in KINDS.values()}
    for name, shape in weight_shapes(config).items():
        if name not in tensors:
            raise ModelError(f"{folder} lacks {name}, which its config.json asks for: the weights are incomplete")
        weight = tensors[name].get_tensor(name)
        word = dict(method.get("kinds", {})).get(name)
        if word is not None and word not in kinds:
            raise ModelError(f"{folder}: {name} is in blocks of kind {word!r}; there are {', '.join(kinds)}")
        size = (shape[0], shape[1] // kinds[word].inputs * kinds[word].nbytes) if word else shape
        if tuple(weight.shape) != size:
            raise ModelError(f"{folder}: {name} has shape {list(weight.shape)} where {list(size)} is needed")
        weights[name] = Blocks(kinds[word], weight) if word else weight
    return weights, str(method.get("made_from", ""))


def measured(folder: Path) -> str | None:
    """What was measured of the model in a folder, in one sentence."""
    try:
        return str(loads((folder / MEASURED).read_bytes())["sentence"])
    except (OSError, NotJSON, KeyError, TypeError):
        return None


def write(folder: Path, out: Path, config: PretrainedConfig, weights: Mapping[str, torch.Tensor], word: str) -> int:
    """Quantise the model in `folder` to the new folder `out`; returns the bytes of its weights.

    Raises PacelineError, one line, if `out` exists or cannot be written."""
    if word not in WORDS:
        raise PacelineError(f"unknown precision {word!r}; there are {', '.join(WORDS)}.{meant(word, WORDS)}")
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
    except FileExistsError as error:
        raise PacelineError(f"{out} exists already; name a new folder") from error
    except OSError as error:
        raise PacelineError(f"{out} cannot be written: {error.strerror}") from error
    tensors = {name: w.data if isinstance(w, Blocks) else w.contiguous() for name, w in made.items()}
    try:
        (out / "config.json").write_text(json.dumps(values, indent=2) + "\n", "utf-8")
        for file in sorted(folder.iterdir()):
            if file.suffix in (".json", ".jinja", ".txt", ".model") and not _is_of_weights(file.name):
                shutil.copyfile(file, out / file.name)
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
    except OSError as error:
        shutil.rmtree(out, ignore_errors=True)
        raise PacelineError(f"{out} cannot be written: {error.strerror or error}") from error
    return sum(tensor.nbytes for tensor in tensors.values())


def _is_of_weights(name: str) -> bool:
    return name in ("config.json", "model.safetensors.index.json")
