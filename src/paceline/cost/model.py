"""The cost model: from accepted lengths and the time of a forward to a speed-up, on this machine or on one that is
not here. Plain numbers in, plain numbers out; it knows no engine, no drafter and no file.

    best_chain(size, Machine(DEVICES["A100-80"]), [0.75] * 16, draft)      # how far to draft, and what it gains
    predict(rounds, size, Machine(DEVICES["H100-SXM"]))                    # recorded rounds on another machine

Words: a round is a draft and one forward of the target that verifies it. Nodes are the tokens of that forward, the
last committed one included. Costs without a unit are in plain decoding steps; a speed-up is over plain decoding.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Floats = NDArray[np.float64]

WORTH = 1.02
"""A predicted speed-up below this is not worth drafting for."""


# Tokens per round --------------------------------------------------------------------------------------------


def chain_tokens(acceptance: Sequence[float]) -> float:
    """Expected tokens of a round that drafts a chain, the target's own included.

    acceptance[j]: probability that token j + 1 is accepted, given that all before it are (Leviathan et al. 2023,
    equation 1, with a rate for every depth)."""
    return 1.0 + float(np.cumprod(np.asarray(acceptance, float)).sum())


def full_tree_tokens(ranks: Sequence[float], depth: int) -> float:
    """Expected tokens of a round whose tree has len(ranks) children at every node, `depth` deep; ranks as in
    `best_tree`."""
    return float(sum(sum(ranks) ** level for level in range(depth + 1)))


class Tree(NamedTuple):
    """A tree of drafted nodes: expected tokens of a round with it, its depth, and parent of every node (0: the root,
    i: node i, in the order in which they are worth adding)."""

    tokens: float
    depth: int
    parent: list[int]


def best_tree(ranks: Sequence[float], nodes: int) -> Tree:
    """The tree of `nodes` drafted nodes that is accepted furthest.

    ranks[r]: probability that the child of rank r + 1 is the target's token, given that its parent is. A node counts
    with the product along its path, so the best nodes are the likeliest, and a parent is always likelier than its
    children (Sequoia, Chen et al. 2024, section 3.1)."""
    tokens, depth = 1.0, 0
    parents: list[int] = []
    heap = [(-p, 0, 1) for p in ranks if p > 0]
    heapq.heapify(heap)
    while heap and len(parents) < nodes:
        p, above, level = heapq.heappop(heap)
        tokens -= p
        depth = max(depth, level)
        parents.append(above)
        for branch in ranks:
            if branch > 0:
                heapq.heappush(heap, (p * branch, len(parents), level + 1))
    return Tree(tokens, depth, parents)


# Speed-up ----------------------------------------------------------------------------------------------------


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
    """R: what a round costs, in plain decoding steps. Tokens carry over from machine to machine, R from text to
    text."""
    return tokens / speedup


def fit_round_cost(layers: tuple[float, float], costs: tuple[float, float]) -> tuple[float, float]:
    """(verify, draft) of `R = verify + draft / layers` through R of two models with so many layers: the cost of a
    verification, and that of drafting in layers of the target. It holds where every layer takes the same time,
    whatever its width: where launching kernels is what takes the time."""
    draft = (costs[0] - costs[1]) / (1 / layers[0] - 1 / layers[1])
    return costs[0] - draft / layers[0], draft


class Length(NamedTuple):
    """A draft length, and the speed-up it gives."""

    length: int
    speedup: float


def optimal_length(
    acceptance: Sequence[float], *, call: float, step: float = 0.0, overhead: float = 0.0, worth: float = WORTH
) -> Length:
    """How many tokens to draft, and the speed-up; (0, 1.0) if that is below `worth`.

    acceptance as in `chain_tokens`, never rising; a draft call costs `call`, each further node of the verification
    `step`. A token is added while it brings more tokens for its cost than the round does so far."""
    cost, reach, tokens, length = call + step, 1.0, 1.0, 0
    for rate in acceptance:
        reach *= rate
        if reach * (1 + overhead + length * cost) <= tokens * cost:
            break
        length, tokens = length + 1, tokens + reach
    gain = tokens / (1 + overhead + length * cost)
    return Length(length, gain) if length and gain >= max(worth, 1.0) else Length(0, 1.0)


class Policy(NamedTuple):
    """Draft lengths for rounds of several kinds; rate: tokens for each plain decoding step."""

    rate: float
    lengths: list[int]


def dynamic_lengths(
    kinds: Sequence[Sequence[float]], shares: Sequence[float], *, call: float, step: float = 0.0, overhead: float = 0.0
) -> Policy:
    """The best length for every kind of round when it is known beforehand of which kind a round is.

    kinds[i]: acceptance as in `chain_tokens` of the share shares[i] of all rounds. A round is extended while the
    chance that its next token is accepted exceeds rate times cost, and not drafted for at all if that does not earn
    the overhead; the rate is what the policy itself reaches, found by Dinkelbach's iteration. What a real signal
    (confidence, entropy) gains over one fixed length is a part of it."""
    cost = call + step

    def time(length: int) -> float:
        return 1 + overhead + length * cost if length else 1.0

    def best(kind: Sequence[float], rate: float) -> int:
        length = int((np.cumprod(kind) > rate * cost).sum())
        return length if chain_tokens(kind[:length]) - 1 > rate * (time(length) - 1) else 0

    rate, reached = 0.0, 1.0
    while reached - rate > 1e-12:  # it rises from step to step, and only finitely many policies exist
        rate = reached
        lengths = [best(kind, rate) for kind in kinds]
        tokens = sum(s * chain_tokens(kind[:n]) for s, kind, n in zip(shares, kinds, lengths, strict=True))
        reached = tokens / sum(s * time(n) for s, n in zip(shares, lengths, strict=True))
    return Policy(reached, lengths)


# Time of a forward -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """From the datasheet: bandwidth in bytes a second, dense 16-bit flops a second, memory in bytes."""

    name: str
    bandwidth: float
    flops: float
    memory: float

    @property
    def ridge(self) -> float:
        """Tokens in a forward (of 16-bit weights) up to which reading them takes longer than computing."""
        return self.flops / self.bandwidth


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
    """A device with what of it is reached, and the host beside it. Seconds.

    bandwidth_share, compute_share  of the datasheet's figures. compute_share None: 0.40 for a few tokens, where
              kernels are not built for it, rising to 0.60 from 64.
    step      of the host for every forward of the target; call for every draft call; extra for every round that
              speculates: sampling, masks, moving keys and values, waiting for the device.
    layer     of launching one layer, where nothing is captured in graphs; 0: captured. Launching and reading weights
              overlap.
    error     share by which a prediction may be off either way."""

    device: Device
    bandwidth_share: float = 0.80
    compute_share: float | None = None
    step: float = 0.3e-3
    call: float = 0.05e-3
    extra: float = 0.2e-3
    layer: float = 0.0
    error: float = 0.10

    @classmethod
    def eager(cls, device: Device, layer: float = 0.55e-3) -> Machine:
        """Without captured graphs: every layer takes at least `layer` seconds to launch."""
        return cls(device, layer=layer, error=0.20)

    @property
    def bandwidth(self) -> float:
        """Bytes a second that are reached."""
        return self.bandwidth_share * self.device.bandwidth

    def flops(self, tokens: float) -> float:
        """Flops a second that are reached in a forward over so many tokens."""
        if self.compute_share is not None:
            return self.compute_share * self.device.flops
        few, many = 8, 64
        grown = min(max(log(tokens / few) / log(many / few), 0.0), 1.0)
        return (0.40 + 0.20 * grown) * self.device.flops


@dataclass(frozen=True)
class Size:
    """What a forward of a model moves and computes.

    parameters  read in a forward: all but the input embedding; an output head that is tied to it counts, once.
    weight_bytes, cache_bytes  bytes of a parameter; bytes of keys and values of one token.
    layers, width  for launching and for attention; width is that of all query heads together."""

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
    """Time of an operation that takes `memory` seconds to read and `compute` seconds to compute: the longer of the
    two, rounded off where they meet."""
    return (memory**4 + compute**4) ** 0.25


def forward_seconds(size: Size, machine: Machine, nodes: float, *, batch: int = 1, context: int = 0) -> float:
    """Seconds of one forward over `nodes` tokens of each of `batch` rows, `context` tokens cached in each; without
    the host's share."""
    tokens = nodes * batch
    reached = machine.flops(tokens)
    weights = roofline(
        max(size.bytes / machine.bandwidth, size.layers * machine.layer), 2 * size.parameters * tokens / reached
    )
    cache = roofline(
        batch * context * size.cache_bytes / machine.bandwidth,
        4 * tokens * context * size.layers * size.width / reached,
    )
    return weights + cache


