"""Recorded forwards: the same bits as the same layers called one by one, whatever changes between forwards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests import exact, models, native

from paceline.engine.round import Segment
from paceline.target.base import BEFORE_NORM, Needs
from paceline.target.decoder import Decoder
from paceline.target.kernels import program

NEEDS = Needs(hidden_layers=(1, BEFORE_NORM))


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def made(kind: str) -> Decoder:
    """A decoder whose products are ours: in blocks, or exact."""
    dtype = torch.float32 if "float32" in kind else torch.bfloat16
    target = native.of(models.model("qwen3-bias"), dtype, precision="int8" if "int8" in kind else None)
    if "exact" in kind:
        target.make_exact()
    return target


def story(target: Decoder) -> list[torch.Tensor]:
    """Logits and states of forwards of rows that come and go, while the cache grows."""
    rng, results = np.random.default_rng(0), []
    slots = exact.prepared(target, [rng.integers(4, 300, n).tolist() for n in (3, 40, 64)])
    for turn in range(12):
        if turn == 6:
            slots.append(target.add_row(100))
        segments = []
        for slot in slots[turn % 2 :]:
            parents = [-1, *(int(rng.integers(i)) for i in range(1, int(rng.integers(1, 5))))]
            segments.append(exact.tree(slot, rng.integers(4, 300, len(parents)).tolist(), parents))
        verdict = target.verify(segments, NEEDS)
        results += [verdict.logits, *(verdict.hidden[layer] for layer in NEEDS.hidden_layers)]
        for segment in segments:
            target.commit(segment.slot, [0])
    return results


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("kind", ["int8", "int8-float32", "exact", "exact-float32", "exact-int8"])
def test_has_the_bits_of_its_layers_called_one_by_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = made(kind)
    found = story(target)
    assert target._programs is not None
    assert any(target._programs._programs.values()), "nothing was recorded"
    monkeypatch.setattr(program, "MOST_ROWS", 0)
    for one, other in zip(found, story(made(kind)), strict=True):
        assert torch.equal(one, other)


def test_a_layer_in_which_torch_computes_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    target = made("int8")
    layer = target.blocks[1].layer
    monkeypatch.setattr(layer.mlp, "gate_up", lambda x, product=layer.mlp.gate_up: product(x).clone())
    slot, other = target.add_row(8), made("int8")
    logits = target.verify([exact.tree(slot, [5], [-1])]).logits
    assert list(target._programs._programs.values()) == [None]
    assert torch.equal(logits, other.verify([exact.tree(other.add_row(8), [5], [-1])]).logits)


def test_many_rows_of_a_prompt_do_not_change_a_recorded_forward() -> None:
    """A forward that is not recorded, between two that are, must not write into their memory."""
    target = made("int8")
    slot, other = exact.prepared(target, [[5, 6, 7], [9]])
    one = target.verify([exact.tree(slot, [5], [-1])]).logits
    target.verify([Segment.chunk(other, np.arange(4, 84), last=True)])
    assert torch.equal(target.verify([exact.tree(slot, [5], [-1])]).logits, one)
