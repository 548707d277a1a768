"""Precision: the numbers in which a model is computed, and the conversion of a checkpoint's weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline import processor
from paceline.core import rules
from paceline.errors import ModelError
from paceline.formats.shape import UNQUANTISED
from paceline.kernels.blocks import ACTIVATIONS, KINDS, Q4_0, Q8_0, Blocks, Kind, Weights, WeightsByName, quantise

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in rules.DTYPES}
SMALL = 256 << 20
"""Models with at most so many bytes of blocks have inputs of 16 bits by default on all processors (docs/quantised.md).
"""
PRECISIONS: dict[str, tuple[Kind, Kind]] = dict(zip(rules.PRECISIONS, ((Q8_0, Q8_0), (Q4_0, Q8_0)), strict=True))
"""By precision: kind of the layers' matrices, and kind of embedding and output head, which lose most with few bits."""
_OUTER = ("model.embed_tokens.weight", "lm_head.weight")


def exact_dtype(dtype: str | torch.dtype, kinds: str | None) -> str:
    """The dtype that keeps a model's blocks, with all else in float32. kinds: `Target.quantised` with `dtype`."""
    precision, _ = rules.split_dtype(dtype)
    return f"{precision}-float32" if precision and kinds else "float32"


def quantised(weights: WeightsByName, word: str) -> Weights:
    """Quantise matrices to precision `word`, except UNQUANTISED matrices and widths that are no multiple of 32.

    Blocks of fewer bits are expanded first; other blocks stay."""
    inner, outer = PRECISIONS[word]
    kept = tuple(f".{part}.weight" for part in UNQUANTISED)
    made: Weights = {}
    for name, weight in weights.items():
        if isinstance(weight, Blocks):
            made[name] = quantise(weight.dense(), inner) if weight.kind.bits < inner.bits else weight
            continue
        fits = weight.ndim == 2 and weight.shape[1] % inner.inputs == 0 and not name.endswith(kept)
        made[name] = quantise(weight, outer if name in _OUTER else inner) if fits else weight
    return made


def multipliable(weights: Weights) -> tuple[Weights, str | None]:
    """Convert matrices whose formats are not in KINDS to Q8_0. Returns the weights, and a line about the conversion or
    None. An embedding that is not the output head stays, because nothing multiplies it."""
    looked_up = _OUTER[0] if _OUTER[1] in weights else None
    others = {
        name: w
        for name, w in weights.items()
        if isinstance(w, Blocks) and w.kind.number not in KINDS and name != looked_up
    }
    if not others:
        return weights, None
    made = {name: quantise(w, Q8_0) for name, w in others.items()}
    counts = Counter(w.kind.name for w in others.values()).most_common()
    now, before = (sum(w.nbytes for w in group.values()) / 1e6 for group in (made, others))
    what = " and ".join(f"{count} in {kind}" for kind, count in counts)
    return weights | made, f"matrices held as Q8_0: {what}; {now:,.0f} MB instead of {before:,.0f}"


def in_precision(name: str | Path, weights: WeightsByName, word: str | None) -> tuple[Weights, str | None]:
    """Quantise a model's weights to precision `word`, "int8" or "int4"; other words change nothing. Returns the
    weights, and a description of blocks that were quantised again; None: there were none.

    ModelError for weights in blocks, unless `word` is int8 and some blocks have fewer than eight bits: Q8_0 changes a
    weight by at most 1/254 of the largest in its block, which is little beside the loss of fewer bits."""
    in_blocks = [weight for weight in weights.values() if isinstance(weight, Blocks)]
    if word not in PRECISIONS:
        return {**weights}, None
    if in_blocks and (word == "int4" or all(w.kind.bits >= Q8_0.bits for w in in_blocks)):
        raise ModelError(
            f"{name} has its weights in {describe(weights)} already, so {word} cannot be made of it: leave dtype out "
            "to keep its blocks (auto-float32: all else in float32), or name float32, bfloat16 or float16 to expand "
            "them"
        )
    return quantised(weights, word), describe(weights) if in_blocks else None


def round_inputs(
    name: str | Path, weights: WeightsByName, activations: int | None, dtype: torch.dtype | None
) -> int | None:
    """Set the number of bits to which products with blocks round their inputs. Returns it; None without blocks.

    activations  8, 16, or None for the `usual` number.
    dtype        dtype of all else; None: not decided yet.

    ModelError for other numbers, or for a number without blocks."""
    if activations not in (None, *ACTIVATIONS):
        raise ModelError(f"activations is {activations}; there are 8 and 16")
    in_blocks = [weight for weight in weights.values() if isinstance(weight, Blocks)]
    if not in_blocks:
        if activations is not None:
            raise ModelError(f"{name}: activations are rounded by products with weights in blocks, and it has none")
        return None
    if activations is None:
        activations, _ = usual(sum(weight.nbytes for weight in in_blocks), dtype)
    for weight in in_blocks:
        weight.activations = activations
    return activations


def usual(nbytes: int, dtype: torch.dtype | None) -> tuple[int, str]:
    """The default number of bits to which products with `nbytes` bytes of blocks round inputs, and the reason. It is 16
    if that takes little time.

    dtype  dtype of all else; None: not decided yet."""
    if dtype not in (None, torch.float32):
        return 8, "all else is in 16 bits anyhow"
    if nbytes <= SMALL:
        return 16, f"the weights take at most {SMALL >> 20} MB, so it costs little time"
    if processor.has("avx512vnni") and not processor.has("amx-bf16"):
        return 16, "this processor has AVX-512 VNNI, so it costs little time"
    return 8, "16 would cost more than a seventh of the time of an answer on this processor"


def describe(weights: WeightsByName) -> str | None:
    """Describe formats, most frequent first, and bits: "F16 and Q8_0, 13.4 bits a weight". None without blocks."""
    matrices = [w for w in weights.values() if len(w.shape) == 2]
    if not any(isinstance(w, Blocks) for w in matrices):
        return None
    sizes: dict[str, int] = {}
    for w in matrices:
        kind = w.kind.name if isinstance(w, Blocks) else "BF16" if w.dtype == torch.bfloat16 else f"F{8 * w.itemsize}"
        sizes[kind] = sizes.get(kind, 0) + w.shape.numel()
    names = sorted(sizes, key=lambda name: -sizes[name])
    bits = 8 * sum(w.nbytes for w in matrices) / sum(sizes.values())
    return f"{' and '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}, {bits:.1f} bits a weight"


@dataclass(frozen=True)
class Precision:
    """How a model is computed.

    weights      "auto" keeps blocks, "int8" and "int4" make them, None expands them.
    rest         dtype of all that is not in blocks; None: the checkpoint's own.
    activations  bits to which products with blocks round their inputs; None: the `usual` number."""

    weights: str | None = None
    rest: torch.dtype | None = None
    activations: int | None = None

    @classmethod
    def of(cls, dtype: str | torch.dtype, activations: int | None = None) -> Precision:
        """Read the `dtype` of `paceline.target.load.load`. ModelError if it does not exist."""
        weights, rest = rules.split_dtype(dtype)
        return cls(weights, _dtype(rest), activations)

    @property
    def makes_blocks(self) -> bool:
        return self.weights in PRECISIONS


def _dtype(word: str | torch.dtype) -> torch.dtype | None:
    """Parse the name of a dtype. "auto" is None."""
    if word == "auto":
        return None
    if word in DTYPES.values():
        return word  # type: ignore[return-value]
    rules.check_dtype(str(word))
    return DTYPES[str(word)]
