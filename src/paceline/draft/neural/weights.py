"""Weights of a head, where and as its target computes; with `dtype=int8` its matrices in blocks of fewer bits.

    here = placed(tensors, target, "int8")                   # matrices are Blocks, all else tensors
    product = linear([here["fc.weight"]], None, target.dtype)
    network = load_module(network, here, target)             # the same for what is written as a module

A head drafts, so fewer bits change how often it is right and never what is said. Knows no head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.errors import MethodError
from paceline.target.base import Facts
from paceline.target.linear import linear
from paceline.target.quantised.blocks import Blocks
from paceline.target.quantised.checkpoint import Weights, quantised

Precision = Literal["auto", "int8", "int4"]
PRECISION = "of its matrices; auto: the target's. int8, int4 read less, and draft a little otherwise"


def placed(tensors: Mapping[str, Tensor], target: Facts, precision: Precision = "auto") -> Weights:
    """The tensors on the target's device in its dtype, matrices in blocks of `precision`. MethodError if blocks are
    asked for where nothing multiplies them."""
    if precision == "auto":
        return {name: tensor.to(target.device, target.dtype) for name, tensor in tensors.items()}
    if target.device.type != "cpu":
        raise MethodError(f"dtype={precision}: weights of eight and four bits run on CPUs, not on {target.device}")
    made = quantised({name: tensor.cpu() for name, tensor in tensors.items()}, precision)
    return {name: w if isinstance(w, Blocks) else w.to(target.dtype) for name, w in made.items()}


def load_module(module: nn.Module, weights: Mapping[str, Tensor | Blocks], target: Facts) -> Any:
    """A network with these parameters, ready to draft; the caller has checked that they are the right ones."""
    names = module.state_dict().keys()
    own = {name: w for name, w in weights.items() if name in names}
    dense = {name: w.dense(target.dtype) if isinstance(w, Blocks) else w for name, w in own.items()}
    module.load_state_dict(dense, strict=False)
    module = module.to(target.device, target.dtype).eval().requires_grad_(False)
    for name, inner in list(module.named_modules()):
        blocks = weights.get(f"{name}.weight")
        if isinstance(inner, nn.Linear) and isinstance(blocks, Blocks):
            above, _, last = name.rpartition(".")
            setattr(module.get_submodule(above), last, Product(blocks, inner.bias, target.dtype))
    return module


class Product(nn.Module):
    """`nn.Linear` over blocks: [..., inputs] to [..., outputs]."""

    def __init__(self, blocks: Blocks, bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.product = linear([blocks], bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def nbytes(weights: Mapping[str, Tensor | Blocks], *without: str) -> int:
    """Bytes of the weights but those whose names begin with one of `without`."""
    return sum(w.nbytes for name, w in weights.items() if not name.startswith(without or ("\0",)))

