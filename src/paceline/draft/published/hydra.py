"""Hydra's heads, in the authors' files, which `paceline train hydra` writes too.

Our names are `hydra_mlp.{head}.{block}.*`, `hydra_lm_head.{head}.*`, and the prefix layer by the authors' names."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.draft.models.checkpoint import open_head
from paceline.draft.models.networks import PREFIX
from paceline.draft.published.names import count_heads, renamed
from paceline.errors import MethodError
from paceline.target.base import Facts

READ: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("hydra_head_arch", ("mlp", "prefix-mlp"), "has heads of kind {!r} (hydra_head_arch); mlp and prefix-mlp "
                                               "can be read"),
    ("grounded_heads", (True,), "has heads that do not read drafted tokens (grounded_heads is false)"),
    ("hidden_state_offset", (0, None), "reads a state other than the last one (hidden_state_offset is not 0)"),
)  # fmt: skip
"""Entries of config.json with the values that can be read, and an error for others (the authors' experiments)."""
UNUSED = (f"{PREFIX}.embed_tokens.weight", "rotary_emb.inv_freq")
"""Endings of names that nothing reads: an unused embedding, and tables of rotations."""
NAMES = {r"(hydra_lm_head\.\d+)\.\d+\.(.+)": r"\1.\2"}  # an output head is number 1, after its dropout
BLOCK = re.compile(r"(hydra_mlp\.\d+)\.(\d+)\.(.+)")


def read(path: str, target: Facts) -> tuple[dict[str, Tensor], int, int]:
    """Read the heads at `path`. Returns the tensors by our names, the number of heads and that of blocks of each.

    MethodError for another kind of head."""
    config, found = open_head(path, "hydra", target)
    for entry, values, why in READ:
        if (value := config.get(entry, values[0])) not in values:
            raise MethodError(f"{path} {why.format(value)}")
    tensors = _untied(_by_position(renamed(found, NAMES)), config)
    return tensors, *count_heads(path, tensors, "hydra_mlp.")


def _by_position(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renumber the blocks of each head 0, 1, 2, as the authors' files also count dropouts. Drop UNUSED tensors."""
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
    """All blocks of a head: a file with `tied` in its config.json has the blocks after the first only once."""
    out = dict(tensors)
    for name, tensor in tensors.items() if config.get("tied") else ():
        if match := re.fullmatch(r"(hydra_mlp\.\d+)\.1\.(.+)", name):
            out |= {f"{match[1]}.{n}.{match[2]}": tensor for n in range(1, int(config["hydra_num_layers"]))}
    return out
