"""What one forward costs, ours beside transformers', and what the engine adds to it.

    python benchmarks/forward.py                # about a minute
    python benchmarks/forward.py --rounds 41 --threads 2 --json
    python benchmarks/forward.py --device cuda --shape 7B
    python benchmarks/forward.py --families     # a small model of every native family, beside transformers'

Llama shapes with random weights (speed does not depend on what they are), bfloat16, 256 tokens of context. All variants
are measured in turn within one process, so that a drifting machine moves them together; the ratios are the point, the
milliseconds are this machine's. "products" is the floor: the same weights' matrix products and nothing else. On a GPU,
"kernel by kernel" is ours without recorded forwards, and "transformers, compiled" is torch.compile over a static cache,
recorded as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from paceline import DraftTree, Engine, SamplingParams
from paceline.core.segment import Segment
from paceline.draft.base import Drafter
from paceline.target.decoder import Decoder
from paceline.target.shape import as_checkpoint

CONTEXT = 256
TOKENS = (1, 8, 16, 32)
WARM = 3
"""Turns before those that count: kernels are compiled and forwards recorded."""
FORWARD = ("layers", "head")
"""The clock's parts that are the model itself; everything else is the engine's own work."""


SHAPES = {
    "135M": LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    "7B": LlamaConfig(max_position_embeddings=4096),  # transformers' default is Llama 7B
}
SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4}
STATES = {"head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 128, "query_pre_attn_scalar": 128, "sliding_window": 512}),
    "granite": ("GraniteConfig", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {}),
    "phi3": ("Phi3Config", {}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 64, "moe_intermediate_size": 256, "norm_topk_prob": True, **EXPERTS}),
    "olmoe": ("OlmoeConfig", {**EXPERTS, "intermediate_size": 256}),
    "qwen3-next": ("Qwen3NextConfig", {**STATES, **EXPERTS, "moe_intermediate_size": 256}),
    "qwen3.5": ("Qwen3_5TextConfig", STATES),
}
"""Of `--families`: the configuration's class, and what differs from SMALL."""


class Guess(Drafter):
    """Drafts `depth` fixed tokens: the cost of a round without a drafter's own."""

    name = "guess"

    def __init__(self, depth: int):
        self.depth = depth

    def propose(self, rows):
        return [DraftTree.chain(row.last_token, [7] * min(self.depth, row.max_draft)) for row in rows]