# Prediction --------------------------------------------------------------------------------------------------


def interpolate(nodes: ArrayLike, times: ArrayLike, at: ArrayLike) -> Floats:
    """A table of times at ascending `nodes`, read at `at`: straight lines between entries, and behind the last the
    slope of the last two, never downwards; before the first, the first."""
    xs, ys, wanted = (np.asarray(values, float) for values in (nodes, times, at))
    inside = np.interp(wanted, xs, ys)
    if len(xs) == 1:
        return inside
    slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    return inside + np.maximum(wanted - xs[-1], 0) * max(slope, 0.0)


@dataclass(frozen=True)
class Rounds:
    """Recorded rounds of one request after another.

    tokens  that they brought in all; sizes {nodes: rounds that verified so many}; draft_seconds: the drafter's own
    time in all of them, on the host; calls: forwards of a draft model, one after another, in all of them."""

    tokens: float
    sizes: Mapping[int, int]
    draft_seconds: float = 0.0
    calls: int = 0

    @property
    def count(self) -> int:
        """Rounds."""
        return sum(self.sizes.values())


def speedup_from_rounds(rounds: Rounds, forward: Callable[[Floats], Floats], drafting: float | None = None) -> float:
    """Predicted speed-up: tokens, each of them a plain round, over what these rounds take.

    forward   time of rounds that verify so many nodes, drafting not counted; any unit, as long as `drafting` (all
              rounds together) has the same; None: `rounds.draft_seconds`, and forward gives seconds.
    No rounds: 1."""
    if not rounds.count:
        return 1.0
    sizes = np.array(list(rounds.sizes), float)
    spent = float(np.array(list(rounds.sizes.values()), float) @ forward(sizes))
    spent += rounds.draft_seconds if drafting is None else drafting
    return rounds.tokens * float(forward(np.ones(1))[0]) / spent


