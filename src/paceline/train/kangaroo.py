"""Kangaroo's adapter: one attention layer after the target's layer l learns to predict what the whole target predicts.

Liu et al. 2024 (arXiv 2404.18911): the target is frozen. At every token of its own answers the adapter's distribution
q, through the target's head, learns the target's p by soft cross-entropy. Early and last states come from one forward.
Position t of both predicts token t + 1, and is trained on if that token is the target's own. (The authors' code selects
by token t - 1, and never shows the adapter the first token.) The adapter begins as the target's final norm; the
authors' begins at random.

    paceline train kangaroo models/demo --data answers.jsonl --out build/kangaroo
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.draft.kangaroo import Kangaroo, adapter_shapes
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.target.shape import Shape, rotary_tables
from paceline.train.data import Rows, all_batches
from paceline.train.loss import IGNORE, soft_cross_entropy
from paceline.train.options import DrafterOptions, with_options
from paceline.train.trainer import Student, Trainer, TrainerConfig, Training, check_target, overlaps
from paceline.train.unrolled import UnrolledAttention

PASSES = 10
"""Over the answers, if no budget is given. The authors make 20."""


@dataclass(frozen=True, kw_only=True)
class KangarooConfig(TrainerConfig):
    """The adapter's place."""

    exit: int | None = option(None, "First layers of the target, which draft; an eighth if left out.", least=0)
    lr: float = option(1e-3, "Peak learning rate.", least=0)


