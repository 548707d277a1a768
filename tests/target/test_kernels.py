"""The compiled bfloat16 steps against torch's, computed in float32: equal but for one rounding."""

import re

import numpy as np
import pytest
import torch

from paceline.core.segment import Segment
from paceline.kernels import steps
from paceline.kernels.ops import GELU, SIGMOID, SILU, Activation, TorchOps
from paceline.kernels.steps import FusedOps
from paceline.kernels.turns import Turns
from paceline.target.cache import RaggedCache
from paceline.target.layout import plan

EPS, HEADS, KV_HEADS = 1e-5, 6, 2
ROUNDING = 2.0**-8
"""Half a unit in the last place of bfloat16, relative."""


def random(seed, *size):
    return (3 * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).bfloat16()


def both(dim=8):
    """(compiled in bfloat16, torch in float32), with the same tables."""
    inverse = 10000 ** -(torch.arange(0, dim, 2) / dim)
    narrow, wide = (Turns(300, dim, inverse, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    for turns in (narrow, wide):
        turns.reach(300)
    for name in ("cos", "sin"):
        getattr(wide, name).copy_(getattr(narrow, name))
    return FusedOps(narrow, EPS), TorchOps(wide, EPS)


def near(compiled, exact):
    assert compiled.dtype == torch.bfloat16
    return bool(((compiled.float() - exact).abs() <= 1.01 * ROUNDING * exact.abs() + 1e-6).all())


@pytest.mark.parametrize(("rows", "width"), [(1, 576), (1, 7), (16, 576), (3, 64), (5, 33)])
def test_norm_and_addition(rows, width):
    fused, exact = both()
    x, delta, weight = random(1, rows, width), random(2, rows, width), random(3, width)
    assert near(fused.norm(x, weight), exact.norm(x.float(), weight.float()))
    total, normed = fused.add_norm(x, delta, weight)
    assert torch.equal(total, x + delta)
    assert near(normed, exact.norm(total.float(), weight.float()))
    (scaled, same), right = fused.add_norm(x, delta, None, 0.25), exact.add_norm(x.float(), delta.float(), None, 0.25)
    assert scaled is same
    assert near(scaled, right[0])


@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (4, 30), (16, 64)])
@pytest.mark.parametrize("activation", [SILU, GELU, SIGMOID, Activation(1.702, limit=2.5, shift=1.0)])
def test_gate(rows, width, activation):
    fused, exact = both()
    gate_up = random(4, rows, 2 * width)
    gate_up[0, :4] = torch.tensor([0.0, -0.0, 300.0, -300.0])  # e**300 is not a float32
    found, wanted = fused.gate(gate_up, activation), exact.gate(gate_up.float(), activation)
    if activation == GELU:  # far below 0, torch's tanh has rounded what is left of the gate to 0
        wanted = torch.where(gate_up[:, :width] < -4, found.float(), wanted)
        assert (found[gate_up[:, :width] < -4].abs() <= 1e-3 * gate_up[:, width:][gate_up[:, :width] < -4].abs()).all()
    assert near(found[:, 4:], wanted[:, 4:])
    assert torch.allclose(found[0, :4].float(), wanted[0, :4], rtol=2 * ROUNDING, atol=1e-30)


@torch.inference_mode()
@pytest.mark.parametrize("dim", [8, 64])
@pytest.mark.parametrize("normed", [None, "heads", "whole"])
def test_rotation_and_where_keys_and_values_go(dim, normed):
    fused, exact = both(dim)
    layers, layer = 2, 1
    caches = [RaggedCache(layers, KV_HEADS, dim, 299, dtype, "cpu") for dtype in (torch.bfloat16, torch.float32)]
    for cache in caches:
        assert [cache.add_row(250) for _ in range(3)] == [0, 1, 2]
    segments = [
        Segment(2, np.arange(4), np.array([-1, 0, 0, 2]), num_logits=4),
        Segment(0, np.arange(3), np.array([-1, 0, 1]), num_logits=3),
    ]
    layout = plan(segments, [200, 7])
    qkv = random(5, layout.num_nodes, HEADS + 2 * KV_HEADS, dim)
    weight = random(6, HEADS + KV_HEADS, dim) if normed else None
    weight = weight.flatten() if weight is not None and normed == "whole" else weight
    queries = []
    for ops, cache, dtype in zip((fused, exact), caches, (torch.bfloat16, torch.float32), strict=True):
        norm = None if weight is None else weight.to(dtype)
        writer = cache.writer(layout)
        queries.append(ops.rotate(qkv.to(dtype), HEADS, KV_HEADS, norm, writer, layer))
    # Two products are added before the rounding, so an error is relative to them and not to their sum.
    assert torch.allclose(queries[0].float(), queries[1], rtol=ROUNDING, atol=1e-4)
    ours, theirs = (cache.writer(layout).read(layer, 0) for cache in caches)
    for found, wanted in zip(ours, theirs, strict=True):
        assert wanted.abs().sum() > 0
        assert torch.allclose(found.float(), wanted, rtol=ROUNDING, atol=1e-4)
        assert torch.equal(found == 0, wanted == 0), "written where nothing should be"
    for found in caches[0].writer(layout).read(0, 0):
        assert not found.any(), "another layer was touched"


def test_what_is_not_a_number_stays_so():
    fused, _ = both()
    x, weight = random(7, 2, 16), random(8, 16)
    x[1, 3] = torch.nan
    for out in (fused.norm(x, weight), fused.add_norm(x, x, weight)[1], fused.gate(x)):
        assert out[0].isfinite().all()
        assert out[1].isnan().any()


def test_loops_are_vectorised(monkeypatch):
    """A change that the compiler cannot vectorise makes a step eight times as slow, and every result stays right."""
    monkeypatch.setitem(steps.FAST, "cache", False)  # code from the cache cannot be looked at
    add_norm, rotate, gate = steps._kernels(np.uint16, 2)
    for kernel, operation in ((gate, "fdiv"), (add_norm, "fmul"), (rotate, "fmul")):
        assert re.search(rf"{operation} [^\n]*<\d+ x float>", kernel.inspect_llvm())
