"""Medusa's heads: the authors' files, vLLM's, and heads inside the checkpoint of a whole model (Medusa-2).

Our names are `{head}.{block}.linear.*`, and `lm_heads.{head}.weight` for separate output heads or SHARED for one."""

from pathlib import Path

import torch
from torch import Tensor

from paceline.draft.models.checkpoint import CONFIG, check_all, open_head
from paceline.draft.models.layers import table_and_head
from paceline.draft.models.networks import ResidualHeads, shapes_of
from paceline.draft.published.names import count_heads, renamed
from paceline.draft.published.vocab import check_map
from paceline.errors import ModelError
from paceline.target.base import Facts
from paceline.target.load import open_weights

SHARED, TOKENS = "lm_head.weight", "token_map"
"""vLLM's names: an output head that all heads share, and the tokens of its rows, where they are not all."""
INSIDE = "medusa_head."  # before the names of heads inside the checkpoint of a whole model
FILE = "medusa_lm_head.safetensors"  # a name of the file of weights, other than model.safetensors
NAMES = {
    r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)": r"\1.\2.linear.\3",
    r"(\d+)\.\d+\.weight": r"lm_heads.\1.weight",
}


def read(path: str, target: Facts) -> tuple[dict[str, Tensor], int, int]:
    """Read the heads at `path`. Returns the tensors by our names, the number of heads and that of blocks of each.

    Missing biases are zeros, and a copy of the target's output head is left out.

    Heads and blocks are counted, whatever config.json says: published ones are wrong. MethodError unless the tensors
    are a whole set of heads for the target, and nothing else."""
    inside = _inside_model(path)
    found = inside if inside is not None else open_head(_file(path), "medusa", target)[1]
    tensors = renamed({name.removeprefix(INSIDE): tensor for name, tensor in found.items()}, NAMES)
    heads, layers = count_heads(path, tensors)
    rows, h = target.vocab_size, target.hidden_size
    shapes = shapes_of(ResidualHeads(heads, layers, h))
    if not any(name.endswith("linear.bias") for name in tensors):
        tensors |= {name: torch.zeros(h) for name in shapes if name.endswith("bias")}
    if TOKENS in tensors:
        check_map(tensors[TOKENS].long(), rows)
        rows = len(tensors[TOKENS])
        shapes[TOKENS] = (rows,)
    if SHARED in tensors:
        shapes[SHARED] = (rows, h)
    elif any(name.startswith("lm_heads.") for name in tensors):
        shapes |= {f"lm_heads.{k}.weight": (rows, h) for k in range(heads)}
    check_all(path, tensors, shapes)
    if SHARED in tensors and TOKENS not in tensors:
        whole = tensors[SHARED].to(target.device, target.dtype)
        if torch.equal(whole, table_and_head(target)[1].dense().to(whole)):
            del tensors[SHARED]
    return tensors, heads, layers


def _file(path: str) -> str:
    """The file FILE of a folder if there is one, or else `path` itself."""
    own = Path(path).expanduser() / FILE
    return str(own) if own.is_file() else path


def _inside_model(path: str) -> dict[str, Tensor] | None:
    """The heads inside the checkpoint of a whole model; None if it is not one."""
    folder = Path(path).expanduser()
    if not (folder / CONFIG).is_file() or _file(path) != path:
        return None
    try:
        names = open_weights(folder)
    except ModelError:
        return None  # no weights at all, which the caller says better
    heads = [name for name in names if name.startswith(INSIDE)]
    return {name: names[name].get_tensor(name) for name in heads} or None
