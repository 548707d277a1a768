"""A layer's matrix products by oneDNN and by our panels (target/kernels/products.py), by the number of rows.

    python benchmarks/products.py                                # widths of models/demo, as often as it has layers
    python benchmarks/products.py --hidden 1536 --mlp 5312       # of 1B parameters; six layers, more than caches hold

Both in turn, medians; bfloat16. GB/s is what is read of the weights, GFLOPS what is computed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from paceline.target import kernels
from paceline.target.kernels.products import Panels

ROWS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 64, 256, 1000)
TURNS = 21


def main() -> None:
    """Print a line for every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--mlp", type=int, default=768)
    parser.add_argument("--layers", type=int)
    wish = parser.parse_args()
    if not kernels.supported():
        parser.error("this CPU has no AVX-512 BF16, or torch runs on another OpenMP than GNU's")
    layers = wish.layers or (8 if wish.hidden < 1024 else 6)
    shapes = [(wish.hidden * 5 // 3 // 32 * 32, wish.hidden), (wish.hidden, wish.hidden)]
    shapes += [(2 * wish.mlp, wish.hidden), (wish.hidden, wish.mlp)]
    weights = [torch.randn(shape).bfloat16() for _ in range(layers) for shape in shapes]
    ways = {"oneDNN": [onednn(weight) for weight in weights], "panels": [Panels(weight) for weight in weights]}
    print("rows " + "".join(f"{name:>9} ms   GB/s GFLOPS" for name in ways) + "   ratio")
    for rows in ROWS:
        x = {width: torch.randn(rows, width).bfloat16() for width in (wish.hidden, wish.mlp)}
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(TURNS if rows < 64 else 3):
            for name, multiply in ways.items():
                began = time.perf_counter()
                for product, weight in zip(multiply, weights, strict=True):
                    product(x[weight.shape[1]])
                took[name].append(time.perf_counter() - began)
        size = sum(weight.numel() for weight in weights)
        seconds = {name: median(times) for name, times in took.items()}
        read = 2e-9 * size  # bytes, and flops of a row: two of each for a weight
        line = "".join(f"{1e3 * s:12.2f} {read / s:6.1f} {read * rows / s:6.0f}" for s in seconds.values())
        print(f"{rows:4} {line} {seconds['oneDNN'] / seconds['panels']:7.2f}")


def onednn(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product as `Linear` has oneDNN do it."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return partial(_linear, packed)


def _linear(packed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out


if __name__ == "__main__":
    main()
