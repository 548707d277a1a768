"""Experts: a layer's experts, whose matrices are stacked in one tensor, by names of matrices of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.kernels.blocks import MXFP4, Blocks

_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks)?")
_RENAMED = {
    r"\.mlp\.router\.": ".mlp.gate.",
    r"\.mlp\.shared_experts\.": ".mlp.shared_expert.",
    r"(layers\.\d+)\.router\.(proj\.)?": r"\1.mlp.gate.",
    r"(layers\.\d+)\.experts": r"\1.mlp.experts",
}
"""Patterns of names in checkpoints, and the decoder's names."""


@dataclass(frozen=True)
class Piece:
    """Where a matrix or bias of an expert lies.

    key     name of the stacked tensor. number: of the expert.
    rows    its rows, or its columns if matrices are `turned`, which are stored as [inputs, outputs].
    scales  name of the stacked scales of blocks of four bits (MXFP4); None: it is not in blocks.
    shape   of the piece."""

    key: str
    number: int
    rows: slice
    turned: bool
    scales: str | None
    shape: tuple[int, ...]

    def of(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor | Blocks:
        """Read the piece. read: function that returns a tensor by name."""
        one = read(self.key)[self.number]
        if self.scales is not None:
            return _in_ggml_order(one[self.rows], read(self.scales)[self.number, self.rows])
        return (one.T if self.turned else one)[self.rows].contiguous()


def pieces(shapes: Mapping[str, Sequence[int]]) -> dict[str, Piece]:
    """Find the experts' matrices and biases in stacked tensors, by their names in a checkpoint.

    Stacks with biases, as those of gpt-oss, have `turned` matrices, and gates and ups in turn; others have all gates
    first.

    shapes  shapes of a checkpoint's tensors."""
    return {name: piece for key, shape in shapes.items() for name, piece in _in_stack(key, shape, shapes)}


def _in_stack(key: str, shape: Sequence[int], known: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Piece]]:
    match = _STACK.fullmatch(key)
    if match is None or len(shape) != {"_bias": 2, "_blocks": 4}.get(match[3], 3):
        return
    start, which, kind = match.groups()
    parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else (which,)
    mixed = f"{start}.{which}_bias" in known
    turned, scales = mixed and kind is None, f"{start}.{which}_scales" if kind == "_blocks" else None
    if scales is not None and scales not in known:
        return
    count, size, *width = (shape[0], *reversed(shape[1:])) if turned else shape
    size //= len(parts)
    width = [32 * width[0]] if scales else width
    for number in range(count):
        for place, part in enumerate(parts):
            rows = slice(place, None, len(parts)) if mixed else slice(place * size, (place + 1) * size)
            name = f"{renamed(start)}.{number}.{part}.{'bias' if kind == '_bias' else 'weight'}"
            yield name, Piece(key, number, rows, turned, scales, (size, *width))


def _in_ggml_order(blocks: torch.Tensor, scales: torch.Tensor) -> Blocks:
    """Turn blocks, uint8 [rows, n, 16] with neighbours in a byte, into ggml's MXFP4, whose bytes hold i and i + 16."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(2)
    return Blocks(MXFP4, torch.cat([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], 2).flatten(1))


def renamed(name: str) -> str:
    """The name that the decoder has for a checkpoint's tensor."""
    for theirs, ours in _RENAMED.items():
        name = re.sub(theirs, ours, name)
    return name


def stacked_in(found: Mapping[str, Piece]) -> set[str]:
    """Names of the tensors in which pieces lie."""
    return {key for piece in found.values() for key in (piece.key, piece.scales) if key is not None}


def as_checkpoint(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Turn a transformers model's state_dict into its checkpoint's tensors, where each expert has its own matrices."""
    found = pieces({name: weight.shape for name, weight in state.items()})
    stacks = stacked_in(found)
    made = {renamed(name): weight for name, weight in state.items() if name not in stacks}
    read = (piece.of(state.__getitem__) for piece in found.values())
    return made | {name: one for name, one in zip(found, read, strict=True) if isinstance(one, torch.Tensor)}


def as_state(weights: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Undo `as_checkpoint`: turn a checkpoint's tensors into the state_dict of a transformers model, without those that
    the checkpoint lacks. shapes: those of the state_dict."""
    found = pieces(shapes)
    dtypes = {piece.key: weights[name].dtype for name, piece in found.items()}
    made = {key: torch.empty(*shapes[key], dtype=dtype) for key, dtype in dtypes.items()}
    for name, piece in found.items():
        one = made[piece.key][piece.number]
        (one.T if piece.turned else one)[piece.rows] = weights[name]
    others = shapes.keys() - made.keys()
    return made | {name: weights[renamed(name)] for name in others if renamed(name) in weights}
