"""Weights of draft heads in blocks of eight and four bits."""

import pytest
import torch

from paceline.draft.models.layers import placed
from paceline.errors import MethodError
from paceline.kernels.blocks import Blocks


@pytest.mark.parametrize(("bits", "own"), [(16, 16), (8, 8), (None, 8)])
def test_heads_round_their_inputs_as_their_target_does(bits, own):
    class Target:
        device, dtype, activations = torch.device("cpu"), torch.float32, bits

    blocks = placed({"fc.weight": torch.ones(32, 64)}, Target(), "int8")["fc.weight"]
    assert isinstance(blocks, Blocks)
    assert blocks.activations == own


@pytest.mark.parametrize("formats", ["Q4_K", None])
def test_heads_have_eight_bits_beside_a_target_in_blocks(formats):
    """In its dtype, float32, a draft would read four times as much."""
    class Target:
        device, dtype, activations, quantised = torch.device("cpu"), torch.float32, 8, formats

    weight = placed({"fc.weight": torch.ones(32, 64, dtype=torch.bfloat16)}, Target())["fc.weight"]
    assert isinstance(weight, Blocks) == (formats is not None)


def test_blocks_are_refused_where_nothing_multiplies_them(monkeypatch):
    class Elsewhere:
        device = type("device", (), {"type": "cuda", "__str__": lambda self: "cuda:0"})()

    with pytest.raises(MethodError, match="run on CPUs, not on cuda:0"):
        placed({}, Elsewhere(), "int8")
