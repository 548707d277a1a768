"""A draft learns its target's distribution."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.train.data import Mixture
from paceline.train.draft import DistilLoss
from paceline.train.loop import LoopConfig, train
from paceline.train.measure import measure

VOCABULARY, PAD = 30, 0


def network(seed: int, width: int = 16, sharp: float = 1.0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, head_dim=width, pad_token_id=PAD,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight *= sharp
    return model


def rows(count: int = 60, length: int = 12) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(1, VOCABULARY, (count, length + 1))
    return ids[:, :-1], ids[:, 1:]


def test_a_draft_learns_to_agree(tmp_path: Path) -> None:
    target, draft = network(0, sharp=60.0), network(1)
    held = {"a": rows(8)}
    student = DistilLoss(draft, target, PAD)
    before = measure(student, held)["all"][0].row
    config = LoopConfig(tokens=96 * 150, mixed_precision="no", peak_lr=2e-2, warmup_steps=5)
    assert train(student, Mixture({"a": rows()}, 8), config, tmp_path)
    after = measure(student, held)["all"][0].row
    assert after["overlap"] > before["overlap"] + 0.2
    assert after["top1"] > before["top1"]
    assert measure(DistilLoss(target, target, PAD), held)["all"][0].row["overlap"] == pytest.approx(1)
    assert all(p.grad is None for p in target.parameters())


def test_padding_is_not_learnt() -> None:
    target, draft = network(0), network(1)
    ids = torch.randint(1, VOCABULARY, (1, 6))
    padded = torch.cat([ids, torch.full((1, 5), PAD)], 1)
    loss: Any = DistilLoss(draft, target, PAD).eval()
    shorter = loss(torch.cat([ids, torch.full((1, 1), PAD)], 1), ids)
    torch.testing.assert_close(loss(padded, padded), shorter)
