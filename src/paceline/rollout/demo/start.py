"""The supervised start: a small Llama learns to write worked answers, until a part of them is right.

1.05 million parameters; 350 steps take some two minutes on two cores. The start is the same for all rules of a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from paceline.jsonl import replacing
from paceline.rollout.demo.task import BOS, EOS, PAD, VOCAB_SIZE, encode, problems
from paceline.workbench.llama import ModelConfig, new_llama

SHAPE = ModelConfig(hidden=128, layers=4, heads=4, kv_heads=4, intermediate=512, positions=64)
STEPS, BATCH, RATE, WARM_UP = 350, 128, 1e-3, 50
SAVE_EVERY = 50
"""Steps between two checkpoints: about half a minute's work."""

Progress = Callable[[int, int, str], None]
"""Called with the steps done, those there are, and a few words."""


def policy(seed: int) -> LlamaForCausalLM:
    """The model with random weights."""
    return new_llama(SHAPE, seed, vocab_size=VOCAB_SIZE, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)


def supervised(task: str, seed: int, steps: int, folder: Path, progress: Progress) -> LlamaForCausalLM:
    """The trained start of `seed`; from `folder` if it is there, and a run that was stopped goes on."""
    model, file = policy(seed), folder / f"start-{task}-{seed}-{steps}.pt"
    optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    done = _restore(file, model, optimiser) if file.exists() else 0
    for step in range(done, steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        loss = _loss(model, task, random.Random(seed * 1_000_003 + step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            save(file, {"step": step + 1, "model": model.state_dict(), "optimiser": optimiser.state_dict()})
        progress(step + 1, steps, f"loss {loss.item():.3f}")
    return model.eval()


def save(file: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all."""
    with replacing(file) as beside:
        torch.save(state, beside)


def _restore(file: Path, model: LlamaForCausalLM, optimiser: torch.optim.Optimizer) -> int:
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])


def _loss(model: LlamaForCausalLM, task: str, rng: random.Random) -> torch.Tensor:
    """Cross-entropy of worked answers; questions are read and not learnt."""
    batch = problems(task, BATCH, rng)
    texts = [(len(p.prompt), [*p.prompt, *encode(p.worked), EOS]) for p in batch]
    width = max(len(text) for _, text in texts)
    ids = torch.tensor([[*text, *[PAD] * (width - len(text))] for _, text in texts])
    labels = torch.tensor([[-100] * n + text[n:] + [-100] * (width - len(text)) for n, text in texts])
    loss: torch.Tensor = model.train()(ids, attention_mask=(ids != PAD).long(), labels=labels).loss
    return loss
