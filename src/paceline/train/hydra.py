"""Hydra's heads: each one also reads the drafted tokens before it.

Ankner et al. 2024, "Hydra" (arXiv 2402.05109). In training the tokens are those of the text. With `--prefix`, which is
a part of Hydra++, a decoder layer of the heads' own and a norm come between the target's state and the heads. The
target's output head is shared: heads of their own would be most of the network (`paceline.draft.hydra` reads them).

Doesn't know: how drafts are made or verified.

    paceline train hydra models/demo --data answers.jsonl --out build/hydra
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from paceline.draft.hydra import Hydra
from paceline.draft.neural.networks import PREFIX, GroundedHeads
from paceline.train import options
from paceline.train.heads import HeadsConfig, HeadsLoss, Teacher, prepare, train_heads
from paceline.train.layers import DecoderLayers
from paceline.train.plan import LoopConfig


class HydraLoss(HeadsLoss):
    """Grounded heads over the state after the final norm, or over what the prefix layer makes of it."""

    def __init__(self, teacher: Teacher, config: HeadsConfig, layers: int = 4, prefix: bool = True) -> None:
        super().__init__(teacher, config)
        self.network = GroundedHeads(config.depth, layers, teacher.config.hidden_size)
        self.prefix: nn.ModuleDict | None = None
        if prefix:
            # Its norm begins at 1 and its input is normed already: an untrained prefix changes next to nothing.
            norm = nn.RMSNorm(teacher.config.hidden_size, teacher.config.rms_norm_eps)
            self.prefix = nn.ModuleDict({"layers": DecoderLayers(teacher.model, 1), "norm": norm})

    def drafted(self, input_ids: Tensor, states: Tensor, at: Tensor) -> Tensor:
        if self.prefix is not None:
            states = self.prefix["norm"](self.prefix["layers"](states, self.teacher.turns(states)))
        state, flat = states.flatten(0, 1)[at], input_ids.flatten()
        tokens = [self.teacher.embedding(flat[(at + k + 1).clamp_max(len(flat) - 1)]) for k in range(len(self.network))]
        return torch.stack([self.network(k, state, tokens[: k + 1]) for k in range(len(self.network))], 1)

    def saved(self) -> dict[str, Tensor]:
        """By the names of the authors' files."""
        renamed = {name.replace("prefix.", f"{PREFIX}.", 1): weight for name, weight in super().saved().items()}
        return renamed


def train_hydra(
    target: Path,
    answers: Path,
    out: Path,
    run: Path,
    loop: LoopConfig,
    config: HeadsConfig = HeadsConfig(),
    layers: int = 4,
    prefix: bool = True,
    states: Path | None = None,
) -> bool:
    """Train heads for the model in `target` on `answers` (a file of `generated_rows`); writes `out` in bfloat16, for
    `hydra:PATH`. False when interrupted; the same call goes on."""
    facts = {
        "hydra_num_heads": config.depth,
        "hydra_num_layers": layers,
        "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
        "grounded_heads": True,
        "tied": True,  # the blocks after a head's first are one, and the file has it once
    }

    def make(teacher: Teacher) -> HeadsLoss:
        return HydraLoss(teacher, config, layers, prefix)

    return train_heads(Hydra.name, target, answers, out, run, loop, config, make, facts, states)


@options.with_options
def command(
    setup: options.DrafterOptions,
    heads: options.HeadOptions,
    layers: Annotated[
        int, typer.Option(help="Blocks of a head; those after the first share their weights.", min=1)
    ] = 4,
    prefix: Annotated[
        bool, typer.Option(help="A decoder layer between the target and the heads, as in Hydra++.")
    ] = True,
) -> bool:
    """Train Hydra's heads, for `--draft hydra:OUT`: each one also reads the drafted tokens before it.

    paceline train hydra models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/hydra

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end the
    heads are measured on held-out answers, by depth and rank; slots.json has the trees that follow from that.
    """
    return train_hydra(*prepare(setup, heads), layers, prefix, heads.states)
