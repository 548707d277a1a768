"""Kangaroo's adapter: one attention layer after the target's layer l learns to predict what the whole target predicts.

Liu et al. 2024 (arXiv 2404.18911): the target is frozen. At every token of its own answers the adapter's distribution
q, through the target's head, learns the target's p by soft cross-entropy. Early and last states come from one forward.
Position t of both predicts token t + 1, and is trained on if that token is the target's own. (The authors' code selects
by token t - 1, and never shows the adapter the first token.) The adapter begins as the target's final norm; the
authors' begins at random."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.draft.methods.kangaroo import Kangaroo
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.formats.rotary import rotary_tables
from paceline.formats.shape import Shape
from paceline.target.load import read_config
from paceline.train.loss import IGNORE
from paceline.train.options import DrafterOptions
from paceline.train.student import Student, chain
from paceline.train.trainer import HeadConfig, Trainer, train_head
from paceline.train.unrolled import Memory, UnrolledAttention


@dataclass(frozen=True, kw_only=True)
class KangarooConfig(HeadConfig):
    """An adapter's place and rate."""

    passes: ClassVar[int] = 10  # The authors make 20.
    # AdamW with its usual decay, as in the paper. The authors' rate of 5e-5 is for 7 billion parameters.
    own = {"optimiser": "adamw", "weight_decay": 0.01}

    exit: int | None = option(None, "Number of the target's first layers that draft. [default: an eighth]", least=0)
    lr: float = option(1e-3, "Peak learning rate.", least=0)

    def check(self, target: Path) -> None:
        super().check(target)
        layers = Shape.of(read_config(target)).num_layers
        if not 0 <= self.exit_of(layers) < layers:
            raise PacelineError(f"--exit is {self.exit}, and {target} has {layers} layers: it is 0 to {layers - 1}")

    def exit_of(self, layers: int) -> int:
        """The exit in a target of so many layers, by default after an eighth. (The paper: fastest at 0.06 to 0.08.)"""
        return min(max(1, layers // 8), layers - 1) if self.exit is None else self.exit

    def student(self, trainer: Trainer) -> Student:
        return KangarooLoss(trainer.teacher, self)


class AdapterModule(UnrolledAttention):
    """The adapter in training: `paceline.draft.methods.kangaroo.Adapter` without a cache. Parameters are named as in
    `adapter_shapes`. The input norm and the output projection begin so that the adapter is the target's final norm."""

    def __init__(self, teacher: Any) -> None:
        shape = Shape.of(teacher.config)
        super().__init__(shape, shape.hidden_size)
        self.input_norm = nn.RMSNorm(shape.hidden_size, shape.eps)
        self.output_norm = nn.RMSNorm(shape.hidden_size, shape.eps)
        with torch.no_grad():
            self.output_norm.weight.copy_(teacher.model.norm.weight)

    def forward(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        """Inputs of the target's head [B, T, H] from early states [B, T, H]; cos, sin [T, head_dim]."""
        y: Tensor = self.output_norm(states + super().forward(self.input_norm(states), cos, sin, Memory()))
        return y


class KangarooLoss(Student):
    """An adapter over early states, which are the inputs of the target's layer `exit`, counted from 0."""

    kind = Kangaroo.name
    cos: Tensor
    sin: Tensor

    def __init__(self, teacher: Any, config: KangarooConfig = KangarooConfig()) -> None:
        super().__init__(teacher, config.loss)
        shape = Shape.of(teacher.config)
        self.config, self.exit = config, config.exit_of(shape.num_layers)
        self.reads = (self.exit,)
        self.adapter = AdapterModule(teacher)
        cos, sin = rotary_tables(teacher.config, shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Early states, and the last ones after the final norm, [B, T, H] each."""
        states, last = self.target_states(input_ids)
        return states[..., 0, :], last

    def drafted(self, early: Tensor) -> Tensor:
        """Inputs of the head for drafting, [B, T, H], from early states."""
        length = early.shape[1]
        drafted: Tensor = self.adapter(early, self.cos[:length], self.sin[:length])
        return drafted

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        early, last = self.states(input_ids)
        return self.distance(self.drafted(early), last, labels != IGNORE)

    def drafts(self, input_ids: Tensor, depths: int) -> tuple[Tensor, Iterator[Tensor]]:
        early, last = self.states(input_ids)
        return last, chain(self.drafted(early), depths)

    def saved(self) -> dict[str, Tensor]:
        return dict(self.adapter.named_parameters())

    def read_weights(self) -> tuple[int, int]:
        once, each = super().read_weights()
        early = self.teacher.model.layers[: self.exit]
        return once, each + sum(weight.numel() for weight in early.parameters())

    def facts(self) -> dict[str, Any]:
        return {"exit_layer": self.exit}

    def untrained(self) -> Student:
        """The target's own final norm and head after layer l: an exit without an adapter."""
        return KangarooLoss(self.teacher, self.config).to(self.teacher.device)


def command(setup: DrafterOptions, config: KangarooConfig) -> bool:
    """Train an adapter with which a target's first layers draft, for `--draft kangaroo:OUT`.

    paceline train kangaroo smollm2 --prompts mine=prompts.jsonl --generate 5000 --out build/kangaroo

    At the end the adapter is measured on held-out answers, and for comparison the target's own norm and head in its
    place."""
    return train_head(setup.training(config), config)