def forwards(model: PreTrainedModel, decoder: Decoder, compile: bool) -> dict[str, Callable[[int], object]]:
    """name -> a function that runs one forward of n tokens after the context."""
    prompt = np.random.default_rng(0).integers(0, decoder.vocab_size, CONTEXT)
    slot = decoder.add_row(CONTEXT + max(TOKENS))
    decoder.verify([Segment.chunk(slot, prompt, last=True)])
    decoder.commit(slot, range(CONTEXT))
    device, config = decoder.device, model.config
    with torch.inference_mode():
        cache = model(torch.from_numpy(prompt)[None].to(device), use_cache=True).past_key_values

    @torch.inference_mode()
    def theirs(n: int) -> None:
        model(torch.zeros(1, n, dtype=torch.long, device=device), past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            if layer.is_croppable:  # states go on from turn to turn, which takes the same time
                layer.crop(-n)

    def ours(n: int) -> None:
        decoder.verify([Segment(slot, np.zeros(n, np.int64), np.arange(-1, n - 1), num_logits=n)])

    def kernel_by_kernel(n: int) -> None:
        recorder, decoder.recorder = decoder.recorder, None
        ours(n)
        decoder.recorder = recorder

    @torch.inference_mode()
    def products(n: int) -> None:
        hidden, wide = (
            torch.zeros(n, width, dtype=torch.bfloat16, device=device)
            for width in (config.hidden_size, config.intermediate_size)
        )
        for layer in decoder.layers:
            for linear, x in zip(layer.products, (hidden, hidden, hidden, wide), strict=True):
                linear(x)
        decoder.head(hidden)

    if device.type == "cpu":
        return {"transformers": theirs, "paceline": ours, "products": products}
    also = {"transformers, compiled": compiled(model, CONTEXT)} if compile else {}
    return {
        "transformers": theirs,
        **also,
        "kernel by kernel": kernel_by_kernel,
        "paceline": ours,
        "products": recorded(products),
    }


def compiled(model: PreTrainedModel, begin: int) -> Callable[[int], object]:
    """transformers' forward over a static cache, compiled and recorded by torch."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=512)
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def run(n: int) -> None:
        at = torch.arange(begin, begin + n, device=model.device)
        tokens = torch.zeros(1, n, dtype=torch.long, device=model.device)
        mask = torch.ones(1, begin + n, dtype=torch.long, device=model.device)
        forward(tokens, attention_mask=mask, position_ids=at[None], cache_position=at, past_key_values=cache)

    return run


def recorded(function: Callable[[int], object]) -> Callable[[int], object]:
    """`function` as one CUDA graph for each number."""
    graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(n: int) -> None:
        if n not in graphs:
            function(n)
            graphs[n] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[n]):
                function(n)
        graphs[n].replay()

    return run


def wait() -> None:
    """Until the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_ms(
    functions: dict[str, Callable[[int], object]], tokens: Sequence[int], rounds: int
) -> dict[tuple[str, int], float]:
    """Median milliseconds of every (function, tokens), measured in turn."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(rounds + WARM):
        for n in tokens:
            for name, function in functions.items():
                wait()
                begin = time.perf_counter()
                function(n)
                wait()
                if turn >= WARM:
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


def made(config: PretrainedConfig, name: str, device: str) -> tuple[PreTrainedModel, Decoder]:
    """A random model in bfloat16, and ours with its weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    state = as_checkpoint(model.state_dict())
    return model, Decoder(config, state, name=name, dtype=torch.bfloat16, device=device)


def families(options: argparse.Namespace) -> None:
    """Print the times of a forward of every family, ours and transformers'."""
    times: dict[str, dict[tuple[str, int], float]] = {}
    for name, (kind, values) in FAMILIES.items():
        model, decoder = made(getattr(transformers, kind)(**SMALL | values), name, options.device)
        both = {key: run for key, run in forwards(model, decoder, False).items() if key in ("transformers", "paceline")}
        times[name] = median_ms(both, options.tokens, options.rounds)
    if options.json:
        print(json.dumps({name: {f"{who}/{n}": ms for (who, n), ms in of.items()} for name, of in times.items()}))
        return
    table = Table(title=f"Milliseconds a forward, medians of {options.rounds}, {torch.get_num_threads()} threads")
    for column in ("family", "tokens", "transformers", "paceline", "ratio"):
        table.add_column(column, justify="right" if column != "family" else "left")
    for name, of in times.items():
        for n in options.tokens:
            theirs, ours = of["transformers", n], of["paceline", n]
            table.add_row(name, str(n), f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.2f}")
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="measurements of each variant (default 21)")
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's own)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--shape", default="135M", choices=SHAPES, help="parameters of the model (default 135M)")
    parser.add_argument("--compile", action="store_true", help="on a GPU, transformers compiled too; takes minutes")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a forward (default 1 8 16 32)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--families", action="store_true", help="a small model of every family instead")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.families:
        families(options)
        return
    model, decoder = made(SHAPES[options.shape], f"random {options.shape}", options.device)
    variants = forwards(model, decoder, options.compile)
    times = median_ms(variants, options.tokens, options.rounds)
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
                    "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
                    "milliseconds": {f"{name}/{n}": ms for (name, n), ms in times.items()},
                    "decode_over_transformers": one / base,
                    "verify16_over_decode": times["paceline", 16] / one if 16 in options.tokens else None,
                    "outside_the_model": {name: share for name, (_, share) in shares.items()},
                }
            )
        )
        return
    console = Console()
    table = Table(title=f"Milliseconds a forward, medians of {options.rounds}, {torch.get_num_threads()} threads")
    for column in ("tokens", *variants, "over transformers 1", "over its own 1"):
        table.add_column(column, justify="right")
    for n in options.tokens:
        cells = [f"{times[variant, n]:.2f}" for variant in variants]
        own = times["paceline", n]
        table.add_row(str(n), *cells, f"{own / base:.2f}", f"{own / one:.2f}")
    console.print(table)
    table = Table(title="A round of the engine, batch 1")
    for column in ("round", "ms", "outside the model"):
        table.add_column(column, justify="right" if column != "round" else "left")
    for name, (ms, share) in shares.items():
        table.add_row(name, f"{ms:.1f}", f"{100 * share:.1f} %")
    console.print(table)


if __name__ == "__main__":
    main()
