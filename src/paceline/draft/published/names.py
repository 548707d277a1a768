"""Names of tensors in published files, and ours for them."""

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from paceline.errors import MethodError

T = TypeVar("T")


def renamed(tensors: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """The tensors by our names.

    names  our name for each pattern of a whole name, with \\1 for a group. Other names stay."""
    out = {}
    for name, tensor in tensors.items():
        found = ((re.fullmatch(pattern, name), ours) for pattern, ours in names.items())
        out[next((match.expand(ours) for match, ours in found if match), name)] = tensor
    return out


def count_heads(path: str, names: Iterable[str], start: str = "") -> tuple[int, int]:
    """Number of heads and number of blocks of each, from names that have `start`, the head and the block in front."""
    found = [match for name in names if (match := re.match(rf"{start}(\d+)\.(\d+)\.", name))]
    if not found:
        raise MethodError(f"{path} has no heads: none of its tensors has a name such as {start}0.0.linear.weight")
    heads, blocks = (1 + max(int(match[group]) for match in found) for group in (1, 2))
    return heads, blocks
