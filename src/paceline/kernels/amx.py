"""x @ weight.T in bfloat16 by AMX, with the panels of `products.py`, and with weights in blocks, expanded on the way.

The panels of `products.py` have the order of the registers, and a tile of `tiles.py` multiplies up to 32 rows by a
panel. For weights in blocks, a tile multiplies all rows by a group of panels. It expands a chunk of their inputs to
bfloat16, multiplies all rows by it, and goes on with the next chunk, while the sums are in memory. So each weight is
expanded once for all rows, and all factors come from the first two levels of caches, however wide the weights are."""

import ctypes
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product

import torch
from torch.nn.functional import pad

from paceline import processor
from paceline.kernels import vectors as v
from paceline.kernels.tiles import Tiles, first_lanes, narrowed
from paceline.kernels.vectors import Value

REGISTER = 1024
"""Bytes of a register, which holds 32 inputs of 16 rows or 16 outputs, or 256 sums."""
PAIR = 32
"""Number of rows and of outputs that are multiplied together: two registers of each, and four of sums."""
GROUP = 4
"""Number of pairs of panels in a tile. Rows are read once for all of them."""
CHUNK = 8
"""Number of blocks of 32 inputs in a chunk, which has 16 kB for a pair."""
MOST = 16
"""Largest number of pairs of rows in a tile. Its chunk and sums then take 600 kB of the second level."""


@processor.remembered
def supported() -> bool:
    """Whether this CPU multiplies tiles of bfloat16, and Linux lets this process use their registers."""
    arch_prctl, request, tile_data = 158, 0x1023, 18
    has = processor.has("amx-bf16") and sys.platform == "linux"
    return has and ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


@cache
def dense_tiles(out: torch.dtype) -> Tiles:
    """Make tiles for rows and panels of `products.py` with a multiple of 32 inputs. A row's sums have a fixed order.

    out  dtype of the results, bfloat16 or float32."""

    def write(module: v.Module) -> None:
        for groups in (1, 2):
            module.add(f"groups{groups}", partial(_dense_tile, groups, out))

    addresses = v.compiled("bfloat16 panels by AMX" + ("" if out == torch.bfloat16 else ", wide"), write)
    return Tiles(
        lambda name: addresses("groups1" if int(name.removeprefix("tile")) <= 16 else "groups2"), PAIR, columns=PAIR,
        dtype=out, unit=4 * PAIR, row_unit=4,
    )  # fmt: skip


def _dense_tile(
    groups: int, out: torch.dtype, x: Value, w: Value, ahead: Value, bias: Value, y: Value, stride: Value,
    columns: Value, units: Value, rows: Value,
) -> None:  # fmt: skip
    """Multiply up to 16 rows (groups = 1), or 17 to 32, by a panel, and add the bias. Registers as in `_tile`."""
    sums, sizes, before = v.reserve(2 * groups * REGISTER), v.reserve(64), v.reserve(64)
    quarters, number = list(enumerate(product(range(groups), range(2)))), partial(v.literal, v.I8)
    last = (rows - 16 * (groups - 1)).cast("trunc", v.I8)
    _begin(sizes, before, dict.fromkeys([2 * groups - 2, 2 * groups - 1, 5 + groups], last))
    for k, (_, half) in quarters:  # Sums begin with the bias, which all rows read.
        v.intrinsic("llvm.x86.tileloadd64", v.VOID, number(k), v.pointer(bias + 64 * half), v.literal(v.I64, 0))

    def add_block(i: Value) -> None:
        for half in range(2):
            at = v.pointer(w + i * (2 * REGISTER) + 64 * half)
            v.intrinsic("llvm.x86.tileloadd64", v.VOID, number(4 + half), at, v.literal(v.I64, 128))
        for group in range(groups):
            at = v.pointer(x + units * (64 * group) + i * 64)
            v.intrinsic("llvm.x86.tileloadd64", v.VOID, number(6 + group), at, units * 4)
        for k, (group, half) in quarters:
            v.intrinsic("llvm.x86.tdpbf16ps", v.VOID, number(k), number(6 + group), number(4 + half))
        v.prefetch(ahead + i * (2 * REGISTER), 2 * REGISTER)

    def write(i: Value) -> None:
        at = [sums + (i >> 4) * (2 * REGISTER) + half * REGISTER + (i & 15) * 64 for half in range(2)]
        both = [v.load(place, v.F32, align=64) for place in at]
        if out == torch.float32:
            for half, sum in enumerate(both):
                mask = first_lanes(columns - v.LANES * half)
                v.store(y + stride * i + 64 * half, sum, align=4, mask=mask)
            return
        v.store(y + stride * i, v.join(*map(narrowed, both)), align=2, mask=first_lanes(columns, PAIR))

    _each(units >> 4, add_block)
    for k, _ in quarters:
        there = v.pointer(sums + REGISTER * k)
        v.intrinsic("llvm.x86.tilestored64", v.VOID, number(k), there, v.literal(v.I64, 64))
    _each(rows, write)
    v.intrinsic("llvm.x86.ldtilecfg", v.VOID, v.pointer(before))


def _begin(sizes: Value, before: Value, rows: Mapping[int, Value]) -> None:
    """Give each register 16 rows of 64 bytes, or its number of rows in `rows`. `before` gets the earlier sizes, which
    are oneDNN's."""
    v.store(sizes, v.literal(v.I8, 1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8))
    for register, count in rows.items():
        v.store(sizes + (48 + register), count, align=1)
    v.intrinsic("llvm.x86.sttilecfg", v.VOID, v.pointer(before))
    v.intrinsic("llvm.x86.ldtilecfg", v.VOID, v.pointer(sizes))


