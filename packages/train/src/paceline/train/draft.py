"""Draft models, distilled on the target's answers.

A draft is a small Llama with the target's tokenizer. Its distribution q learns the target's p at every token. The loss
is KL(p || q) plus the total variation, which is the rate at which drafts are rejected (Zhou et al. 2024, "DistillSpec:
Improving speculative decoding via knowledge distillation", section 4)."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline import __version__
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.train.layers import use_blocks
from paceline.train.llama import ModelConfig, new_llama
from paceline.train.loss import Distance
from paceline.train.options import Compiled, DrafterOptions
from paceline.train.student import Student, chain
from paceline.train.trainer import (
    LOSS_HELP,
    StudentConfig,
    Trainer,
    Training,
    pad_token,
)


@dataclass(frozen=True, kw_only=True)
class DraftConfig(StudentConfig):
    """The shape of a draft, and what a batch is made of. It begins with random weights, so it makes many passes."""

    passes: ClassVar[int] = 20

    layers: int = option(3, "Number of layers of the draft model.", least=1)
    hidden: int = option(128, "Width of the draft model, a multiple of 64.", least=64)
    rows: int = option(32, "Number of rows in a batch.", least=1)
    loss: Distance = option("kl+tv", LOSS_HELP)

    def __post_init__(self) -> None:
        if self.hidden % 64:
            raise PacelineError(f"--hidden is {self.hidden}; heads are 64 wide, so it is a multiple of 64")

    def shape(self, positions: int) -> ModelConfig:
        """The shape of a draft for a target with a context of `positions` tokens."""
        return ModelConfig(
            hidden=self.hidden, layers=self.layers, heads=self.hidden // 64, kv_heads=1, intermediate=3 * self.hidden,
            positions=min(ModelConfig.positions, positions),
        )  # fmt: skip


class DistilLoss(Student):
    """A draft model whose forward is its distance from the target. input_ids [B, T]. Labels are not used: p is known at
    every position, so all positions but padding are trained on."""

    kind = "draft"

    def __init__(self, draft: Any, target: Any, pad: int, compiled: bool = False, loss: Distance = "kl+tv") -> None:
        super().__init__(target, loss)
        self.draft = draft
        if compiled:
            use_blocks(draft, target)
        self.compiled, self.pad = compiled, pad
        # A function, not a module: the compiled copy must not appear among the parameters.
        self._run = torch.compile(self._hidden) if compiled else self._hidden

    def _hidden(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        last = self.last_states(input_ids)
        return self.draft.model(input_ids=input_ids, use_cache=False).last_hidden_state, last

    def table(self, depth: int = 0) -> Tensor:
        table: Tensor = self.draft.lm_head.weight
        return table

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, last = (self._run if self.training and not self.cache else self._hidden)(input_ids)
        # Padding is a run of the pad token up to the end of the row. A single one may begin a document.
        following = torch.cat([input_ids[:, 1:], torch.full_like(input_ids[:, :1], self.pad)], 1)
        return self.distance(hidden, last, (input_ids != self.pad) | (following != self.pad))

    def drafts(self, input_ids: Tensor, depths: int) -> tuple[Tensor, Iterator[Tensor]]:
        hidden, last = self._hidden(input_ids)
        return last, chain(hidden, depths)


def train_draft(training: Training, config: DraftConfig = DraftConfig(), compiled: bool = True) -> bool:
    """Train a draft and write a model folder in bfloat16, for `model:PATH`. False when interrupted; it goes on."""
    trainer = Trainer.open(training, config)
    facts = trainer.teacher.config
    network: Any = new_llama(
        config.shape(facts.max_position_embeddings), training.loop.seed, vocab_size=facts.vocab_size,
        bos_token_id=facts.bos_token_id, eos_token_id=facts.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    begin_embedding(network, trainer.teacher.get_input_embeddings().weight)
    student = DistilLoss(network, trainer.teacher, pad_token(trainer.tokenizer), compiled, config.loss)
    trainer.prepare(student, config)
    if not trainer.train(student):
        return False
    if trainer.first:
        _, measured, lines = trainer.held_out(student)
        of_target = {"paceline": __version__, "target": asdict(trainer.target_facts())}
        trainer.save_model(network, torch.bfloat16, of_target | trainer.facts(student.kind, **measured))
        trainer.report(lines)
    return True


def command(setup: DrafterOptions, config: DraftConfig, compiled: Compiled = True) -> bool:
    """Train a draft model on the target's own answers, recorded or generated, for `--draft model:OUT`.

    paceline train model smollm2 --prompts mine=prompts.jsonl --generate 5000 --out build/draft

    At the end the share of the draft's tokens that the target would accept is measured on held-out answers."""
    return train_draft(setup.training(config), config, compiled)


@torch.no_grad()
def begin_embedding(network: Any, table: Tensor) -> None:
    """Begin a draft's embedding, which is its output head too, as the target's [V, H], along the axes in which its rows
    differ most, scaled to rows of length 1: with a large vocabulary most of a draft is its embedding."""
    own = network.get_input_embeddings().weight
    size = min(own.shape[1], table.shape[1])
    rows = table - table.mean(0)  # A part shared by all rows changes no probability.
    rows = rows @ torch.linalg.eigh(rows.T @ rows)[1][:, -size:].flip(1)
    own[:, :size] = rows / rows.norm(dim=1).mean()
