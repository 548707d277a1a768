"""Medusa's heads: each one learns, from the target's last state alone, what the target says a few tokens later.

Cai et al. 2024, "Medusa" (arXiv 2401.10774), with the target frozen ("Medusa-1"). Head k reads the state after the
final norm and shares the target's output head, or has one of its own, which begins as a copy of it (`--own-heads`).
The loss is towards the target's distribution, not towards the tokens of somebody's text, as in all our heads.

Doesn't know: how drafts are made or verified.

    paceline train medusa models/demo --data answers.jsonl --out build/medusa
"""

import re
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from paceline.draft.medusa import Medusa
from paceline.draft.neural.networks import ResidualHeads
from paceline.train import options
from paceline.train.heads import HeadsConfig, HeadsLoss, Teacher, prepare, train_heads
from paceline.train.plan import LoopConfig


class MedusaLoss(HeadsLoss):
    """K residual heads over the state after the final norm."""

    def __init__(self, teacher: Teacher, config: HeadsConfig, layers: int = 1, own_heads: bool = False) -> None:
        super().__init__(teacher, config)
        self.layers = layers
        self.network = ResidualHeads(config.depth, layers, teacher.config.hidden_size)
        self.lm_heads = own_output_heads(teacher, config.depth) if own_heads else None

    def drafted(self, input_ids: Tensor, states: Tensor, at: Tensor) -> Tensor:
        h = states.flatten(0, 1)[at]
        return torch.stack([head(h) for head in self.network], 1)

    def saved(self) -> dict[str, Tensor]:
        """By the names of the authors' files, in which an output head follows the blocks of its head."""
        return {
            re.sub(r"^lm_heads\.(\d+)", rf"\1.{self.layers}", name): weight for name, weight in super().saved().items()
        }


def own_output_heads(teacher: Teacher, depth: int) -> nn.ModuleList:
    """An output head for each depth, which begins as the target's."""
    vocab_size, width = teacher.table.shape
    heads = [nn.Linear(width, vocab_size, bias=False) for _ in range(depth)]
    with torch.no_grad():
        for head in heads:
            head.weight.copy_(teacher.table)
    return nn.ModuleList(heads)


def train_medusa(
    target: Path,
    answers: Path,
    out: Path,
    run: Path,
    loop: LoopConfig,
    config: HeadsConfig = HeadsConfig(),
    layers: int = 1,
    own_heads: bool = False,
    states: Path | None = None,
) -> bool:
    """Train heads for the model in `target` on `answers` (a file of `generated_rows`); writes `out` in bfloat16, for
    `medusa:PATH`. False when interrupted; the same call goes on."""
    facts = {"medusa_num_heads": config.depth, "medusa_num_layers": layers, "own_heads": own_heads}

    def make(teacher: Teacher) -> HeadsLoss:
        return MedusaLoss(teacher, config, layers, own_heads)

    return train_heads(Medusa.name, target, answers, out, run, loop, config, make, facts, states)


@options.with_options
def command(
    setup: options.DrafterOptions,
    heads: options.HeadOptions,
    layers: Annotated[int, typer.Option(help="Residual blocks of a head.", min=1)] = 1,
    own_heads: Annotated[
        bool, typer.Option("--own-heads", help="An output head for each head; they are most of its size.")
    ] = False,
) -> bool:
    """Train Medusa's heads, for `--draft medusa:OUT`: K small networks that read the target's last state.

    paceline train medusa models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/medusa

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end the
    heads are measured on held-out answers, by depth and rank; slots.json has the trees that follow from that.
    """
    return train_medusa(*prepare(setup, heads), layers, own_heads, heads.states)
