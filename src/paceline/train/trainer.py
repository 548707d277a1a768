"""The steps that all recipes share: load the target and rows of its answers, train, write the drafter, report.

    trainer = Trainer.open(training, config)
    module = MyLoss(trainer.teacher)                       # forward(input_ids, labels) is its loss
    if trainer.train(module):
        if trainer.first:                                  # of several processes the one that writes
            trainer.save_head("mine", module.named_parameters(), lines, held_out=...)

`agreement` measures how a drafter's distribution agrees with its target's on held-out rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from paceline.draft.neural.checkpoint import TargetFacts, save_drafter
from paceline.draft.spec import option
from paceline.errors import ModelError, PacelineError
from paceline.target.folder import fingerprint
from paceline.target.load import load_tokenizer, read_config
from paceline.target.shape import unsupported
from paceline.target.tokenizer import Tokenizer
from paceline.train.data import Mixture, MixtureConfig, Rows, batches, first_batch, row_counts, split_rows
from paceline.train.loop import Batch, LoopConfig, Stream, train
from paceline.train.loss import IGNORE


@dataclass(frozen=True)
class Training:
    """What a recipe trains on, and for how long.

    target   folder of the model to draft for.
    answers  a file of `generated_rows`.
    out      folder to write.
    run      folder of checkpoint and log, for resuming."""

    target: Path
    answers: Path
    out: Path
    run: Path
    loop: LoopConfig


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Batches and held-out rows. Recipes add their own fields."""

    length: int = option(512, "Tokens of a training row.", least=8)
    rows: int = option(16, "Rows of a batch.", least=1)
    held_out: float = 0.05  # share of the prompts
    lr: float = option(2e-3, "Peak learning rate.", least=0)


@dataclass(frozen=True)
class Trainer:
    """A target, and its answers as rows to train on and held-out rows, by source.

    first  whether this process, of several, is the one that writes."""

    training: Training
    config: TrainerConfig
    tokenizer: Tokenizer
    teacher: Any
    rows: dict[str, Rows]
    held: dict[str, Rows]
    first: bool
    console: Console

    @classmethod
    def open(cls, training: Training, config: TrainerConfig, *, must_hold_out: bool = False) -> Trainer:
        """Load the target and read the answers. PacelineError if `must_hold_out` and there are too few to hold any
        out."""
        state = PartialState(cpu=not torch.cuda.is_available())
        console = Console(stderr=True, quiet=not state.is_main_process)
        target, answers = training.target, training.answers
        tokenizer, teacher = load_tokenizer(target), open_teacher(target).to(state.device)
        length = min(config.length, teacher.config.max_position_embeddings)
        rows, held = split_rows(answers, length, pad_token(tokenizer), config.held_out)
        console.print("\n".join(row_counts(rows)))
        if must_hold_out and not (rows and held):
            raise PacelineError(
                f"{answers} has too few answers to learn from some and to measure on others: generate more"
            )
        torch.manual_seed(training.loop.seed)
        return cls(training, config, tokenizer, teacher, rows, held, state.is_main_process, console)

    def train(
        self,
        module: nn.Module,
        validation: dict[str, list[Batch]] | None = None,
        wrap: Callable[[Mixture], Stream] | None = None,
    ) -> bool:
        """Train `module` on batches of the rows. False when interrupted; the same call goes on.

        validation  batches by name; None: the first held-out rows of every source.
        wrap        makes the stream to train on from the stream of batches."""
        loop, run = self.training.loop, self.training.run
        weights: dict[str, float] = {name: len(ids) for name, (ids, _) in self.rows.items()}
        length = next((ids.shape[1] for ids, _ in self.rows.values()), self.config.length)
        rows = Mixture(self.rows, MixtureConfig(length, self.config.rows, weights, weights, seed=loop.seed))
        if validation is None:
            validation = {name: [first_batch(rows)] for name, rows in self.held.items()}
        return train(module, wrap(rows) if wrap else rows, loop, run, validation)

    def facts(self, stage: str, **measured: Any) -> dict[str, Any]:
        """Entries of config.json about the training: recipe, data, and what was `measured`."""
        config = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self.config).items()}
        recipe = {"stage": stage, "loop": asdict(self.training.loop), "config": config}
        return {"recipe": recipe, "data": [self.training.answers.name], **measured}

    def target_facts(self) -> TargetFacts:
        """The target's entry in a drafter's folder."""
        config = self.teacher.config
        return TargetFacts(
            self.training.target.expanduser().resolve().name,
            self.tokenizer.fingerprint,
            fingerprint(dict(self.teacher.named_parameters())),
            config.hidden_size,
            config.num_hidden_layers,
            config.vocab_size,
        )

    def save_head(
        self, kind: str, tensors: Iterable[tuple[str, Tensor]], lines: Sequence[str], **facts: Any
    ) -> None:
        """Write a head for `kind:OUT`, in bfloat16, with the training's log; then print `lines`.

        facts  further entries of config.json."""
        out, run = self.training.out, self.training.run
        weights = {
            name: tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in tensors
        }
        save_drafter(out, kind, config=self.facts(kind, **facts), tensors=weights, target=self.target_facts())
        shutil.copy(run / "log.jsonl", out / "training.jsonl")
        self.report(lines)

    def report(self, lines: Sequence[str]) -> None:
        """Print the measurements, and where the drafter was written."""
        for line in lines or ["too few prompts to hold any out: acceptance was not measured"]:
            self.console.print(line, highlight=False)
        self.console.print(f"wrote {self.training.out}")


