"""Medusa's heads, in the authors' files, vLLM's, and inside the checkpoint of a whole model (Medusa-2). Hydra's heads,
in the authors' files, which `paceline train hydra` writes, too.

Our names of Medusa's tensors are `{head}.{block}.linear.*`, and `lm_heads.{head}.weight` for separate output heads or
SHARED for a common one. Our names of Hydra's are `hydra_mlp.{head}.{block}.*`, `hydra_lm_head.{head}.*`, and the
authors' names for the prefix layer."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import MethodError, ModelError
from paceline.formats.facts import Facts
from paceline.formats.folder import open_weights
from paceline.formats.heads.checkpoint import CONFIG, check_all
from paceline.formats.heads.files import open_head
from paceline.formats.heads.layout import count_heads, refuse_others, renamed, table_and_head
from paceline.formats.heads.networks import PREFIX, ResidualHeads, shapes_of
from paceline.formats.heads.vocab import check_map

SHARED, TOKENS = "lm_head.weight", "token_map"
"""vLLM's names: an output head that all heads share, and the tokens of its rows, if these are not all tokens."""
INSIDE = "medusa_head."  # begins the names of heads inside a whole model's checkpoint
FILE = "medusa_lm_head.safetensors"  # The file of weights may have this name.
NAMES = {
    r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)": r"\1.\2.linear.\3",
    r"(\d+)\.\d+\.weight": r"lm_heads.\1.weight",
}


def read_medusa(path: str, target: Facts) -> tuple[dict[str, Tensor], int, int]:
    """Read the heads at `path`. Returns the tensors by our names, the number of heads, and the number of blocks of
    each.

    Missing biases become zeros, and a copy of the target's output head is left out. Heads and blocks are counted,
    because published config.json files give wrong numbers. MethodError unless the tensors are a whole set of heads for
    the target, and nothing else."""
    found = _inside_model(path)
    if found is None:
        config, found = open_head(_file(path), "medusa", target)
        refuse_others(path, "medusa", config, found)
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
    """The file FILE in a folder if it exists, else `path` itself."""
    own = Path(path).expanduser() / FILE
    return str(own) if own.is_file() else path


def _inside_model(path: str) -> dict[str, Tensor] | None:
    """The heads inside a whole model's checkpoint; None if `path` is something else."""
    folder = Path(path).expanduser()
    if not (folder / CONFIG).is_file() or _file(path) != path:
        return None
    try:
        names = open_weights(folder)
    except ModelError:
        return None  # There are no weights at all. The caller's message is better.
    heads = [name for name in names if name.startswith(INSIDE)]
    return {name: names[name].get_tensor(name) for name in heads} or None


# Hydra ----------------------------------------------------------------------------------------------------------------

READ: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("hydra_head_arch", ("mlp", "prefix-mlp"), "has heads of kind {!r} (hydra_head_arch); mlp and prefix-mlp "
                                               "can be read"),
    ("grounded_heads", (True,), "has heads that do not read drafted tokens (grounded_heads is false)"),
    ("hidden_state_offset", (0, None), "reads a state other than the last one (hidden_state_offset is not 0)"),
)  # fmt: skip
"""Entries of config.json, the values that can be read, and an error for other values (the authors' experiments)."""
UNUSED = (f"{PREFIX}.embed_tokens.weight", "rotary_emb.inv_freq")
"""What the names of tensors that nothing reads end with: an unused embedding, and tables of rotations."""
HYDRA_NAMES = {r"(hydra_lm_head\.\d+)\.\d+\.(.+)": r"\1.\2"}  # drops the number of the head after its dropout
BLOCK = re.compile(r"(hydra_mlp\.\d+)\.(\d+)\.(.+)")


def read_hydra(path: str, target: Facts) -> tuple[dict[str, Tensor], int, int]:
    """Read the heads at `path`. Returns the tensors by our names, the number of heads, and the number of blocks of
    each. MethodError for another kind of head."""
    config, found = open_head(path, "hydra", target)
    refuse_others(path, "hydra", config, found)
    for entry, values, why in READ:
        if (value := config.get(entry, values[0])) not in values:
            raise MethodError(f"{path} {why.format(value)}")
    tensors = _untied(_by_position(renamed(found, HYDRA_NAMES)), config)
    return tensors, *count_heads(path, tensors, "hydra_mlp.")


def _by_position(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renumber the blocks of each head 0, 1, 2, because the authors' files also count dropouts. Drop UNUSED tensors."""
    found = {(match[1], int(match[2])) for name in tensors if (match := BLOCK.fullmatch(name))}
    numbers = {head: sorted(number for one, number in found if one == head) for head, _ in found}
    out = {}
    for name, tensor in tensors.items():
        if match := BLOCK.fullmatch(name):
            name = f"{match[1]}.{numbers[match[1]].index(int(match[2]))}.{match[3]}"
        if not name.endswith(UNUSED):
            out[name] = tensor
    return out


def _untied(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Repeat tied blocks: a file with `tied` in its config.json has the blocks after the first only once."""
    out = dict(tensors)
    for name, tensor in tensors.items() if config.get("tied") else ():
        if match := re.fullmatch(r"(hydra_mlp\.\d+)\.1\.(.+)", name):
            out |= {f"{match[1]}.{n}.{match[2]}": tensor for n in range(1, int(config["hydra_num_layers"]))}
    return out
