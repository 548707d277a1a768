"""Muon for the matrices between embedding and head, AdamW for the rest."""

import torch
from torch import nn

from paceline.train.plan import LoopConfig


def make_optimisers(module: nn.Module, config: LoopConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and head, AdamW for the rest. Tied weights count once.

    Muon's steps are scaled to the size of AdamW's (Liu et al. 2025, "Muon is scalable for LLM training", section 2),
    so both take the same learning rate. Weight decay for matrices, none for norms and biases.
    """
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    inner = [p for name, p in trained if p.dim() == 2 and not _is_table(name)]
    tables = [p for name, p in trained if p.dim() >= 2 and (p.dim() > 2 or _is_table(name))]
    vectors = [p for _, p in trained if p.dim() < 2]
    muon: list[torch.optim.Optimizer] = []
    if config.optimiser == "muon" and inner:
        muon = [
            torch.optim.Muon(inner, lr=config.peak_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        ]
        inner = []
    groups = [
        {"params": inner + tables, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adamw = [torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, fused=True)] if groups else []
    return [*muon, *adamw]


def _is_table(name: str) -> bool:
    """Embeddings and heads: their rows are looked up, so orthogonal steps make no sense for them."""
    return "embed" in name or "lm_head" in name