class Student(nn.Module):
    """A module that learns from a frozen target, a transformers model."""

    def __init__(self, teacher: Any) -> None:
        super().__init__()
        # In a list: the target must not appear among the parameters.
        self._teacher = [teacher.eval().requires_grad_(False)]

    @property
    def teacher(self) -> Any:
        """The frozen target."""
        return self._teacher[0]


def open_teacher(target: Path) -> Any:
    """The target as a transformers model in float32. ModelError if it has no `model` and `lm_head`, as Llamas have."""
    teacher: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    if not hasattr(teacher, "model") or not hasattr(teacher, "lm_head"):
        raise ModelError(f"{target}: a {teacher.config.model_type} keeps its layers in another place than a Llama does")
    return teacher


def check_target(target: Path) -> Any:
    """The configuration of the model in `target`. PacelineError if the native decoder, which heads need, cannot run
    the model."""
    config = read_config(target)
    if reason := unsupported(config):
        raise PacelineError(f"{target}: the native decoder cannot run it, {reason}; a head would be of no use")
    return config


def pad_token(tokenizer: Tokenizer) -> int:
    """The token that fills up rows; a run of it is not trained on."""
    pad = getattr(tokenizer.inner, "pad_token_id", None)
    token = tokenizer.eos_token_id if pad is None else int(pad)
    if token is None:
        raise PacelineError(f"{tokenizer.name} has neither a padding nor an end token, and rows need one of the two")
    return token


# Agreement -------------------------------------------------------------------------------------------------------

Logits = Callable[[Tensor], Tensor]
"""From token ids [B, T] to logits [B, T, V] of the next tokens."""


@dataclass(frozen=True)
class Agreement:
    """How a draft's distribution q agrees with the target's p on one source, at temperature 1.

    overlap  mean of sum min(p, q): the probability that a token drawn from q is accepted.
    top1     share of positions where both have the same best token."""

    source: str
    tokens: int
    overlap: float
    top1: float


def logits_of(model: Any) -> Logits:
    """A transformers model as a function of token ids."""
    return lambda ids: model(input_ids=ids).logits


def overlaps(p: Tensor, q: Tensor) -> tuple[float, float]:
    """Sums over N positions: (sum min(p, q), whether both have the same best token). p, q [N, V]."""
    return float(torch.minimum(p, q).sum()), float((p.argmax(-1) == q.argmax(-1)).sum())


@torch.no_grad()
def agreement(target: Logits, draft: Logits, held: Mapping[str, Rows], batch: int = 4) -> list[Agreement]:
    """By source; the last entry, "all", is the mean over sources. Empty if nothing is held out."""
    by_source = []
    for name, rows in held.items():
        overlap, top1, count = 0.0, 0.0, 0
        for ids, labels in batches(rows, batch):
            p, q = (torch.softmax(logits(ids).float()[labels != IGNORE], -1) for logits in (target, draft))
            more = overlaps(p, q)
            overlap, top1, count = overlap + more[0], top1 + more[1], count + len(p)
        by_source.append(Agreement(name, count, overlap / count, top1 / count))
    return with_all(by_source)


def with_all(by_source: Sequence[Agreement]) -> list[Agreement]:
    """The sources, then "all": the mean over the sources."""
    count = len(by_source)
    if not count:
        return []
    overlap, top1 = sum(a.overlap for a in by_source) / count, sum(a.top1 for a in by_source) / count
    return [*by_source, Agreement("all", sum(a.tokens for a in by_source), overlap, top1)]


def agreement_lines(agreements: Sequence[Agreement]) -> list[str]:
    """`agreement` as lines of a report."""
    width = max((len(a.source) for a in agreements), default=0)
    return [
        f"{a.source:{width}}  accepted {a.overlap:6.1%}  same best token {a.top1:6.1%}  ({a.tokens:,} tokens)"
        for a in agreements
    ]
