"""What a matrix product and an attention take on the first forward over a number of nodes, and on later ones.

    python benchmarks/shapes.py --threads 2

oneDNN, and torch's attention, compile kernels for every shape they meet. bfloat16 on a CPU with units for it; widths
are those of a layer and the head of models/demo.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F

from paceline.target.linear import Linear

SHAPES = ((640, 384), (384, 384), (1536, 384), (384, 768), (8192, 384))
"""(out, in) of qkv, out, gate and up, down, and the head."""
KV_HEADS, SHARED, DIM = 2, 3, 64
LATER = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    layers = [Linear(torch.randn(shape).bfloat16()) for shape in SHAPES]
    inputs = [torch.randn(96, width).bfloat16() for _, width in SHAPES]
    show("products of 1 to 96 rows", [partial(products, layers, inputs, rows) for rows in range(1, 97)])
    for granule in (16, 64):
        cases = [(nodes, keys) for nodes in range(2, 34) for keys in range(granule, 513, granule)]
        show(f"attention of 2 to 33 nodes to up to 512 keys, by {granule}", [attention(*case) for case in cases])


def products(layers: list[Linear], inputs: list[torch.Tensor], rows: int) -> None:
    """Every product of a layer, and the head's, over so many rows."""
    for layer, x in zip(layers, inputs, strict=True):
        layer(x[:rows])


def attention(nodes: int, keys: int) -> Callable[[], object]:
    """A layer's attention of so many nodes to so many keys."""
    q = torch.randn(1, KV_HEADS, nodes * SHARED, DIM).bfloat16()
    k, v = torch.randn(2, 1, KV_HEADS, keys, DIM).bfloat16()
    mask = torch.zeros(1, 1, nodes * SHARED, keys).bfloat16()
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def show(title: str, cases: list[Callable[[], object]]) -> None:
    firsts = sum(milliseconds(case) for case in cases)
    later = sum(median(milliseconds(case) for _ in range(LATER)) for case in cases)
    print(f"{title}: {len(cases)} shapes, the first time {firsts:.0f} ms, later {later:.0f}")


def milliseconds(case: Callable[[], object]) -> float:
    began = perf_counter()
    case()
    return 1e3 * (perf_counter() - began)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
