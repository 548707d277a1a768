"""What forwards and their parts cost, ours beside torch's and transformers': one timer, one table.

    python benchmarks/forward.py --threads 2 --rounds 41            # a model beside transformers', and rounds of ours
    python benchmarks/forward.py --device cuda --shape 7B           # --compile: transformers compiled too, minutes
    python benchmarks/forward.py families                           # a small model of every native family
    python benchmarks/forward.py products --kinds float32 bfloat16 panels Q8_0 Q4_K --tokens 1 8 128
    python benchmarks/forward.py steps                              # compiled steps between products, beside torch's
    python benchmarks/forward.py exact models/demo                  # what `make_exact` costs
    python benchmarks/forward.py program FILE.gguf                  # what recording forwards of a model saves
    python benchmarks/forward.py shape --shape 8B --file FILE.gguf  # a random Q4_K file of this shape, and its rows
    python benchmarks/forward.py shape --shape 30B-A3B --tokens 1 2 3 5  # in memory, with its head for MTP
    python benchmarks/forward.py context FILE.gguf --lengths 512 8192  # after long texts: forwards, attention, torch's

Weights are random (speed does not depend on what they are) but for given models; forwards follow 256 tokens. A line
has milliseconds by number of tokens, in brackets how many times the line's first column. All lines of a table are
measured in turn within one process, so that a drifting machine moves them together; figures are medians, with --least
the least of all turns, for a busy machine. "products" of `forward` is its floor: the same weights' products alone. On a
GPU, "kernel by kernel" is ours without recorded forwards.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from statistics import median

import gguf
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree
from paceline.draft.base import Drafter
from paceline.draft.methods.mtp import MtpNetwork
from paceline.engine.engine import Engine
from paceline.formats.experts import as_checkpoint
from paceline.formats.heads.mtp import OUTER, head_shape
from paceline.formats.rotary import turns_of
from paceline.formats.shape import ATTENTION, ROUTER, UNQUANTISED, Shape, layer_shapes, weight_shapes
from paceline.kernels.blocks import KINDS, Q4_K, Q6_K, Q8_0, Blocks, Kind, Weights
from paceline.kernels.integer import IntegerPanels
from paceline.kernels.linear import has_units
from paceline.kernels.ops import TorchOps
from paceline.kernels.products import Panels
from paceline.kernels.steps import FusedOps
from paceline.target.attention import attend
from paceline.target.cache import RaggedCache
from paceline.target.decoder import Decoder
from paceline.target.layout import plan
from paceline.target.load import load

CONTEXT = 256
WARM = 3
"""Turns before those that count: kernels are compiled and forwards recorded."""
FORWARD = ("layers", "head")
"""The clock's parts that are the model itself; everything else is the engine's own work."""

Ways = dict[str, Callable[[int], object]]
"""What is timed, by name: a function of a number of tokens."""

SMALL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 16384, "max_position_embeddings": 2048, "pad_token_id": None,
}  # fmt: skip
QWEN35 = {
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "vocab_size": 248320, "max_position_embeddings": 16384,
}  # fmt: skip
SHAPES: dict[str, PretrainedConfig] = {
    "135M": LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
        vocab_size=49152, max_position_embeddings=2048, tie_word_embeddings=True,
    ),
    "wide": LlamaConfig(
        hidden_size=1536, num_hidden_layers=6, num_attention_heads=24, num_key_value_heads=8, head_dim=64,
        intermediate_size=5312, vocab_size=8192, max_position_embeddings=2048, tie_word_embeddings=True,
    ),
    "demo": LlamaConfig(
        hidden_size=384, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2, intermediate_size=768,
        vocab_size=8192, max_position_embeddings=2048, tie_word_embeddings=True,
    ),
    "8B": LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        vocab_size=128256, max_position_embeddings=16384,
    ),
    "7B": LlamaConfig(max_position_embeddings=4096),  # transformers' default is Llama 7B
    "qwen3.5-4B": Qwen3_5TextConfig(**QWEN35, hidden_size=2560, intermediate_size=9216, tie_word_embeddings=True),
    "qwen3.5-9B": Qwen3_5TextConfig(**QWEN35, hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
    "30B-A3B": Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
        norm_topk_prob=True, max_position_embeddings=16384, tie_word_embeddings=False,
    ),
}  # fmt: skip
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
"""The configuration's class, and what differs from SMALL."""


