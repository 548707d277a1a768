"""Records: named numbers of 64 bits that Python hands to compiled loops.

    class Task(NamedTuple): rows: int; out: int
    on_threads(work, array("q", Task(4, x.data_ptr())), threads)   # Python fills it
    task = carray(at, (1,), record(Task))[0]; task.rows            # compiled code reads it

Fields called `*_at`, and fields with the names of tensors, are addresses."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def record(kind: type[Any]) -> np.dtype[Any]:
    """The NumPy dtype of a NamedTuple whose fields are whole numbers or addresses."""
    return np.dtype([(name, np.int64) for name in kind._fields])


class Forward(NamedTuple):
    """The places of the keys and values of a forward.

    keys              address of the first layer's keys.
    layer, values     bytes from there to the next layer's keys, and to the values.
    heads, capacity, row  heads, tokens and numbers of a row of a slot, [heads, capacity, row]. A head of twice `row`
                      numbers takes two neighbouring places.
    positions, slots, at  addresses of [N], for the packed nodes: position in the text, slot, and place in the slot.
    tiles, tiles_at   number and address of `Tile`s. ends, places: addresses, see `Tile`.
    spread            1: a thread reads all keys of a tile's key head. Otherwise the number of parts, PART positions
                      each, that threads share. parts, done: addresses of float32 [tiles, kv_heads, spread, rows *
                      (`padded` + 2)] for their results, and of int64 [tiles, kv_heads] that are 0."""

    keys: int
    layer: int
    values: int
    heads: int
    capacity: int
    row: int
    positions: int
    slots: int
    at: int
    tiles: int = 0
    tiles_at: int = 0
    ends: int = 0
    places: int = 0
    spread: int = 1
    parts: int = 0
    done: int = 0


class Tile(NamedTuple):
    """Nodes of a slot that share a reading of keys (`attention.py`).

    first, nodes  the first packed node, and the number of nodes. A node sees positions below its entry of
                  `Forward.ends`.
    limit         below this position, the keys of all nodes lie in order.
    paths         where the nodes' paths begin in `Forward.places`: the cache places from position `limit` on.
    stride        length of each path."""

    slot: int
    first: int
    nodes: int
    limit: int
    paths: int
    stride: int


class Sizes(NamedTuple):
    """Sizes of a layer with the gated delta rule: numbers and widths of heads, the convolution's width, and how many
    neighbouring value heads share a key head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    neighbours: int

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


FORWARD, TILE = record(Forward), record(Tile)
BLOCK = 64
"""Number of keys in a block. Blocks begin at position 0 of the text."""
PART = 1024
"""Number of positions of a part of a text. Sums of a part are joined with those of the parts before it, by one thread
or several, so that results do not depend on the number of threads."""


@njit
def padded(dim: int, itemsize: int) -> int:
    """Numbers of a key, rounded up to the 16 words of 32 bits that are transposed at once."""
    granule = 64 // itemsize
    return (dim + granule - 1) // granule * granule
