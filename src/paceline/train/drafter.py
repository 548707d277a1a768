"""What every recipe for a drafter begins and ends with: the target, rows of its answers, the loop, and a report.

    lesson = Lesson.open(target, answers, config)
    module = MyLoss(lesson.teacher)                       # forward(input_ids, labels) is its loss
    if lesson.train(module, loop, run):
        if lesson.first:                                  # of several processes the one that writes
            save_drafter(out, "mine", config=lesson.facts("mine", loop, config, ...), ...)

Doesn't know: what is trained.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM

from paceline.draft.neural.checkpoint import TargetFacts
from paceline.errors import ModelError, PacelineError
from paceline.target.folder import fingerprint
from paceline.target.load import load_tokenizer
from paceline.target.tokenizer import Tokenizer
from paceline.train.data import Mixture, MixtureConfig, Rows, first_batch, row_counts, split_rows
from paceline.train.loop import Batch, Stream, train
from paceline.train.plan import LoopConfig


@dataclass(frozen=True, kw_only=True)
class LessonConfig:
    """What a batch is made of, and what is held out of it. Recipes add to it what they train."""

    length: int = 512  # tokens a row
    rows: int = 16  # rows a batch
    held_out: float = 0.05  # share of the prompts


@dataclass(frozen=True)
class Lesson:
    """A target, and its answers as rows to train on and held-out rows, by source."""

    target: Path
    answers: Path
    tokenizer: Tokenizer
    teacher: Any
    training: dict[str, Rows]
    held: dict[str, Rows]
    config: LessonConfig
    first: bool  # of several processes
    console: Console

    @classmethod
    def open(cls, target: Path, answers: Path, config: LessonConfig) -> "Lesson":
        """Load the target from its folder and read `answers`, a file of `generated_rows`."""
        state = PartialState(cpu=not torch.cuda.is_available())
        console = Console(stderr=True, quiet=not state.is_main_process)
        tokenizer, teacher = load_tokenizer(target), open_teacher(target).to(state.device)
        length = min(config.length, teacher.config.max_position_embeddings)
        training, held = split_rows(answers, length, pad_token(tokenizer), config.held_out)
        console.print("\n".join(row_counts(training)))
        return cls(target, answers, tokenizer, teacher, training, held, config, state.is_main_process, console)

    def train(
        self,
        module: nn.Module,
        loop: LoopConfig,
        run: Path,
        validation: dict[str, list[Batch]] | None = None,
        wrap: Callable[[Mixture], Stream] | None = None,
    ) -> bool:
        """Train `module` on batches of the rows. False when interrupted; the same call goes on.

        validation  batches by name; None: the first held-out rows of every source.
        wrap        another stream around the batches."""
        weights: dict[str, float] = {name: len(ids) for name, (ids, _) in self.training.items()}
        length = next((ids.shape[1] for ids, _ in self.training.values()), self.config.length)
        rows = Mixture(self.training, MixtureConfig(length, self.config.rows, weights, weights, seed=loop.seed))
        if validation is None:
            validation = {name: [first_batch(rows)] for name, rows in self.held.items()}
        return train(module, wrap(rows) if wrap else rows, loop, run, validation)

    def facts(self, stage: str, loop: LoopConfig, **measured: Any) -> dict[str, Any]:
        """What config.json says about the training: recipe, data, and what was measured."""
        recipe = {"stage": stage, "loop": asdict(loop), "config": asdict(self.config)}
        return {"recipe": recipe, "data": [self.answers.name], **measured}

    def target_facts(self) -> TargetFacts:
        """What a checkpoint remembers of the target."""
        config = self.teacher.config
        return TargetFacts(
            self.target.expanduser().resolve().name,
            self.tokenizer.fingerprint,
            fingerprint(dict(self.teacher.named_parameters())),
            config.hidden_size,
            config.num_hidden_layers,
            config.vocab_size,
        )

    def report(self, lines: list[str], out: Path) -> None:
        """Say how good the drafter is, and where it lies."""
        for line in lines or ["too few prompts to hold any out: acceptance was not measured"]:
            self.console.print(line, highlight=False)
        self.console.print(f"wrote {out}")


def open_teacher(target: Path) -> Any:
    """The target as transformers runs it, in float32. ModelError if its states and its head cannot be told apart."""
    teacher: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    if not hasattr(teacher, "model") or not hasattr(teacher, "lm_head"):
        raise ModelError(f"{target}: a {teacher.config.model_type} keeps its layers in another place than a Llama does")
    return teacher


def pad_token(tokenizer: Tokenizer) -> int:
    """The token that fills rows up; a run of it is not learnt."""
    pad = getattr(tokenizer.inner, "pad_token_id", None)
    token = tokenizer.eos_token_id if pad is None else int(pad)
    if token is None:
        raise PacelineError(f"{tokenizer.name} has neither a padding nor an end token, and rows need one of the two")
    return token