# Timing --------------------------------------------------------------------------------------------------------------


def wait() -> None:
    """Until the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_ms(
    ways: Ways, tokens: Sequence[int], rounds: int, average: Callable[[list[float]], float] = median
) -> dict[tuple[str, int], float]:
    """Milliseconds of every (way, tokens), measured in turn. average: of all turns."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(rounds + WARM):
        for n in tokens:
            for name, function in ways.items():
                wait()
                begin = time.perf_counter()
                function(n)
                wait()
                if turn >= WARM:
                    seconds.setdefault((name, n), []).append(time.perf_counter() - begin)
    return {key: 1e3 * average(values) for key, values in seconds.items()}


def show(ways: Ways, asked: argparse.Namespace) -> None:
    """Measure, and print a line for every way."""
    times = median_ms(ways, asked.tokens, asked.rounds, min if asked.least else median)
    print(f"| ms, {torch.get_num_threads()} threads | {' | '.join(map(str, asked.tokens))} |")
    print(f"|---|{'---:|' * len(asked.tokens)}")
    for name in ways:
        cells = (f"{times[name, n]:.3g} ({times[name, n] / times[name, asked.tokens[0]]:.2f})" for n in asked.tokens)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


# Forwards ------------------------------------------------------------------------------------------------------------


class Guess(Drafter):
    """Drafts `depth` fixed tokens: the cost of a round without a drafter's own."""

    name = "guess"

    def __init__(self, depth: int):
        self.depth = depth

    def propose(self, asks):
        return [DraftTree.chain(row.last_token, [7] * min(self.depth, most)) for row, most in asks]


