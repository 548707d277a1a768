"""What a recipe is told: data, budget, options. Recipes add options of their own to one of these classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline.draft.spec import option
from paceline.jsonl import check_folder
from paceline.target.folder import gguf_of, is_gguf
from paceline.train.loop import LoopConfig
from paceline.train.loss import Distance
from paceline.workbench.peers.setup import expanded, folder_of


@dataclass(frozen=True)
class Training:
    """What a recipe trains on, and for how long.

    target   the model to draft for, named as in `load`.
    answers  a file of `generated_rows`.
    out      folder to write.
    run      folder of checkpoint and log, for resuming."""

    target: str | Path
    answers: Path
    out: Path
    run: Path
    loop: LoopConfig


def training_folder(target: str | Path) -> Path:
    """The folder of a model's weights. Those of a GGUF file are expanded to bfloat16 in the user's cache; those are the
    weights of `smollm2` in generation too, on a processor with units for bfloat16."""
    return expanded(gguf_of(target), torch.bfloat16) if is_gguf(target) else folder_of(target)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Batches and held-out rows. Recipes add their own fields.

    passes  over the answers, if no budget is given.
    own     the recipe's settings of `LoopConfig`, with the learning rate."""

    passes: ClassVar[int]
    own: ClassVar[Mapping[str, Any]] = {}

    length: int = option(512, "Number of tokens in a training row.", least=8)
    rows: int = option(16, "Number of rows in a batch.", least=1)
    held_out: float = 0.05  # share of the prompts
    lr: float = option(2e-3, "Peak learning rate.", least=0)

    @property
    def loop(self) -> dict[str, Any]:
        """The settings of `LoopConfig`."""
        return {**self.own, "peak_lr": self.lr}

    def check(self, target: Path) -> None:
        """PacelineError if the recipe cannot work with the model in `target`. Called before answers are generated."""


LOSS_HELP = "Distance from the target's distribution: soft (cross-entropy), kl+tv (plus total variation), lk (LK loss)."


@dataclass(frozen=True, kw_only=True)
class StudentConfig(TrainerConfig):
    """What drafters that learn the target's distribution have in common."""

    loss: Distance = option("soft", LOSS_HELP)
    loss_vocab: int = option(
        8192,
        "Number of tokens over which the loss compares distributions; these are the most frequent ones of the "
        "answers.",
        least=1,
    )
    states: Path | None = option(
        None,
        "Folder to keep the target's states in, so that other trainings on the same answers need not compute them.",
        file_okay=False,
        callback=check_folder,
    )
