"""The cost model: from accepted lengths and the time of a forward to a speed-up, on this machine or on another.

    predict(rounds, size, Machine(DEVICES["H100-SXM"]))                    # recorded rounds on another machine

A round is a draft and the forward of the target that verifies it. Nodes are the tokens of that forward, the last
committed one included. Costs without a unit are in plain decoding steps; a speed-up is over plain decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Tokens and speed-up -------------------------------------------------------------------------------------------------


def chain_tokens(acceptance: Sequence[float]) -> float:
    """Expected tokens of a round that drafts a chain, the target's own included.

    acceptance[j]: probability that token j + 1 is accepted, given that all before it are (Leviathan et al. 2023,
    equation 1, with a rate for every depth)."""
    return 1.0 + float(np.cumprod(np.asarray(acceptance, float)).sum())


def speedup(
    tokens: float, *, verify: float = 1.0, calls: float = 0.0, call: float = 0.0, overhead: float = 0.0
) -> float:
    """Tokens of a round over its cost: a verification, `calls` draft calls of `call` each, and `overhead`, all in
    plain decoding steps (Leviathan et al. 2023, theorem 3.8, with the verification's own cost)."""
    return tokens / (verify + calls * call + overhead)


def memory_bound_speedup(tokens: float, calls: float, draft_bytes: float, target_bytes: float) -> float:
    """MBSU: the speed-up if a forward cost the bytes it reads and nothing else (VocabTrim, Goel et al. 2025)."""
    return speedup(tokens, calls=calls, call=draft_bytes / target_bytes if calls else 0.0)


def round_cost(tokens: float, speedup: float) -> float:
    """R: cost of a round, in plain decoding steps. Tokens a round depend on the text, R on the machine."""
    return tokens / speedup


# Time of a forward -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """Figures of a datasheet: bandwidth in bytes a second, dense 16-bit flops a second, memory in bytes."""

    name: str
    bandwidth: float
    flops: float
    memory: float


def _devices(*rows: tuple[str, float, float, float]) -> dict[str, Device]:
    return {name: Device(name, tera * 1e12, flops * 1e12, giga * 1e9) for name, tera, flops, giga in rows}


DEVICES = _devices(
    ("A100-40", 1.555, 312, 40),
    ("A100-80", 2.039, 312, 80),
    ("H100-PCIe", 2.0, 756, 80),
    ("H100-SXM", 3.35, 989, 80),
    ("H200", 4.8, 989, 141),
    ("B200", 8.0, 2250, 180),
    ("RTX-3090", 0.936, 71, 24),
    ("RTX-4090", 1.008, 165, 24),
    ("L4", 0.30, 121, 24),
    ("L40S", 0.864, 362, 48),
    ("M2-Ultra", 0.80, 27, 192),
    ("M4", 0.12, 4, 32),
    ("AGX-Orin", 0.205, 42, 64),
)
"""Makers' datasheets: TB/s, 16-bit TFLOPS without sparsity (with 32-bit accumulation on the RTX cards), GB."""


@dataclass(frozen=True)
class Machine:
    """A device, the share of its figures that programs reach, and its host. Times are in seconds.

    bandwidth_share, compute_share  of the datasheet's figures. compute_share None: 0.40 up to 8 tokens, for which
              kernels are not built, rising to 0.60 at 64 tokens.
    step      the host's time for each forward of the target; extra: for each round with a draft
              (sampling, masks, moving keys and values, waiting for the device).
    error     share by which a prediction may be off, in either direction."""

    device: Device
    bandwidth_share: float = 0.80
    compute_share: float | None = None
    step: float = 0.3e-3
    extra: float = 0.2e-3
    error: float = 0.10

    @property
    def bandwidth(self) -> float:
        """Bytes a second that programs reach."""
        return self.bandwidth_share * self.device.bandwidth

    def flops(self, tokens: float) -> float:
        """Flops a second that programs reach in a forward over `tokens` tokens."""
        if self.compute_share is not None:
            return self.compute_share * self.device.flops
        few, many = 8, 64
        grown = min(max(log(tokens / few) / log(many / few), 0.0), 1.0)
        return (0.40 + 0.20 * grown) * self.device.flops


@dataclass(frozen=True)
class Size:
    """What a forward of a model moves and computes.

    parameters    read in a forward: all but the input embedding; an output head that is tied to it counts, once.
    width         of all query heads together.
    cache_bytes   of the keys and values of one token. weight_bytes: of one parameter."""

    parameters: float
    layers: int
    width: int
    cache_bytes: float
    weight_bytes: float = 2.0

    def __post_init__(self) -> None:
        if not 0.25 <= self.weight_bytes <= 8:
            raise ValueError(f"weight_bytes is {self.weight_bytes}: bytes of one parameter, not of all")
        if self.parameters <= 0 or self.layers < 1 or self.width < 1 or self.cache_bytes < 0:
            raise ValueError("a model has parameters, layers and a width above 0, and no negative cache")

    @classmethod
    def of(cls, config: PretrainedConfig, weight_bytes: float = 2.0, cache_element: float = 2.0) -> Size:
        """Of a Llama-family model; cache_element: bytes of an element of the KV cache."""
        from paceline.target.shape import Shape, weight_shapes

        shape = Shape.of(config)
        read = sum(map(prod, weight_shapes(config).values()))
        if not shape.tied:
            read -= shape.vocab_size * shape.hidden_size
        cache = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * cache_element
        return cls(read, shape.num_layers, shape.num_heads * shape.head_dim, cache, weight_bytes)

    @property
    def bytes(self) -> float:
        """Bytes of weights read in a forward."""
        return self.parameters * self.weight_bytes


def roofline(memory: float, compute: float) -> float:
    """Seconds of an operation that reads for `memory` and computes for `compute` seconds: a smooth maximum of both."""
    return (memory**4 + compute**4) ** 0.25


def forward_seconds(size: Size, machine: Machine, nodes: float, *, batch: int = 1, context: int = 0) -> float:
    """Seconds of one forward over `nodes` tokens of each of `batch` rows with `context` cached tokens each, without the
    host's time."""
    tokens = nodes * batch
    reached = machine.flops(tokens)
    weights = roofline(size.bytes / machine.bandwidth, 2 * size.parameters * tokens / reached)
    cache = roofline(
        batch * context * size.cache_bytes / machine.bandwidth,
        4 * tokens * context * size.layers * size.width / reached,
    )
    return weights + cache


# Prediction --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounds:
    """Recorded rounds, summed up, of requests that ran one after another.

    tokens  new tokens; sizes: {nodes verified: number of rounds}; draft_seconds: the drafter's, on the host."""

    tokens: float
    sizes: Mapping[int, int]
    draft_seconds: float = 0.0


class Prediction(NamedTuple):
    """A speed-up on another machine, with its error band."""

    low: float
    speedup: float
    high: float


def predict(rounds: Rounds, size: Size, machine: Machine, *, batch: int = 1, context: int = 0) -> Prediction:
    """The speed-up of recorded rounds on `machine`, from their tokens, tree sizes and drafting time, with forwards by
    `forward_seconds`."""

    def seconds(nodes: int) -> float:
        draft = machine.extra if nodes > 1 else 0.0  # a round without a draft is a plain step
        return forward_seconds(size, machine, nodes, batch=batch, context=context) + machine.step + draft

    spent = sum(number * seconds(nodes) for nodes, number in rounds.sizes.items()) + rounds.draft_seconds
    gain = rounds.tokens * seconds(1) / spent if rounds.sizes else 1.0
    return Prediction(gain * (1 - machine.error), gain, gain * (1 + machine.error))