def made(config: PretrainedConfig, name: str, device: str) -> tuple[PreTrainedModel, Decoder]:
    """A random model in bfloat16, and ours with its weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    state = as_checkpoint(model.state_dict())
    return model, Decoder(config, state, name=name, dtype=torch.bfloat16, device=device)


def filled_rows(decoder: Decoder, count: int, room: int) -> list[int]:
    """Rows with CONTEXT tokens, and room for more."""
    slots = [decoder.add_row(CONTEXT + room) for _ in range(count)]
    for slot in slots:
        prompt = np.random.default_rng(0).integers(0, decoder.vocab_size, CONTEXT)
        decoder.verify([Segment.chunk(slot, prompt, last=True)])
        decoder.commit(slot, range(CONTEXT))
    return slots


def nodes(slot: int, parents: Sequence[int]) -> Segment:
    return Segment(slot, np.zeros(len(parents), np.int64), np.array(parents), num_logits=len(parents))


def theirs(model: PreTrainedModel) -> Callable[[int], object]:
    """transformers' forward."""
    prompt = torch.randint(0, model.config.vocab_size, (1, CONTEXT), device=model.device)
    with torch.inference_mode():
        cache = model(prompt, use_cache=True).past_key_values

    @torch.inference_mode()
    def run(n: int) -> None:
        model(torch.zeros(1, n, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            if layer.is_croppable:  # states go on from turn to turn, which takes the same time
                layer.crop(-n)

    return run


def compiled(model: PreTrainedModel) -> Callable[[int], object]:
    """transformers' forward over a static cache, compiled and recorded by torch."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=512)
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def run(n: int) -> None:
        at = torch.arange(CONTEXT, CONTEXT + n, device=model.device)
        tokens = torch.zeros(1, n, dtype=torch.long, device=model.device)
        mask = torch.ones(1, CONTEXT + n, dtype=torch.long, device=model.device)
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


def forwards(model: PreTrainedModel, decoder: Decoder, asked: argparse.Namespace) -> Ways:
    """Both models' forwards, and ours in parts."""
    (slot,) = filled_rows(decoder, 1, max(asked.tokens))
    device, config = decoder.device, model.config

    def ours(n: int) -> None:
        decoder.verify([nodes(slot, range(-1, n - 1))])

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
        return {"transformers": theirs(model), "paceline": ours, "products": products}
    also = {"transformers, compiled": compiled(model)} if asked.compile else {}
    both = {"kernel by kernel": kernel_by_kernel, "paceline": ours, "products": recorded(products)}
    return {"transformers": theirs(model), **also, **both}


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


def forward(asked: argparse.Namespace) -> None:
    """A model, and rounds of the engine around it."""
    model, decoder = made(SHAPES[asked.shape], f"random {asked.shape}", asked.device)
    show(forwards(model, decoder, asked), asked)
    print("\n| a round, batch 1 | ms | outside the model |\n|---|---:|---:|")
    for depth, heat in ((0, 0.0), (0, 0.8), (15, 0.0), (15, 0.8)):
        ms, share = engine_share(decoder, depth, asked.rounds, heat)
        print(f"| {depth} drafted, temperature {heat:g} | {ms:.1f} | {share:.1%} |", flush=True)


def families(asked: argparse.Namespace) -> None:
    """A table for each family."""
    for name, (kind, values) in FAMILIES.items():
        model, decoder = made(getattr(transformers, kind)(**SMALL | values), name, asked.device)
        ways = forwards(model, decoder, asked)
        show({f"{name}, {one}": ways[one] for one in ("transformers", "paceline")}, asked)


def exact(asked: argparse.Namespace) -> None:
    """A forward as usual and with `make_exact`, by dtype: a chain, a tree, rows of one token, and a prompt."""

    def target(dtype: torch.dtype) -> Decoder:
        if asked.model:
            loaded = load(asked.model, dtype=dtype, device="cpu", native=True)
            assert isinstance(loaded, Decoder)
            return loaded
        config = SHAPES[asked.shape]
        weights = {name: 0.02 * torch.randn(shape) for name, shape in weight_shapes(config).items()}
        return Decoder(config, weights, dtype=dtype)

    for dtype in (torch.bfloat16, torch.float32):
        ways: Ways = {}
        for way in ("usual", "exact"):
            decoder = target(dtype)
            if way == "exact":
                decoder.make_exact()
            slots = filled_rows(decoder, max(asked.tokens), max(asked.tokens))
            empty = decoder.add_row(32 * max(asked.tokens))
            parts: dict[str, Callable[[int], list[Segment]]] = {
                "chain": lambda n, slots=slots: [nodes(slots[0], range(-1, n - 1))],  # type: ignore[misc]
                "tree": lambda n, slots=slots: [nodes(slots[0], [(i + 1) // 2 - 1 for i in range(n)])],  # type: ignore[misc]
                "rows": lambda n, slots=slots: [nodes(slot, [-1]) for slot in slots[:n]],  # type: ignore[misc]
                "prompt, 32 times": lambda n, empty=empty: [Segment.chunk(empty, np.full(32 * n, 7), last=True)],  # type: ignore[misc]
            }
            for part, given in parts.items():
                name = f"{str(dtype).removeprefix('torch.')}, {part}, {way}"
                ways[name] = lambda n, decoder=decoder, given=given: decoder.verify(given(n))  # type: ignore[misc]
        show(dict(sorted(ways.items(), key=lambda item: item[0].rsplit(",", 1)[0])), asked)


def program(asked: argparse.Namespace) -> None:
    """Forwards of a model over a chain, its layers in one recorded call (`kernels/program.py`) and one by one."""
    recorded = load(asked.model, dtype="auto", device="cpu", native=True)
    assert isinstance(recorded, Decoder)
    apart = recorded.apart()
    apart._programs = None
    ways: Ways = {}
    for name, decoder in (("one call", recorded), ("layer by layer", apart)):
        (slot,) = filled_rows(decoder, 1, max(asked.tokens))
        ways[name] = lambda n, decoder=decoder, slot=slot: decoder.verify([nodes(slot, range(-1, n - 1))])  # type: ignore[misc]
    show(ways, asked)


def shape(asked: argparse.Namespace) -> None:
    """Measure forwards of a random Q4_K model over a chain: of a file, which a Llama is written to if it is not there;
    or in memory, with as many layers as fit, and beside it a layer, the output head, and a head for multi-token
    prediction."""
    config = copy(SHAPES[asked.shape])
    if asked.file is None and not isinstance(config, LlamaConfig):
        return shape_in_memory(config, asked)
    file = asked.file or Path(f"random-{asked.shape}.gguf")
    if not file.exists():
        if not isinstance(config, LlamaConfig):
            raise SystemExit("only Llamas are written to a file; leave --file out")
        config.num_hidden_layers = asked.layers or config.num_hidden_layers
        write_random(config, file)
    decoder = load(str(file), dtype="auto", device="cpu", native=True)
    assert isinstance(decoder, Decoder)
    (slot,) = filled_rows(decoder, 1, max(asked.tokens))
    show({f"{asked.shape}, Q4_K": lambda n: decoder.verify([nodes(slot, range(-1, n - 1))])}, asked)


def shape_in_memory(config: PretrainedConfig, asked: argparse.Namespace) -> None:
    """Measure a model of random Q4_K blocks and its parts. A round that drafts k tokens in a chain takes k times the
    line of the head for multi-token prediction with one token, and the model's line with k + 1."""
    every = config.num_hidden_layers
    with_layers(config, asked.layers or most_layers(config))
    dtype = torch.bfloat16 if has_units(torch.bfloat16) else torch.float32
    weights = random_weights(weight_shapes(config))
    decoder = Decoder(config, weights, name=f"random {asked.shape}", dtype=dtype, spend=True)
    of_head = head_shapes(decoder.shape)
    network = MtpNetwork("a random head", random_weights(of_head), decoder)
    (slot,), most = filled_rows(decoder, 1, max(asked.tokens)), max(asked.tokens)
    states = torch.randn(CONTEXT + most, config.hidden_size).to(dtype)

    last = max(n for n, kind in enumerate(decoder.shape.layers) if not kind.recurrent)
    cache = decoder.new_cache(1, last)
    of_layer, of_mtp = cache.add_row(CONTEXT + most), network.cache.add_row(CONTEXT + most)

    def layer(segment: Segment) -> torch.Tensor:
        segment.hidden = states[: len(segment.tokens)]
        return decoder.run_layers([segment], last + 1, first=last, cache=cache)

    def mtp(segment: Segment) -> torch.Tensor:
        ids = torch.from_numpy(segment.tokens)
        return decoder.head(network.forward(network.embedded(ids), states[: len(ids)], [segment])[1])

    text = np.random.default_rng(0).integers(0, decoder.vocab_size, CONTEXT)
    layer(Segment.chunk(of_layer, text, last=False))
    cache.commit(of_layer, range(CONTEXT))
    mtp(Segment.chunk(of_mtp, text, last=True))
    network.cache.commit(of_mtp, range(CONTEXT))
    ways: Ways = {
        f"{asked.shape}, {config.num_hidden_layers} of {every} layers": lambda n: decoder.verify(
            [nodes(slot, range(-1, n - 1))]
        ),
        "one layer with attention": lambda n: layer(nodes(of_layer, range(-1, n - 1))),
        "output head": lambda n: decoder.logits(states[:n]),
        "head for multi-token prediction, with the output head": lambda n: mtp(nodes(of_mtp, range(-1, n - 1))),
    }
    print(f"{decoder.weight_bytes / 1e9:.2f} GB of weights a token, {dtype} between products")
    show(ways, asked)


def with_layers(config: PretrainedConfig, count: int) -> None:
    """Leave out layers after the first `count`."""
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = kinds[:count]
        if not set(ATTENTION) & set(config.layer_types):
            raise SystemExit(f"none of its first {count} layers has attention; name more --layers")
    config.num_hidden_layers = count


def most_layers(config: PretrainedConfig) -> int:
    """How many layers fit into 0.6 of the free memory, beside embedding and head; a multiple of 4, or all."""
    sizes = {name: np.prod(size) * Q4_K.nbytes / Q4_K.inputs for name, size in weight_shapes(config).items()}
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    free = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "Available" in line)
    room = 0.6 * 1024 * free - 2 * (sum(sizes.values()) - layers)
    count = int(room / layers * config.num_hidden_layers)
    return config.num_hidden_layers if count >= config.num_hidden_layers else max(count // 4 * 4, 4)


def head_shapes(target: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head for multi-token prediction; of a mixture, with experts."""
    mixture = [f"layers.0.{ROUTER}.weight"] if target.experts is not None else []
    of_head, h = head_shape(target, mixture), target.hidden_size
    of_layer = layer_shapes(of_head, kind=of_head.layers[0]) | {f"{of_head.norms[0]}.weight": (h,)}
    outer = dict(zip(OUTER, ((h, 2 * h), (h,), (h,), (h,)), strict=True))
    return outer | {f"layers.0.{name}": size for name, size in of_layer.items()}


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Random blocks of the matrices that `quantised` would quantise, and random numbers of the others. All are small:
    large ones would make denormal numbers in the gated delta rule, which take a hundred times as long."""
    small, made = tuple(f"{part}.weight" for part in UNQUANTISED), Weights()
    for name, size in shapes.items():
        fits = len(size) == 2 and size[1] % Q4_K.inputs == 0 and not name.endswith(small)
        kind = Q6_K if name == "lm_head.weight" else Q4_K
        made[name] = random_blocks(kind, *size, below=16) if fits else 0.02 * torch.randn(size)
    return made


def write_random(config: LlamaConfig, file: Path) -> None:
    """Write a Llama of random Q4_K blocks, with a head in Q6_K, as a GGUF file that other engines read, too."""
    if config.hidden_size % Q4_K.inputs or config.intermediate_size % Q4_K.inputs:
        raise SystemExit(f"its sizes are no multiples of {Q4_K.inputs}, the weights of a block; take another --shape")
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), "llama", use_temp_file=True)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    # A tokenizer of the bytes and one merge: files without any are refused.
    writer.add_token_list([*ByteLevel.alphabet(), "th", *(f"[{i}]" for i in range(config.vocab_size - 257))])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(0)
    h, m, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    matrices = {
        "attn_q": (h, h), "attn_k": (kv, h), "attn_v": (kv, h), "attn_output": (h, h),
        "ffn_gate": (m, h), "ffn_up": (m, h), "ffn_down": (h, m),
    }  # fmt: skip

    def add(name: str, kind: Kind, outputs: int, width: int) -> None:
        rng = np.random.default_rng(len(name))
        data = rng.integers(0, 64, (outputs, width // kind.inputs * kind.nbytes), np.uint8)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType(kind.number))

    add("token_embd", Q4_K, config.vocab_size, h)
    for layer in range(config.num_hidden_layers):
        for name, sizes in matrices.items():
            add(f"blk.{layer}.{name}", Q4_K, *sizes)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(h, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(h, np.float32))
    add("output", Q6_K, config.vocab_size, h)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()
    part.replace(file)


def context(asked: argparse.Namespace) -> None:
    """Forwards over a chain after texts of several lengths, and of these attention alone: ours and torch's.

    Keys and values are random. torch's attention reads the text's keys without a mask, so it lacks the chain's own.
    There, query heads that share a key head are queries of a single head."""
    decoder = load(asked.model, dtype="auto", device="cpu", native=True)
    assert isinstance(decoder, Decoder)
    cache, ways = decoder.cache, {}
    lengths = sorted(asked.lengths, reverse=True)
    slots = [decoder.add_row(length + max(asked.tokens)) for length in lengths]
    for slot, length in zip(slots, lengths, strict=True):
        cache.kv[:, :, slot].normal_()
        cache._lengths[slot] = length
    layers, _, _, kv_heads, _, dim = cache.kv.shape
    heads = decoder.shape.num_heads
    queries = {n: torch.randn(n, heads, dim).to(cache.kv.dtype) for n in asked.tokens}

    def ours(n: int, slot: int, length: int) -> None:
        layout = plan(
            [nodes(slot, range(-1, n - 1))], [length], dtype=cache.kv.dtype, shared=heads // kv_heads, most_on_paths=n
        )
        writer = cache.writer(layout)
        for layer in range(layers):
            attend(queries[n], kv_heads, layout, writer, layer)

    def library(n: int, slot: int, length: int) -> None:
        grouped = queries[n].view(n, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
        for layer in range(layers):
            keys, values = cache.kv[layer, :, slot, None, :, :length]
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(grouped, keys, values)

    for slot, length in zip(slots, lengths, strict=True):
        ways[f"{length}, forward"] = lambda n, slot=slot: decoder.verify([nodes(slot, range(-1, n - 1))])  # type: ignore[misc]
        ways[f"{length}, attention"] = partial(ours, slot=slot, length=length)
        ways[f"{length}, torch's attention"] = partial(library, slot=slot, length=length)
    show(dict(reversed(ways.items())), asked)


# Parts of a forward --------------------------------------------------------------------------------------------------


def products(asked: argparse.Namespace) -> None:
    """All products of a shape by kind: torch's in float32, oneDNN's and our panels in bfloat16, blocks of bits.

    The head is in Q8_0, as --dtype int4 makes it, and in Q6_K beside Q4_K, Q5_K and Q6_K."""
    config = SHAPES[asked.shape]
    h, m = config.hidden_size, config.intermediate_size
    qkv = h + 2 * config.num_key_value_heads * config.head_dim
    shapes = [(qkv, h), (h, h), (2 * m, h), (h, m)] * config.num_hidden_layers + [(config.vocab_size, h)]
    ways: Ways = {}
    for kind in asked.kinds:
        if kind == "float32":
            dense = [torch.randn(shape) for shape in shapes]
            ways[kind] = multiplied([partial(F.linear, weight=weight) for weight in dense], shapes, torch.float32)
        elif kind in LIBRARIES:
            made_of = LIBRARIES[kind]
            ways[kind] = multiplied([made_of(torch.randn(shape).bfloat16()) for shape in shapes], shapes)
        else:
            of = next(one for one in KINDS.values() if one.name == kind)
            blocks = [random_blocks(of, *shape) for shape in shapes[:-1]]
            blocks.append(random_blocks(Q6_K if of.inputs == Q6_K.inputs else Q8_0, *shapes[-1]))
            for bits in asked.activations:
                panels = [IntegerPanels([Blocks(block.kind, block.data, bits)]) for block in blocks]
                ways[kind if bits == 8 else f"{kind}, 16 bits"] = multiplied(panels, shapes)
    show(ways, asked)


class TorchInt4:
    """torch's product with groups of 32 weights of four bits, which torchao's layout for CPUs calls, too."""

    GROUP = 32

    def __init__(self, weight: torch.Tensor):
        outputs, width = weight.shape
        codes = torch.randint(0, 16, (outputs, width), dtype=torch.int32)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.scales = torch.rand(width // self.GROUP, outputs, 2).to(weight.dtype)

    def __call__(self, x: torch.Tensor) -> object:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.GROUP, self.scales)


class OneDNN:
    """The product as `Linear` has oneDNN do it."""

    def __init__(self, weight: torch.Tensor):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: torch.Tensor) -> object:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")


LIBRARIES = {"bfloat16": OneDNN, "panels": Panels, "torch-int4": TorchInt4}


def multiplied(
    each: Sequence[Callable[[torch.Tensor], object]], shapes: Sequence[tuple[int, int]], dtype=torch.bfloat16
) -> Callable[[int], None]:
    """All products with so many rows, which are made beforehand."""
    x: dict[tuple[int, int], torch.Tensor] = {}

    def run(n: int) -> None:
        for multiply, (_, width) in zip(each, shapes, strict=True):
            if (n, width) not in x:
                x[n, width] = torch.randn(n, width).to(dtype)
            multiply(x[n, width])

    return run


def random_blocks(kind: Kind, outputs: int, width: int, below: int = 64) -> Blocks:
    """Blocks of random bytes below 64, so that scales are numbers below 2; below 16: 0.0005."""
    return Blocks(kind, torch.randint(0, below, (outputs, width // kind.inputs * kind.nbytes), dtype=torch.uint8))


def steps(asked: argparse.Namespace) -> None:
    """The steps between products, one row, warm caches: in a forward caches are cold, and the ratio is the point."""
    config = SHAPES[asked.shape]
    shape = Shape.of(config)
    turns = turns_of(config, shape, dtype=torch.bfloat16)
    turns.reach(shape.max_context)
    kinds = {"torch": TorchOps(turns, shape.eps), "compiled": FusedOps(turns, shape.eps)}
    given = {(who, n): steps_of(ops, shape, n) for who, ops in kinds.items() for n in asked.tokens}
    ways: Ways = {}
    for step in given["torch", asked.tokens[0]]:
        for who in kinds:
            ways[f"{step}, {who}"] = lambda n, step=step, who=who: given[who, n][step]()  # type: ignore[misc]
    show(ways, asked)


def steps_of(ops: TorchOps, shape: Shape, n: int) -> dict[str, Callable[[], object]]:
    """The steps on random numbers, by name."""
    x, delta, weight = (torch.randn(n, shape.hidden_size).bfloat16() for _ in range(3))
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    qkv = torch.randn(n, heads + 2 * kv_heads, shape.head_dim).bfloat16()
    gate_up = torch.randn(n, 2 * shape.intermediate_size).bfloat16()
    cache = RaggedCache(1, kv_heads, shape.head_dim, shape.max_context, torch.bfloat16, "cpu")
    layout = plan([nodes(cache.add_row(CONTEXT + n), range(-1, n - 1))], [CONTEXT], dtype=torch.bfloat16)
    writer = cache.writer(layout)

    def rotate() -> None:
        ops.begin(layout)
        ops.rotate(qkv, heads, kv_heads, None, writer, 0)

    return {
        "norm": lambda: ops.norm(x, weight[0]),
        "add and norm": lambda: ops.add_norm(x, delta, weight[0]),
        "rotate and cache": rotate,
        "gate": lambda: ops.gate(gate_up),
    }


CASES = {case.__name__: case for case in (forward, families, exact, program, shape, context, products, steps)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", default="forward", choices=CASES)
    parser.add_argument("model", nargs="?", help="exact, program, context: a model instead of --shape")
    parser.add_argument("--shape", default="135M", choices=SHAPES, help="of the random model (default 135M)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32], help="(default 1 8 16 32)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="context: tokens of texts")
    parser.add_argument("--file", type=Path, help="shape: the file of a Llama (default random-SHAPE.gguf)")
    parser.add_argument("--layers", type=int, help="shape: number of layers (default: all; in memory, those that fit)")
    parser.add_argument("--rounds", type=int, default=21, help="turns (default 21)")
    parser.add_argument("--least", action="store_true", help="the least of all turns, not the median")
    parser.add_argument("--threads", type=int, help="torch's threads (default: its own choice)")
    parser.add_argument("--device", default="cpu", help="forward, families: cpu (default) or cuda")
    parser.add_argument("--compile", action="store_true", help="forward: on a GPU, transformers compiled too")
    kinds = ["float32", *LIBRARIES, *(kind.name for kind in KINDS.values())]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=["bfloat16", "panels", "Q8_0", "Q4_0"])
    parser.add_argument("--activations", nargs="+", type=int, choices=[8, 16], default=[8], help="products: bits")
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    with torch.inference_mode():
        CASES[asked.case](asked)


if __name__ == "__main__":
    main()
