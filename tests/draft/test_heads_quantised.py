"""Heads whose matrices are in blocks of eight and four bits: the target is untouched, so the text is its own."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import MethodError
from paceline.target.quantised.blocks import Blocks


@pytest.mark.parametrize(("bits", "own"), [(16, 16), (8, 8), (None, 8)])
def test_heads_round_their_inputs_as_their_target_does(bits: int | None, own: int) -> None:
    from paceline.draft.models.layers import placed

    class Target:
        device, dtype, activations = torch.device("cpu"), torch.float32, bits

    blocks = placed({"fc.weight": torch.ones(32, 64)}, Target(), "int8")["fc.weight"]  # type: ignore[arg-type]
    assert isinstance(blocks, Blocks)
    assert blocks.activations == own


def test_blocks_are_refused_where_nothing_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.draft.models.layers import placed

    class Elsewhere:
        device = type("device", (), {"type": "cuda", "__str__": lambda self: "cuda:0"})()

    with pytest.raises(MethodError, match="run on CPUs, not on cuda:0"):
        placed({}, Elsewhere(), "int8")  # type: ignore[arg-type]