def tiles(name: str, expand: Callable[[Value, Value, Value], None], *, blocks: int, nbytes: int) -> Tiles:
    """Make tiles that multiply rows, reordered by `packed`, by groups of panels of 16 outputs.

    expand          expand(panel, i, to) writes blocks 2 i and 2 i + 1 of a panel in bfloat16 to `to`, the second block
                    2 * REGISTER bytes after the first. A block is two inputs of each of 16 outputs, the next two, ...
    blocks, nbytes  number of blocks of 32 inputs in a unit of a panel of 16, and bytes of the unit."""
    body = partial(_tile, expand, blocks, nbytes)
    addresses = v.compiled(name, lambda module: module.add("tile", body))
    return Tiles(
        lambda _: addresses("tile"), MOST, columns=PAIR * GROUP, dtype=torch.bfloat16, unit=2 * GROUP * nbytes,
        row_unit=2 * REGISTER * blocks,
    )  # fmt: skip


def packed(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Reorder x [at most `rows`, width], padded with zeros, by chunk, pair of rows, block, and row."""
    missing = 0, -x.shape[1] % (32 * CHUNK), 0, rows - len(x)
    full = pad(x, missing) if any(missing) else x
    return full.view(-1, 2, 16, full.shape[1] // (32 * CHUNK), CHUNK, 32).permute(3, 0, 4, 1, 2, 5).contiguous()


def _tile(
    expand: Callable[[Value, Value, Value], None], blocks: int, nbytes: int, x: Value, w: Value, ahead: Value,
    bias: Value, y: Value, stride: Value, columns: Value, units: Value, rows: Value,
) -> None:  # fmt: skip
    """Multiply pairs of rows by a group of panels, and add the bias. Registers 0 to 3 hold sums, 4 and 5 weights, 6 and
    7 rows."""
    number, line, step, size = partial(v.literal, v.I8), v.literal(v.I64, 64), 2 * REGISTER, 2 * REGISTER * CHUNK
    expanded, sums, before = v.reserve(GROUP * size), v.reserve(4 * REGISTER * GROUP * MOST), v.reserve(64)
    least, quarters = partial(v.intrinsic, "llvm.umin.i64", v.I64), list(enumerate(product(range(2), range(2))))
    pairs = least(columns + PAIR - 1 >> 5, v.literal(v.I64, GROUP))

    def sums_of(r: Value, q: Value) -> Value:
        return sums + (r * GROUP + q) * (4 * REGISTER)

    def add_chunk(c: Value) -> None:
        """Expand chunk `c` of the weights, and add its products to the sums."""
        left = least(units * blocks - c * CHUNK, v.literal(v.I64, CHUNK))

        def expand_panel(p: Value) -> None:
            to = expanded + (p >> 1) * size + (p & 1) * REGISTER
            _each(left >> 1, lambda i: expand(w + p * units * nbytes, c * (CHUNK // 2) + i, to + i * (2 * step)))

        def multiply(r: Value, q: Value) -> None:
            """Add the products of pair `r` of rows and pair `q` of panels."""
            is_first = c < 1  # Sums begin with the bias, which all rows read.
            apart = v.select(is_first, v.literal(v.I64, 0), line)
            for k, (_, half) in quarters:
                at = v.select(is_first, bias + q * (4 * PAIR) + 64 * half, sums_of(r, q) + REGISTER * k)
                v.intrinsic("llvm.x86.tileloadd64", v.VOID, number(k), v.pointer(at), apart)

            def add_block(i: Value) -> None:
                for k, at in ((4, expanded + q * size + i * step), (6, x + (c * rows + r) * size + i * step)):
                    for half in range(2):
                        there = v.pointer(at + REGISTER * half)
                        v.intrinsic("llvm.x86.tileloadd64", v.VOID, number(k + half), there, line)
                for k, (group, half) in quarters:
                    v.intrinsic("llvm.x86.tdpbf16ps", v.VOID, number(k), number(6 + group), number(4 + half))

            _each(left, add_block)
            for k, _ in quarters:
                v.intrinsic("llvm.x86.tilestored64", v.VOID, number(k), v.pointer(sums_of(r, q) + REGISTER * k), line)

        _each(pairs + pairs, expand_panel)
        _each(rows, lambda r: _each(pairs, lambda q: multiply(r, q)))

    def write(r: Value, q: Value) -> None:
        mask = first_lanes(columns - q * PAIR, PAIR)

        def row(i: Value) -> None:
            for group in range(2):
                at = [sums_of(r, q) + i * 64 + REGISTER * (2 * group + half) for half in range(2)]
                out = v.join(*(narrowed(v.load(place, v.F32, align=64)) for place in at))
                v.store(y + stride * (r * PAIR + i + 16 * group) + q * (2 * PAIR), out, align=2, mask=mask)

        _each(v.literal(v.I64, 16), row)

    _begin(v.reserve(64), before, {})
    _each(units * blocks + CHUNK - 1 >> 3, add_chunk)
    _each(rows, lambda r: _each(pairs, lambda q: write(r, q)))
    v.intrinsic("llvm.x86.ldtilecfg", v.VOID, v.pointer(before))


def _each(count: Value, do: Callable[[Value], None]) -> None:
    """Call do(i) for i from 0 to count - 1, at least once."""

    def body(i: Value, _: list[Value]) -> list[Value]:
        do(i)
        return []

    v.loop(count, [], body)
