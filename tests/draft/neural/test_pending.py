"""Committed states that wait for a head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tests.draft.rows import row

from paceline.draft.neural.pending import CHUNK, Pending


def test_pieces_come_in_the_order_of_the_text_and_the_end_goes_on_waiting() -> None:
    facts: Any = SimpleNamespace(hidden_size=1, max_context=4096, dtype=torch.float32, device="cpu")
    pending, one = Pending(facts, layers=(0,)), row("a")
    pending.start(one)
    states = torch.arange(2 * CHUNK + 5.0)[:, None]
    for part in states.split(700):
        round: Any = SimpleNamespace(rows=[one], committed=lambda i, layer: part)  # noqa: B023
        pending.add(round)
    pieces = list(pending.chunks(one))
    assert [len(piece) for piece in pieces] == [CHUNK, CHUNK]
    assert torch.equal(torch.cat([*pieces, pending.of(one)]), states)
