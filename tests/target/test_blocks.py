"""Blocks of every type that the package gguf knows: read and made as it does, and held as Q8_0."""

import mmap
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.gguf_files import random_blocks

from paceline.formats.precision import PRECISIONS, multipliable, quantised
from paceline.kernels.blocks import KINDS, Q4_0, Q4_K, Q8_0, Blocks, give_back, kind_of, quantise

READABLE = [kind for number in gguf.GGMLQuantizationType if (kind := kind_of(number)) and kind.inputs > 1]
"""All formats of blocks that the package can expand."""


def reference(blocks):
    kind = gguf.GGMLQuantizationType(blocks.kind.number)
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(blocks.data.numpy(), kind))


def bits(values):
    """As integers, all that are not numbers alike."""
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)


def anything(kind, outputs=64, blocks=5, seed=0):
    """Random bytes."""
    generator = torch.Generator().manual_seed(seed)
    size = (outputs, blocks * kind.nbytes)
    return Blocks(kind, torch.randint(0, 256, size, dtype=torch.uint8, generator=generator))


def test_sizes_are_ggmls():
    for kind in KINDS.values():
        known = gguf.GGMLQuantizationType(kind.number)
        assert (known.name, gguf.GGML_QUANT_SIZES[known]) == (kind.name, (kind.inputs, kind.nbytes))


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_any_bytes_are_read_as_the_reference_reads_them(kind, monkeypatch):
    blocks = anything(kind)
    assert torch.equal(bits(blocks.dense()), bits(reference(blocks)))
    monkeypatch.setattr("paceline.kernels.blocks.CHUNK", 1000)  # in pieces
    assert torch.equal(bits(blocks.dense()), bits(reference(blocks)))
    few = torch.tensor([3, 0, 63])
    assert torch.equal(bits(blocks.rows(few).dense()), bits(blocks.dense()[few]))


@pytest.mark.parametrize("kind", [Q8_0, Q4_0], ids=lambda kind: kind.name)
def test_weights_of_any_dtype_are_made_into_the_references_bytes(kind, monkeypatch):
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
def test_what_is_made_is_near(kind, error):
    weight = torch.randn(9, 96, generator=torch.Generator().manual_seed(2))
    largest = weight.view(9, 3, 32).abs().amax(-1, keepdim=True).expand(9, 3, 32).reshape(9, 96)
    bound = error * largest + weight.abs() / 1024  # the scale is rounded to float16
    assert bool(((quantise(weight, kind).dense() - weight).abs() <= 1.001 * bound).all())


@pytest.mark.parametrize("kind", [kind for kind in READABLE if kind not in KINDS.values()], ids=lambda kind: kind.name)
def test_other_formats_are_held_as_q8_0_but_not_what_is_only_looked_up(kind):
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


@pytest.mark.parametrize("word", PRECISIONS)
def test_what_is_small_and_sensitive_stays_as_it_is(word):
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


def test_what_was_read_of_a_file_is_given_back(tmp_path):
    """Pages of the file alone, and whole ones; what is in them stays the same."""
    size = 64 << 20
    (tmp_path / "file").write_bytes(bytes(range(256)) * (size >> 8))
    mapped = torch.from_numpy(np.memmap(tmp_path / "file", np.uint8, "c"))
    weights = Blocks(Q8_0, mapped[100:].view(-1)[: (size - 100) // 34 * 34].view(-1, 34))
    own, before = torch.ones(size, dtype=torch.uint8), weights.data.sum()
    resident = in_memory()
    give_back([weights, own])
    assert resident - in_memory() > 0.9 * size
    assert weights.data.sum() == before
    assert own.min() == 1


def in_memory():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
