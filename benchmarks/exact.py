"""What exactness costs: forwards with `make_exact` and without, in turn, the same weights.

    python benchmarks/exact.py models/demo --threads 2
    python benchmarks/exact.py models/demo --threads 2 --wide      # six layers as wide as those of 1B parameters

Milliseconds, medians; every case follows 256 tokens of context, but for the prompt. Both ways in bfloat16 and float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from transformers import LlamaConfig, PretrainedConfig

from paceline.core.segment import Segment
from paceline.target.decoder import Decoder
from paceline.target.load import load
from paceline.target.shape import weight_shapes

CONTEXT, PROMPT, TURNS, AT_ONCE = 256, 512, 9, 4
"""Tokens; turns of either way; forwards of a turn, of which the first warms the caches."""


def wide() -> PretrainedConfig:
    """Six layers as wide as those of a model of 1B parameters, more than caches hold."""
    return LlamaConfig(
        hidden_size=1536, num_hidden_layers=6, num_attention_heads=24, num_key_value_heads=8, head_dim=64,
        intermediate_size=5312, vocab_size=8192, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip


def cases(target: Decoder) -> dict[str, Callable[[], object]]:
    """name -> one forward."""
    rng = np.random.default_rng(0)
    slots = [target.add_row(CONTEXT + 32) for _ in range(8)]
    for slot in slots:
        target.verify([Segment.chunk(slot, rng.integers(4, 8000, CONTEXT), last=False)])
        target.commit(slot, range(CONTEXT))
    empty = target.add_row(PROMPT)

    def nodes(slot: int, parents: list[int]) -> Segment:
        return Segment(slot, np.full(len(parents), 7), np.array(parents), num_logits=len(parents))

    chain, tree = list(range(-1, 15)), [-1, *[(i - 1) // 2 for i in range(1, 16)]]
    segments = {
        "1 token": [nodes(slots[0], [-1])],
        "chain of 16": [nodes(slots[0], chain)],
        "tree of 16": [nodes(slots[0], tree)],
        "batch 8": [nodes(slot, [-1]) for slot in slots],
        f"prompt of {PROMPT}": [Segment.chunk(empty, rng.integers(4, 8000, PROMPT), last=True)],
    }
    return {name: lambda given=given: target.verify(given) for name, given in segments.items()}


def milliseconds(forward: Callable[[], object], count: int) -> list[float]:
    """Of `count` forwards in a row, but for the first."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        forward()
        times.append(1e3 * (time.perf_counter() - began))
    return times[1:]


def main() -> None:
    """Print a line for every dtype and case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--wide", action="store_true", help="random weights of another width")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"{'':24}{'usual':>9}{'exact':>9}{'ratio':>8}")
    for dtype in (torch.bfloat16, torch.float32):
        ways = {}
        for way in ("usual", "exact"):
            if options.wide:
                config = wide()
                weights = {name: 0.02 * torch.randn(shape) for name, shape in weight_shapes(config).items()}
                target = Decoder(config, weights, dtype=dtype)
                del weights
            else:
                target = load(options.model, dtype=dtype, device="cpu", native=True)
                assert isinstance(target, Decoder)
            if way == "exact":
                target.make_exact()
            ways[way] = cases(target)
        for case in ways["usual"]:
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(TURNS if not case.startswith("prompt") else 2):
                for way, forwards in ways.items():
                    times[way] += milliseconds(forwards[case], AT_ONCE)
            usual, exact = (median(times[way]) for way in ("usual", "exact"))
            name = f"{str(dtype).removeprefix('torch.')}, {case}"
            print(f"{name:24}{usual:9.2f}{exact:9.2f}{exact / usual:8.2f}", flush=True)


if __name__ == "__main__":
    main()
