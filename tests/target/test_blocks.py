"""Blocks of every type that the package gguf knows: read and made as it does, and held as Q8_0."""

import gguf
import numpy as np
import pytest
import torch
from tests.gguf_files import random_blocks

from paceline.formats.precision import PRECISIONS, multipliable, quantised
from paceline.kernels.blocks import KINDS, Q4_0, Q4_K, Q6_K, Q8_0, Blocks, Kind, joined, kind_of, quantise

READABLE = [kind for number in gguf.GGMLQuantizationType if (kind := kind_of(number)) and kind.inputs > 1]
"""All formats of blocks that the package can expand."""


def reference(blocks: Blocks) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType(blocks.kind.number)
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(blocks.data.numpy(), kind))


def bits(values: torch.Tensor) -> torch.Tensor:
    """As integers, all that are not numbers alike."""
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)


def anything(kind: Kind, outputs: int = 64, blocks: int = 5, seed: int = 0) -> Blocks:
    """Random bytes."""
    generator = torch.Generator().manual_seed(seed)
    size = (outputs, blocks * kind.nbytes)
    return Blocks(kind, torch.randint(0, 256, size, dtype=torch.uint8, generator=generator))


def test_sizes_are_ggmls() -> None:
    for kind in KINDS.values():
        known = gguf.GGMLQuantizationType(kind.number)
        assert (known.name, gguf.GGML_QUANT_SIZES[known]) == (kind.name, (kind.inputs, kind.nbytes))


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_any_bytes_are_read_as_the_reference_reads_them(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = anything(kind)
    assert torch.equal(bits(blocks.dense()), bits(reference(blocks)))
    monkeypatch.setattr("paceline.kernels.blocks.CHUNK", 1000)  # in pieces
    assert torch.equal(bits(blocks.dense()), bits(reference(blocks)))
    few = torch.tensor([3, 0, 63])
    assert torch.equal(bits(blocks.rows(few).dense()), bits(blocks.dense()[few]))


@pytest.mark.parametrize("kind", [Q8_0, Q4_0], ids=lambda kind: kind.name)
def test_weights_of_any_dtype_are_made_into_the_references_bytes(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in pieces; zeros and numbers too small for a float16 scale too."""
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[0], weight[1], weight[2] = 0, 1e-7 * weight[1], 1e3 * weight[2]
    with np.errstate(all="ignore"):
        right = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType(kind.number))
    for chunk in (1 << 22, 1000):
        monkeypatch.setattr("paceline.kernels.blocks.CHUNK", chunk)
        made = quantise(weight, kind)
        assert made.shape == weight.shape
        assert torch.equal(made.data, torch.from_numpy(right))


@pytest.mark.parametrize(("kind", "error"), [(Q8_0, 1 / 254), (Q4_0, 1 / 8)])
def test_what_is_made_is_near(kind: Kind, error: float) -> None:
    weight = torch.randn(9, 96, generator=torch.Generator().manual_seed(2))
    largest = weight.view(9, 3, 32).abs().amax(-1, keepdim=True).expand(9, 3, 32).reshape(9, 96)
    bound = error * largest + weight.abs() / 1024  # the scale is rounded to float16
    assert bool(((quantise(weight, kind).dense() - weight).abs() <= 1.001 * bound).all())


@pytest.mark.parametrize("kind", [kind for kind in READABLE if kind not in KINDS.values()], ids=lambda kind: kind.name)
def test_other_formats_are_held_as_q8_0_but_not_what_is_only_looked_up(kind: Kind) -> None:
    """A weight is off by at most half a step of Q8_0, and by what rounding its scale to float16 brings; all together by
    less than 1 % of their root mean square (docs/quantised.md)."""
    names = ("q", "k", "model.embed_tokens.weight")
    own = {name: random_blocks(kind, 64, 512, seed) for seed, name in enumerate(names)}
    made, note = multipliable({**own, "v": random_blocks(Q4_K, 64, 512), "norm": torch.ones(5)})
    assert note == f"matrices held as Q8_0: 3 in {kind.name}; 0 MB instead of 0"
    assert [w.kind.name for w in made.values() if isinstance(w, Blocks)] == ["Q8_0"] * 3 + ["Q4_K"]
    weight, held = own["q"].dense(), made["q"].dense()
    largest = weight.view(64, -1, 32).abs().amax(-1, keepdim=True).expand(64, -1, 32).reshape(64, 512)
    assert bool(((held - weight).abs() <= largest / 254 + 2**-11 * weight.abs() + 2**-17).all())
    assert (held - weight).norm() < 0.01 * weight.norm()
    untied, _ = multipliable({**own, "lm_head.weight": own["q"]})
    assert untied["model.embed_tokens.weight"] is own["model.embed_tokens.weight"]


def test_joined_parts_are_below_each_other() -> None:
    parts = [anything(Q4_K, 3, 2, seed=1), anything(Q4_K, 5, 2, seed=2)]
    dense = torch.cat([part.dense() for part in parts])
    assert torch.equal(bits(joined(parts).dense()), bits(dense))
    assert anything(Q6_K, 3, 2).shape == (3, 512)


@pytest.mark.parametrize("word", PRECISIONS)
def test_what_is_small_and_sensitive_stays_as_it_is(word: str) -> None:
    """Routers of experts, gates of shared ones and decays of recurrent layers; norms and what blocks do not fit."""
    layer = "model.layers.0."
    kept = ["mlp.gate", "mlp.shared_expert_gate", *(f"linear_attn.in_proj_{part}" for part in ("ba", "b", "a"))]
    made = ["mlp.gate_proj", "mlp.experts.0.up_proj", "linear_attn.in_proj_qkvz", "self_attn.q_proj"]
    weights = {f"{layer}{name}.weight": torch.randn(4, 64) for name in kept + made}
    weights |= {f"{layer}input_layernorm.weight": torch.ones(64), f"{layer}odd.weight": torch.ones(4, 33)}
    weights["lm_head.weight"] = torch.randn(4, 64)
    found = {name: w.kind for name, w in quantised(weights, word).items() if isinstance(w, Blocks)}
    inner, outer = PRECISIONS[word]
    assert found == {f"{layer}{name}.weight": inner for name in made} | {"lm_head.weight": outer}
