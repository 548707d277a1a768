"""The compiled steps between a layer's matrix products, beside torch's own: microseconds, and how far they differ.

    python benchmarks/steps.py

Shapes of the 135M Llama in benchmarks/forward.py, bfloat16, one row, warm caches, medians. Within a forward caches
are cold and everything takes longer; the ratio is the point.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from forward import CONTEXT, SHAPES
from paceline.core.segment import Segment
from paceline.target.attention import TorchOps
from paceline.target.cache import RaggedCache
from paceline.target.kernels.steps import FusedOps
from paceline.target.layout import plan
from paceline.target.shape import Shape, rotary_tables


def microseconds(function: Callable[[], object], rounds: int) -> float:
    """Median of `rounds` calls, after a tenth as many to warm up."""
    seconds = []
    for turn in range(rounds + rounds // 10):
        begin = time.perf_counter()
        function()
        if turn >= rounds // 10:
            seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds)


def steps(ops: TorchOps, shape: Shape, n: int) -> dict[str, Callable[[], torch.Tensor]]:
    """name -> the step on random numbers, the same for every implementation."""
    generator = torch.Generator().manual_seed(n)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    cache = RaggedCache(1, shape.num_kv_heads, shape.head_dim, shape.max_context, torch.bfloat16, "cpu")
    segment = Segment(cache.add_row(CONTEXT + n), np.arange(n), np.arange(-1, n - 1), num_logits=n)
    layout = plan([segment], [CONTEXT], dtype=torch.bfloat16)
    writer = cache.writer(layout)
    ops.begin(layout)
    x, delta, weight = random(n, shape.hidden_size), random(n, shape.hidden_size), random(shape.hidden_size)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    qkv, gate_up = random(n, heads + 2 * kv_heads, shape.head_dim), random(n, 2 * shape.intermediate_size)
    return {
        "norm": lambda: ops.norm(x, weight),
        "add and norm": lambda: ops.add_norm(x, delta, weight)[1],
        "rotate and cache": lambda: ops.rotate(qkv, heads, kv_heads, None, writer, 0),
        "gate": lambda: ops.gate(gate_up),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500, help="measurements of each step (default 500)")
    rounds = parser.parse_args().rounds
    config = SHAPES["135M"]
    shape = Shape.of(config)
    cos, sin = (table.bfloat16() for table in rotary_tables(config, shape))
    table = Table("step", "tokens", "torch µs", "compiled µs", "largest difference")
    with torch.inference_mode():
        for n in (1, 16):
            reference, compiled = (steps(kind(cos, sin, shape.eps), shape, n) for kind in (TorchOps, FusedOps))
            for name in reference:
                slow, fast = microseconds(reference[name], rounds), microseconds(compiled[name], rounds)
                apart = (reference[name]().float() - compiled[name]().float()).abs().max()
                table.add_row(name, str(n), f"{slow:.1f}", f"{fast:.1f}", f"{float(apart):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
