"""A draft learns its target's distribution, and the evaluation says how far."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.train.data import Document, Mixture, assistant, user
from paceline.train.draft import DistilLoss
from paceline.train.loop import LoopConfig, train
from paceline.train.loss import IGNORE
from zoo.evaluate import HeldOut, agreement, compare, held_out_prompts

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
    before = agreement(student, held)[-1]
    config = LoopConfig(tokens=96 * 150, mixed_precision="no", peak_lr=2e-2, warmup_steps=5)
    assert train(student, Mixture({"a": rows()}, 8), config, tmp_path)
    after = agreement(student, held)[-1]
    assert after["overlap"] > before["overlap"] + 0.2
    assert after["top1"] > before["top1"]
    assert agreement(DistilLoss(target, target, PAD), held)[-1]["overlap"] == pytest.approx(1)
    assert all(p.grad is None for p in target.parameters())


def test_padding_is_not_learnt() -> None:
    target, draft = network(0), network(1)
    ids = torch.randint(1, VOCABULARY, (1, 6))
    padded = torch.cat([ids, torch.full((1, 5), PAD)], 1)
    loss: Any = DistilLoss(draft, target, PAD).eval()
    shorter = loss(torch.cat([ids, torch.full((1, 1), PAD)], 1), ids)
    torch.testing.assert_close(loss(padded, padded), shorter)


def test_the_comparison_looks_at_the_same_positions() -> None:
    ids, labels = rows(4)
    labels = labels.copy()
    labels[:, ::2] = IGNORE
    held = HeldOut({"a": rows(4)}, {"a": (ids, labels)}, np.random.default_rng(1).integers(0, VOCABULARY, 5000))
    text, answers = compare(network(0), held, VOCABULARY)
    assert (text.tokens, answers.tokens) == (48, 24)
    for found in (text, answers):  # nothing to learn in noise: both near the uniform distribution
        assert found.ngram == pytest.approx(np.log(VOCABULARY), abs=0.3)
        assert found.model == pytest.approx(np.log(VOCABULARY), abs=0.3)


def test_held_out_prompts_wait_for_an_answer() -> None:
    talk = Document("t", messages=(user("a"), assistant("b"), user("c"), assistant("d")))
    asked = Document("q", messages=(user("e"), assistant("f")))
    prompts = held_out_prompts({"t": [talk] * 9, "q": [asked] * 9, "books": [Document("books", text="x")]}, 7)
    assert len(prompts) == 7
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    assert {len(prompt) for prompt in prompts} == {1, 3}
    assert [m["content"] for m in prompts[0]] == ["e"]