class Prediction(NamedTuple):
    """A speed-up on a machine that is not here, with its error band; cost: R, of an average round."""

    low: float
    speedup: float
    high: float
    cost: float


def predict(
    rounds: Rounds,
    size: Size,
    machine: Machine,
    *,
    draft: Size | None = None,
    batch: int = 1,
    context: int = 0,
) -> Prediction:
    """What recorded rounds would gain on `machine`: tokens, tree sizes and the drafter's time are kept, forwards
    are worked out anew.

    draft  the draft model, if there is one: its calls are worked out too, and `rounds.draft_seconds` should then be
    what the drafter does beside them."""
    plain = forward_seconds(size, machine, 1, batch=batch, context=context) + machine.step

    def forward(nodes: Floats) -> Floats:
        # A round without a draft is a plain step.
        times = [forward_seconds(size, machine, n, batch=batch, context=context) + machine.extra for n in nodes]
        return np.where(nodes > 1, np.array(times) + machine.step, plain)

    drafting = rounds.draft_seconds
    if draft is not None:
        drafting += rounds.calls * (forward_seconds(draft, machine, 1, batch=batch, context=context) + machine.call)
    gain = speedup_from_rounds(rounds, forward, drafting)
    cost = round_cost(rounds.tokens / max(rounds.count, 1), gain)
    return Prediction(gain * (1 - machine.error), gain, gain * (1 + machine.error), cost)


def best_chain(
    size: Size,
    machine: Machine,
    acceptance: Sequence[float],
    draft: Size,
    *,
    batch: int = 1,
    context: int = 0,
    worth: float = WORTH,
) -> Length:
    """The best length of chains that `draft` drafts for `batch` rows at once, and its speed-up; (0, 1.0) if that is
    below `worth`. acceptance as in `chain_tokens`; its length is the most that is drafted."""
    plain = forward_seconds(size, machine, 1, batch=batch, context=context) + machine.step
    call = forward_seconds(draft, machine, 1, batch=batch, context=context) + machine.call
    best = Length(0, 1.0)
    for length in range(1, len(acceptance) + 1):
        verify = forward_seconds(size, machine, length + 1, batch=batch, context=context)
        gain = chain_tokens(acceptance[:length]) * plain / (verify + machine.step + machine.extra + length * call)
        if gain > best.speedup:
            best = Length(length, gain)
    return best if best.speedup >= worth else Length(0, 1.0)