class AdapterModule(UnrolledAttention):
    """The adapter in training: `paceline.draft.kangaroo.Adapter` without a cache. Parameters are named as in
    `adapter_shapes`. Norms begin at 1, the output projection at 0."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, shape.hidden_size)
        self.input_norm = nn.RMSNorm(shape.hidden_size, shape.eps)
        self.output_norm = nn.RMSNorm(shape.hidden_size, shape.eps)

    def forward(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        """Inputs of the target's head [B, T, H] from early states [B, T, H]; cos, sin [T, head_dim] of
        `rotary_tables`."""
        y: Tensor = self.output_norm(states + super().forward(self.input_norm(states), cos, sin, []))
        return y


class KangarooLoss(Student):
    """An adapter whose forward is its loss. input_ids, labels [B, T]; a label is the next token, or IGNORE if that is
    not the target's own.

    teacher  a transformers model.
    exit     early states are the inputs of this layer, counted from 0."""

    cos: Tensor
    sin: Tensor

    def __init__(self, teacher: Any, exit: int) -> None:
        super().__init__(teacher)
        shape = Shape.of(teacher.config)
        self.exit = exit
        self.adapter = AdapterModule(shape)
        with torch.no_grad():  # begin as the target's own norm and head
            self.adapter.output_norm.weight.copy_(teacher.model.norm.weight)
        cos, sin = rotary_tables(teacher.config, shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Early states, and the last ones after the final norm, [B, T, H] each."""
        out = self.teacher.model(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        return out.hidden_states[self.exit], out.last_hidden_state

    def drafted(self, early: Tensor) -> Tensor:
        """Inputs of the head for drafting, [B, T, H], from early states."""
        length = early.shape[1]
        drafted: Tensor = self.adapter(early, self.cos[:length], self.sin[:length])
        return drafted

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        early, last = self.states(input_ids)
        return soft_cross_entropy(self.drafted(early), last, self.teacher.lm_head.weight, labels != IGNORE)


@torch.no_grad()
def measure(module: KangarooLoss, held: Mapping[str, Rows], batch: int = 4) -> dict[str, Any]:
    """Measure the adapter, and as baseline the target's own norm and head after layer l, over the labelled positions
    of `held`, at temperature 1: {"tokens", "entropy" (of p, the least possible soft_ce), "adapter", "no_adapter"}.

    The last two are {"soft_ce" (mean of -sum p log q, nats), "overlap", "top1"}, as in `trainer.Agreement`."""
    sums = {"adapter": torch.zeros(3), "no_adapter": torch.zeros(3)}
    entropy, tokens = 0.0, 0
    head, norm = module.teacher.lm_head, module.teacher.model.norm
    for ids, labels in all_batches(held, batch):
        known = (labels != IGNORE).to(head.weight.device)
        early, last = module.states(ids.to(head.weight.device))
        p = head(last[known]).float().softmax(-1)
        entropy -= float(torch.xlogy(p, p).sum())
        tokens += len(p)
        for name, hidden in (("adapter", module.drafted(early)), ("no_adapter", norm(early))):
            log_q = head(hidden[known]).float().log_softmax(-1)
            sums[name] += torch.tensor([-float((p * log_q).sum()), *overlaps(p, log_q.exp())])
    names = ("soft_ce", "overlap", "top1")
    fits = {name: dict(zip(names, (total / max(tokens, 1)).tolist(), strict=True)) for name, total in sums.items()}
    return {"tokens": tokens, "entropy": entropy / max(tokens, 1), **fits}


def no_adapter(teacher: Any) -> dict[str, Tensor]:
    """The weights of an adapter that only applies the target's final norm: the baseline of a trained one."""
    shape = Shape.of(teacher.config)
    tensors = {name: torch.zeros(of) for name, of in adapter_shapes(shape).items()}
    tensors["input_norm.weight"] += 1
    tensors["output_norm.weight"] += teacher.model.norm.weight.detach().cpu()
    return tensors


def exit_of(target: Path, exit: int | None = None) -> int:
    """The exit layer; by default an eighth of the layers, at least one. (In the paper speed peaks at 0.06 to 0.08 of
    them.) PacelineError if the model in `target` has no such layer, or heads cannot run with it."""
    layers = Shape.of(check_target(target)).num_layers
    exit = min(max(1, layers // 8), layers - 1) if exit is None else exit
    if not 0 <= exit < layers:
        raise PacelineError(f"--exit is {exit}, and {target} has {layers} layers: it is 0 to {layers - 1}")
    return exit


def train_adapter(training: Training, config: KangarooConfig = KangarooConfig()) -> bool:
    """Train an adapter after layer `config.exit` of the target; writes a folder for `kangaroo:PATH`. False when
    interrupted; the same call goes on."""
    exit = exit_of(training.target, config.exit)
    trainer = Trainer.open(training, config, must_hold_out=True)
    module = KangarooLoss(trainer.teacher, exit)
    if not trainer.train(module):
        return False
    if trainer.first:
        fits = measure(module, trainer.held)
        tensors = module.adapter.named_parameters()
        trainer.save_head(Kangaroo.name, tensors, table(fits), exit_layer=exit, held_out=fits)
    return True


def table(fits: Mapping[str, Any]) -> list[str]:
    """A table of what `measure` returns."""
    lines = [f"held out: {fits['tokens']:,} tokens, entropy of the target {fits['entropy']:.3f} nats"]
    lines += [f"{'':12}{'soft CE':>9}{'overlap':>9}{'top 1':>9}"]
    for name in ("no_adapter", "adapter"):
        fit = fits[name]
        lines.append(f"{name.replace('_', ' '):12}{fit['soft_ce']:9.3f}{fit['overlap']:9.3f}{fit['top1']:9.3f}")
    return lines


@with_options
def command(setup: DrafterOptions, config: KangarooConfig) -> bool:
    """Train an adapter with which a target's first layers draft, for `--draft kangaroo:OUT`.

    paceline train kangaroo models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/kangaroo

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end the
    adapter is measured on held-out answers, and for comparison the target's own norm and head in its place.
    """
    exit_of(setup.target, config.exit)
    # AdamW with its usual decay, as in the paper. The authors' rate of 5e-5 is for 7 billion parameters.
    return train_adapter(setup.training(PASSES, optimiser="adamw", peak_lr=config.lr, weight_decay=0.01), config)
