"""A model's matrix products in bfloat16 and in blocks of eight and four bits (kernels/integer.py), by number of rows.

    python benchmarks/quantised.py                        # six layers and a head of 1B parameters' width, two threads
    python benchmarks/quantised.py --threads 1
    python benchmarks/quantised.py --kinds Q4_K --rows 1 8 16 32 128 512 --paths vnni
    PACELINE_CPU=avx2 python benchmarks/quantised.py --kinds Q4_K Q8_0 --activations 8 16

All ways in turn, the least of all turns in milliseconds, for other processes only ever add time (with one thread, of
its processor time: they then add little); in brackets how many of its own first column that is. Random weights: speed
does not depend on them. The head is in Q8_0, as --dtype int4 makes it, and in Q6_K beside Q4_K, Q5_K and Q6_K. --paths:
exact products by instructions of kernels/integer.py too, those of other processors as far as this one has them.
bfloat16: by oneDNN where this CPU has AMX, else by our panels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch

from paceline.target import kernels
from paceline.target.kernels import integer
from paceline.target.kernels.integer import IntegerPanels
from paceline.target.linear import Linear
from paceline.target.quantised.blocks import KINDS, Q6_K, Q8_0, Blocks, Kind

NAMES = [kind.name for kind in KINDS.values()]


def main() -> None:
    """Print a table: a line for each format, a column for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--mlp", type=int, default=5376)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--kinds", nargs="+", choices=NAMES, default=["Q8_0", "Q4_0"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16])
    known = integer.instruction_sets()
    parser.add_argument("--paths", nargs="+", choices=known, default=[], help="exact products, by these")
    parser.add_argument("--activations", nargs="+", type=int, choices=[8, 16], default=[8], help="bits of inputs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--ggml", type=Path, help="folder with llama.cpp's libggml*.so, to measure its products too")
    wish = parser.parse_args()
    torch.set_num_threads(wish.threads)
    h, m = wish.hidden, wish.mlp
    shapes = [(h * 5 // 3, h), (h, h), (2 * m, h), (h, m)] * wish.layers
    library = None
    if wish.ggml is not None:
        from ggml import Library, Products

        library = Library(wish.ggml, wish.threads)
    ways: dict[str, Callable[[int], None]] = {}
    if kernels.supported():
        dense = [torch.randn(shape).bfloat16() for shape in (*shapes, (wish.vocab, h))]
        ways["bfloat16"] = multiplied([Linear(weight) for weight in dense], [h, h, h, m] * wish.layers + [h], wish.rows)
        if library is not None:
            ways["bfloat16, ggml"] = Products(library, dense)
    for kind in (kind for kind in KINDS.values() if kind.name in wish.kinds):
        layers = [random_blocks(kind, *shape) for shape in shapes]
        head = random_blocks(Q6_K if kind.inputs == Q6_K.inputs else Q8_0, wish.vocab, h)
        for path, bits in product((None, *wish.paths), wish.activations):
            weights = [Blocks(weight.kind, weight.data, bits) for weight in (*layers, head)]
            panels = [IntegerPanels([weight], exact=path is not None) for weight in weights]
            name = ", ".join([kind.name, *([path] if path else []), *(["16 bits"] if bits == 16 else [])])
            ways[name] = multiplied(panels, [p.width for p in panels], wish.rows, path or integer.instruction_set())
        if library is not None:
            ways[f"{kind.name}, ggml"] = Products(library, [*layers, head])
    print(f"{wish.threads} threads, milliseconds")
    print("rows           " + "".join(f"{rows:>16}" for rows in wish.rows))
    took = measured(ways, wish.rows, wish.turns)
    for name in ways:
        alone = took[name, wish.rows[0]]
        print(f"{name:15}" + "".join(f"{took[name, n]:10.2f} ({took[name, n] / alone:3.1f})" for n in wish.rows))


def multiplied(
    products: Sequence[Callable[[torch.Tensor], torch.Tensor]], widths: Sequence[int], counts: Sequence[int],
    path: str = integer.instruction_set(),
) -> Callable[[int], None]:  # fmt: skip
    """All products with so many rows; path: by these instructions."""
    x = {(n, width): torch.randn(n, width).bfloat16() for n in counts for width in set(widths)}

    def multiply(rows: int) -> None:
        with patch.object(integer, "path", lambda: path):
            for multiplied_by, width in zip(products, widths, strict=True):
                multiplied_by(x[rows, width])

    return multiply


def measured(
    ways: Mapping[str, Callable[[int], None]], counts: Sequence[int], turns: int
) -> dict[tuple[str, int], float]:
    """Least milliseconds of all products, by way and number of rows."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in ways for rows in counts}
    for turn in range(turns + 1):  # the first one is not counted
        for rows in counts:
            for name, multiply in ways.items():
                began = clock()
                multiply(rows)
                times[name, rows] += [1e3 * (clock() - began)] * (turn > 0)
    return {key: min(values) for key, values in times.items()}


def random_blocks(kind: Kind, outputs: int, width: int) -> Blocks:
    """Blocks of random bytes below 64, so that scales are numbers below 2."""
    return Blocks(kind, torch.randint(0, 64, (outputs, width // kind.inputs * kind.nbytes), dtype=torch.uint8))


if __name__ == "__main__":
    main()
