"""Tables of rotary positions: rows are made when they are used, and are the same in any order."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import models, native

from paceline.core.segment import Segment
from paceline.kernels.turns import STEP, Turns

INVERSE = 10000 ** -(torch.arange(0, 32, 2) / 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_when_they_were_made(dtype):
    count = 3 * STEP + 5
    whole, little = (Turns(count, 64, INVERSE, 1.25, 2.0, dtype) for _ in range(2))
    whole.reach(count)
    for length in (1, STEP, STEP + 1, 7, 2 * STEP + 1, 10 * STEP):
        little.reach(length)
    assert torch.equal(whole.cos, little.cos)
    assert torch.equal(whole.sin, little.sin)
    angle = torch.outer(torch.arange(count).double(), INVERSE.double())
    still = torch.ones(count, 16, dtype=torch.float64)
    cos = 2 * torch.cat([1.25 * angle.cos(), still], 1)
    torch.testing.assert_close(whole.cos[:, :32].double(), cos, atol=0.02 if dtype == torch.bfloat16 else 2e-3, rtol=0)
    assert torch.equal(whole.sin[:, :32], -whole.sin[:, 32:])
    assert whole.key == little.key != Turns(count, 64, INVERSE, 1.25, 1.0, dtype).key


def resident():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says what is in memory")
def test_a_long_context_takes_memory_where_texts_reach_it():
    before = resident()
    turns = Turns(1 << 20, 128, torch.ones(64))
    turns.reach(STEP)
    assert turns.cos.nbytes == 1 << 29
    assert resident() - before < 1 << 25


@pytest.mark.parametrize("family", ["llama3", "gemma3", "gemma4"])
def test_a_text_that_reaches_a_further_row_has_the_logits_of_a_whole_table(family):
    """With a step smaller than a text, token by token and in pieces, for layers of both kinds."""
    model, text = models.model(family, max_position_embeddings=STEP + 40), np.arange(STEP + 20) % 300 + 4
    whole, target = native.of(model), native.of(model)
    whole.reach(STEP + 41)
    slots = [one.add_row(len(text)) for one in (whole, target)]
    for begin, end in ((0, STEP - 2), (STEP - 2, STEP - 1), (STEP - 1, STEP), (STEP, STEP + 3), (STEP + 3, STEP + 20)):
        logits = []
        for one, slot in zip((whole, target), slots, strict=True):
            logits.append(one.verify([Segment.chunk(slot, text[begin:end], last=True)]).logits)
            one.commit(slot, range(end - begin))
        assert torch.equal(*logits)
    assert target.ops.turns.cos[STEP + 10].abs().sum() > 0
