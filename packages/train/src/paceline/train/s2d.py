"""Sorted: the first layers of a model become a draft model with exits at several depths.

SortedNet's fine-tuning for language models (SoFT; Kavehzadeh et al. 2024, arXiv 2309.08968, section 3) as S2D uses it
(Kavehzadeh et al. 2024, arXiv 2407.01955). The first layers, the embedding, the final norm and the head are copied, and
all are trained. In one forward the states of every exit go through the same norm and head; the loss is the mean over
the exits of the cross-entropy on the assistant's tokens. The target is not in the loss, so a draft works with every
target of the tokenizer; `--teacher` adds the distance to the target's distribution (as in `draft.py`) at every exit,
for a draft for one target.

Difference to the paper: SoFT's sum over exits is a mean here (and in S2D's code), which only rescales the learning
rate.

At the end the thresholds of the exits are chosen that should make the draft fastest for its target. S2D tries several
in decoding (0.5,0.5 for 7B and 13B, 0.75,0.7 for 70B). Here they are computed from held-out answers: the probability of
each exit's best token, whether that is the target's, and the weights read up to the exit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paceline import __version__
from paceline.draft.methods.s2d import NEVER
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.formats.heads.checkpoint import CONFIG, KIND
from paceline.outputs import write_json
from paceline.target.load import read_config
from paceline.train.data import Rows, batches, first_batch
from paceline.train.layers import use_blocks
from paceline.train.loop import Batch
from paceline.train.loss import IGNORE, Distance, LmLoss, chunked_cross_entropy, distance
from paceline.train.measure import Fit, Fits, fit_lines, rows_of, with_all
from paceline.train.options import Compiled, DrafterOptions, Layers, layers_of
from paceline.train.saving import adapter_tensors, save_adapter, with_adapters
from paceline.train.trainer import (
    LOSS_HELP,
    Trainer,
    TrainerConfig,
    Training,
    dtype_of,
    model_config,
    open_teacher,
    training_folder,
)


@dataclass(frozen=True, kw_only=True)
class SortedConfig(TrainerConfig):
    """The draft's layers and exits. Few passes, because the layers are trained already."""

    passes: ClassVar[int] = 3

    layers: int | None = option(None, "Number of layers of the draft model. [default: half of the target's]", least=1)
    exits: Layers | None = option(
        None,
        "Layers with an exit, as in 2,3,4. [default: after half, three quarters and all of the layers]",
        parser=layers_of("--exits"),
    )
    teacher: bool = option(
        False,
        "Also learn the target's distribution, for a draft model that serves only one target.",
        names=("--teacher",),
    )
    loss: Distance = option("kl+tv", f"With --teacher: {LOSS_HELP}")
    lora: int = option(
        0,
        "Rank of a LoRA adapter of the layers to train and write instead of the layers, with their norms; 0: train all "
        "weights.",
        least=0,
    )
    lr: float = option(3e-4, "Peak learning rate.", least=0)

    def check(self, target: Path) -> None:
        self.depths(read_config(target).num_hidden_layers)

    def depths(self, num_layers: int) -> tuple[int, tuple[int, ...]]:
        """(layers, exits) of a draft for a target with `num_layers`. PacelineError if the target has no such layers."""
        layers = self.layers or max(num_layers // 2, 1)
        if not 1 <= layers <= num_layers:
            raise PacelineError(f"--layers is {layers}; the target has {num_layers}, so 1 to that")
        exits = self.exits or tuple(sorted({max(layers // 2, 1), max(3 * layers // 4, 1), layers}))
        if list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] != layers:
            named = ",".join(map(str, exits))
            raise PacelineError(f"--exits are {named}; they ascend from 1 or more to the draft's last layer, {layers}")
        return layers, exits


class SortedLoss(LmLoss):
    """The loss of a model with exits.

    exits    numbers of layers, ascending.
    teacher  a transformers model with the same tokens, or None; loss: the distance from it."""

    def __init__(
        self, model: Any, exits: Sequence[int], teacher: Any = None, loss: Distance = "kl+tv", compiled: bool = False
    ) -> None:
        super().__init__(model, compiled)
        self.exits, self.loss = tuple(exits), loss
        # In a list: the teacher must not appear among the parameters.
        self._teacher = [] if teacher is None else [teacher.eval().requires_grad_(False)]
        if compiled:
            use_blocks(*self._teacher)

    def _hidden(self, input_ids: Tensor) -> list[Tensor]:
        """Inputs of the head at every exit, [B, T, H] each: the residual stream after the final norm."""
        out = self.model.model(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        # transformers' last entry is after the norm already.
        depth = len(self.model.model.layers)
        inner = [self.model.model.norm(out.hidden_states[exit]) for exit in self.exits if exit < depth]
        return [*inner, out.last_hidden_state][: len(self.exits)]

    def forward(self, input_ids: Tensor, labels: Tensor, exit: Tensor | None = None) -> Tensor:
        """The mean loss over all exits; with `exit` [B], the same index everywhere, the cross-entropy of that exit."""
        states = self.hidden(input_ids)
        table, compiled = self.model.lm_head.weight, self.compiled and self.training
        if exit is not None:
            return chunked_cross_entropy(states[int(exit[0])], table, labels, compiled=compiled)
        losses = [chunked_cross_entropy(of_exit, table, labels, compiled=compiled) for of_exit in states]
        for teacher in self._teacher:
            with torch.no_grad():
                last = teacher.model(input_ids=input_ids, use_cache=False).last_hidden_state
            known, of_target = labels != IGNORE, teacher.lm_head.weight
            losses += [
                distance(self.loss, of_exit, table, last, of_target, known, compiled=compiled) for of_exit in states
            ]
        return torch.stack(losses).sum() / len(states)


def cut(target: Path, layers: int) -> Any:
    """The first `layers` layers of the model in `target`, as a model in float32."""
    network = open_teacher(target)
    network.model.layers = network.model.layers[:layers]
    network.config.num_hidden_layers = layers
    if getattr(network.config, "layer_types", None):
        network.config.layer_types = network.config.layer_types[:layers]
    return network


def train_sorted(training: Training, config: SortedConfig = SortedConfig(), compiled: bool = True) -> bool:
    """Train a sorted draft and write a model folder for `s2d:PATH`. False when interrupted; the same call goes on."""
    trainer = Trainer.open(training, config)
    teacher, held = trainer.teacher, trainer.held
    layers, exits = config.depths(teacher.config.num_hidden_layers)
    network = cut(training_folder(training.target), layers)
    adapted = with_adapters(network, config.lora, norms=True) if config.lora else network
    loss = SortedLoss(network, exits, teacher if config.teacher else None, config.loss, compiled)
    if not trainer.train(loss, validation(held, exits)):
        return False
    if trainer.first:
        thin = adapter_tensors(adapted) if config.lora else {}
        network = adapted.merge_and_unload() if config.lora else network
        fits: Fits = {}
        thresholds, report = None, []
        if held:
            fits, record = measure(network.cpu(), exits, teacher.cpu(), held)
            thresholds, speed = record.best()
            report = fit_lines(fits, "exit", exits)
        if thresholds:
            report.append(
                f"thresholds {','.join(f'{threshold:g}' for threshold in thresholds)} should be fastest for "
                f"{trainer.target_facts().name}: {speed:.2f} times plain decoding where reading weights takes the time"
            )
        of_target = {KIND: "s2d", "paceline": __version__, "target": asdict(trainer.target_facts())}
        facts = trainer.facts("sorted", exits=list(exits), thresholds=thresholds, held_out=rows_of(fits))
        dtype = dtype_of(training_folder(training.target))
        if config.lora:
            save_adapter(training.out, adapted.peft_config["default"], thin, training.target, dtype)
            write_json(training.out / CONFIG, model_config(network, dtype) | of_target | facts, indent=2)
        else:
            trainer.save_model(network, dtype, of_target | facts)
        trainer.report(report)
    return True


def validation(held: Mapping[str, Rows], exits: Sequence[int]) -> dict[str, list[Batch]]:
    """A batch of held-out rows for every source and exit, as "source@layers"."""
    return {
        f"{name}@{exit}": [batch | {"exit": torch.full((len(batch["labels"]),), number)}]
        for name, rows in held.items()
        for batch in [first_batch(rows)]
        for number, exit in enumerate(exits)
    }


@torch.no_grad()
def measure(model: Any, exits: Sequence[int], teacher: Any, held: Mapping[str, Rows]) -> tuple[Fits, ExitRecord]:
    """Returns held-out figures per exit, and the exits' predictions with equal weight per source."""
    states_of = SortedLoss(model, exits).eval().hidden  # Anew: training runs the other in bfloat16.
    fits: Fits = {}
    sure, right, share = [], [], []
    for name, rows in held.items():
        of_source = fits[name] = [Fit() for _ in exits]
        count = int((rows[1] != IGNORE).sum())
        share.append(np.full(count, 1 / (count * len(held))))
        for ids, labels in batches(rows):
            known = labels != IGNORE
            p = teacher(input_ids=ids).logits[known].float().softmax(-1)
            best = []
            for fit, states in zip(of_source, states_of(ids), strict=True):
                q = model.lm_head(states[known]).float().softmax(-1)
                fit.add(p, q, labels[known])
                best.append(q.max(-1))
            sure.append(torch.stack([of_exit.values for of_exit in best], -1).numpy())
            right.append(torch.stack([of_exit.indices == p.argmax(-1) for of_exit in best], -1).numpy())
    layer, head = (sum(p.numel() for p in part.parameters()) for part in (model.model.layers[0], model.lm_head))
    reads = layer * teacher.config.num_hidden_layers + head
    return with_all(fits), ExitRecord(
        np.concatenate(sure), np.concatenate(right), [layer * exit / reads for exit in exits], head / reads,
        np.concatenate(share),
    )  # fmt: skip


GRID = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, NEVER)
LONGEST = 16  # Most tokens of a draft. Longer drafts do not pay at the acceptance rates of a part of a target.


@dataclass(frozen=True)
class ExitRecord:
    """The predictions of a draft's exits at N tokens.

    sure    [N, E]: the probability of the exit's best token.
    right   [N, E]: whether that is the target's best token.
    layers  [E]: weights of the layers up to the exit, as a share of the weights that a target's forward reads.
    head    the same share for the head, which is read at every exit that is tried.
    share   [N]: weights of the tokens; their sum is 1."""

    sure: np.ndarray
    right: np.ndarray
    layers: Sequence[float]
    head: float
    share: np.ndarray

    def best(self) -> tuple[tuple[float, ...], float]:
        """The best thresholds from GRID for all exits but the last, and the speed-up they should bring.

        Coordinate ascent: the thresholds change one at a time until that helps no more. It starts from each value of
        GRID for all of them, because a threshold has no effect after an exit at which every token leaves."""
        ends = (self._climb((start,) * (len(self.layers) - 1)) for start in GRID)
        return max(ends, key=lambda end: end[1])

    def speed(self, thresholds: Sequence[float]) -> float:
        """Speed-up over plain decoding with the best constant draft length (Leviathan et al. 2023, theorem 3.8)."""
        leaves = np.column_stack([self.sure[:, :-1] > np.asarray(thresholds), np.ones(len(self.sure), bool)])
        at = leaves.argmax(1)
        tried = np.cumsum([*(threshold < 1 for threshold in thresholds), True])
        rate = float(self.share @ self.right[np.arange(len(at)), at])
        call = float(self.share @ (np.asarray(self.layers) + self.head * tried)[at])
        lengths = np.arange(1, LONGEST + 1)
        tokens = 1 + np.cumprod(np.full(LONGEST, rate)).cumsum()  # Tokens of a round, the target's own included.
        return float((tokens / (1 + lengths * call)).max())

    def _climb(self, thresholds: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
        speed, before = self.speed(thresholds), 0.0
        while speed > before:
            before = speed
            for exit in range(len(thresholds)):
                moved = [(*thresholds[:exit], value, *thresholds[exit + 1 :]) for value in GRID]
                speeds = ((self.speed(choice), choice) for choice in [*moved, thresholds])
                speed, thresholds = max(speeds, key=lambda pair: pair[0])  # Of equal speeds the lowest thresholds win.
        return thresholds, speed


def command(setup: DrafterOptions, config: SortedConfig, compiled: Compiled = True) -> bool:
    """Cut a draft with several exits from a model's first layers, for `--draft s2d:OUT`.

    paceline train s2d smollm2 --data answers.jsonl --out build/sorted

    It learns the assistant's turns in --data (any conversations) or the model's own answers. At the end every exit is
    measured on held-out answers, and the thresholds that should be fastest for this target are written with the draft.
    """
    return train_sorted(setup.training(config), config, compiled)
