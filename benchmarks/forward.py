"""What one forward costs, ours beside transformers', and what the engine adds to it.

    python benchmarks/forward.py                # about a minute
    python benchmarks/forward.py --rounds 41 --threads 2 --json

A Llama shape of 135M parameters with random weights (speed does not depend on what they are), bfloat16, 256 tokens
of context. All variants are measured in turn within one process, so that a drifting machine moves them together; the
ratios are the point, the milliseconds are this machine's. "products" is the floor: the same weights' matrix products
and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import DraftTree, Engine, SamplingParams
from paceline.draft.base import Drafter
from paceline.round import Segment
from paceline.target.decoder import Decoder

CONTEXT = 256
TOKENS = (1, 8, 16, 32)
FORWARD = ("layers", "head")
"""The clock's parts that are the model itself; everything else is the engine's own work."""


def shape_135m() -> LlamaConfig:
    """30 layers, hidden 576, 9 query and 3 key/value heads, MLP 1536, vocabulary 49,152, tied."""
    return LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


class Guess(Drafter):
    """Drafts `depth` fixed tokens: the cost of a round without a drafter's own."""

    name = "guess"

    def __init__(self, depth: int):
        self.depth = depth

    def propose(self, rows):
        return [DraftTree.chain(row.last_token, [7] * min(self.depth, row.max_draft)) for row in rows]


def forwards(model: LlamaForCausalLM, decoder: Decoder) -> dict[str, Callable[[int], object]]:
    """name -> a function that runs one forward of n tokens behind the context."""
    prompt = np.random.default_rng(0).integers(0, decoder.vocab_size, CONTEXT)
    slot = decoder.add_row(CONTEXT + max(TOKENS))
    decoder.verify([Segment.chunk(slot, prompt, last=True)])
    decoder.commit(slot, range(CONTEXT))
    with torch.inference_mode():
        cache = model(torch.from_numpy(prompt)[None], use_cache=True).past_key_values

    @torch.inference_mode()
    def transformers(n: int) -> None:
        model(torch.zeros(1, n, dtype=torch.long), past_key_values=cache, use_cache=True)
        cache.crop(-n)

    def ours(n: int) -> None:
        decoder.verify([Segment(slot, np.zeros(n, np.int64), np.arange(-1, n - 1), num_logits=n)])

    @torch.inference_mode()
    def products(n: int) -> None:
        hidden, wide = torch.zeros(n, 576, dtype=torch.bfloat16), torch.zeros(n, 1536, dtype=torch.bfloat16)
        for block in decoder.blocks:
            for linear, x in ((block.qkv, hidden), (block.out, hidden), (block.gate_up, hidden), (block.down, wide)):
                linear(x)
        decoder.head(hidden)

    return {"transformers": transformers, "paceline": ours, "products": products}


def median_ms(functions: dict[str, Callable[[int], object]], rounds: int) -> dict[tuple[str, int], float]:
    """Median milliseconds of every (function, tokens), measured in turn."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(rounds + 2):
        for n in TOKENS:
            for name, function in functions.items():
                begin = time.perf_counter()
                function(n)
                if turn >= 2:  # the first two turns warm up
                    seconds.setdefault((name, n), []).append(time.perf_counter() - begin)
    return {key: 1e3 * statistics.median(values) for key, values in seconds.items()}


def engine_share(decoder: Decoder, depth: int, rounds: int, temperature: float) -> tuple[float, float]:
    """(milliseconds a round, share of it outside the model) of rounds that verify `depth` drafted tokens."""
    engine = Engine(decoder, Guess(depth), reuse=False)
    prompt = np.random.default_rng(1).integers(0, decoder.vocab_size, CONTEXT)
    row = engine.add(prompt.tolist(), SamplingParams(max_tokens=1000, temperature=temperature, ignore_eos=True, seed=0))
    for _ in range(4):
        engine.step()
    engine.clock.seconds.clear()
    engine.rounds = 0
    for _ in range(rounds):
        engine.step()
    engine.abort(row)
    return 1e3 * engine.profile.seconds / rounds, 1 - engine.profile.share(*FORWARD)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="measurements of each variant (default 21)")
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's own)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = shape_135m()
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    decoder = Decoder(config, model.state_dict(), name="random 135M", dtype=torch.bfloat16)
    times = median_ms(forwards(model, decoder), options.rounds)
    base = times["transformers", 1]
    one = times["paceline", 1]
    shares = {
        f"{depth} drafted, temperature {heat}": engine_share(decoder, depth, options.rounds, heat)
        for depth in (0, 15)
        for heat in (0.0, 0.8)
    }
    if options.json:
        print(
            json.dumps(
                {
                    "threads": torch.get_num_threads(),
                    "milliseconds": {f"{name}/{n}": ms for (name, n), ms in times.items()},
                    "decode_over_transformers": one / base,
                    "verify16_over_decode": times["paceline", 16] / one,
                    "outside_the_model": {name: share for name, (_, share) in shares.items()},
                }
            )
        )
        return
    console = Console()
    table = Table(title=f"Milliseconds a forward, medians of {options.rounds}, {torch.get_num_threads()} threads")
    for column in ("tokens", "transformers", "paceline", "products", "over transformers 1", "over its own 1"):
        table.add_column(column, justify="right")
    for n in TOKENS:
        t, p, f = (times[name, n] for name in ("transformers", "paceline", "products"))
        table.add_row(str(n), f"{t:.1f}", f"{p:.1f}", f"{f:.1f}", f"{p / base:.2f}", f"{p / one:.2f}")
    console.print(table)
    table = Table(title="A round of the engine, batch 1")
    for column in ("round", "ms", "outside the model"):
        table.add_column(column, justify="right" if column != "round" else "left")
    for name, (ms, share) in shares.items():
        table.add_row(name, f"{ms:.1f}", f"{100 * share:.1f} %")
    console.print(table)


if __name__ == "__main__":
    main()
