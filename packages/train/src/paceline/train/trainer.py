"""The settings of a recipe, and the steps that all recipes share: load the target and rows of its answers, train,
measure, write the drafter, report. Recipes add options of their own to one of the configurations here.

Recipes that write a whole model take the steps themselves: `Trainer.open`, `train`, `save_model`, `report`."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.draft.spec import option
from paceline.errors import ModelError, PacelineError
from paceline.formats.checks import unsupported
from paceline.formats.experts import as_checkpoint
from paceline.formats.folder import fingerprint
from paceline.formats.gguf import weights_of
from paceline.formats.gguf_file import GGUF
from paceline.formats.heads.checkpoint import TargetFacts, open_drafter
from paceline.formats.heads.vocab import most_frequent
from paceline.formats.place import gguf_of, is_gguf
from paceline.formats.precision import quantised
from paceline.formats.shape import weight_shapes
from paceline.formats.tokenizer import Tokenizer
from paceline.kernels.blocks import Weights
from paceline.outputs import check_folder
from paceline.peers.setup import expanded, folder_of
from paceline.target.hf import quiet
from paceline.target.load import load, load_tokenizer, read_config
from paceline.train.data import Mixture, Rows, counts_of, first_batch, row_counts, split_rows
from paceline.train.loop import LOG, Batch, Look, LoopConfig, Stream, read_log, train
from paceline.train.loss import IGNORE, Distance
from paceline.train.measure import Fits, accepted_length, fit_lines, measure, rows_of, write_slots
from paceline.train.outlook import Outlook
from paceline.train.saving import coverage, drop_adapter, must_keep, save_drafter, save_folder
from paceline.train.student import StateCache, States, Student, decoder_states, target_states

LONG_TOKENS, LONG_MINUTES = 250_000, 5.0  # From this budget on a head's loss is compiled.
MEASURED = 1 << 15  # Most tokens of held-out rows to measure.
TRAINING = "training.jsonl"  # The log of a training, in the drafter's folder.
OF_RUN = {"coverage", "loss", "speculators_config", "speculators_version"}
"""Entries of a head's config.json that say how it was trained and is served, not what it computes."""


# The settings of a recipe --------------------------------------------------------------------------------------------


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
    held_out: float = 0.05  # Share of the prompts.
    lr: float = option(2e-3, "Peak learning rate.", least=0)

    @property
    def loop(self) -> dict[str, Any]:
        """The settings of `LoopConfig`."""
        return {**self.own, "peak_lr": self.lr}

    def check(self, target: Path) -> None:
        """Raise PacelineError if the recipe cannot work with the model in `target`.
        Called before answers are generated."""


LOSS_HELP = "Distance from the target's distribution: soft (cross-entropy), kl+tv (plus total variation), lk (LK loss)."


@dataclass(frozen=True, kw_only=True)
class StudentConfig(TrainerConfig):
    """What drafters that learn the target's distribution have in common."""

    loss: Distance = option("soft", LOSS_HELP)
    loss_vocab: int = option(
        8192,
        "Number of tokens over which the loss compares distributions; these are the most frequent ones of the answers.",
        least=1,
    )
    states: Path | None = option(
        None,
        "Folder to keep the target's states in, so that other trainings on the same answers need not compute them.",
        file_okay=False,
        callback=check_folder,
    )


# The steps -----------------------------------------------------------------------------------------------------------


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
    def open(cls, training: Training, config: TrainerConfig, *, must_hold_out: bool = False) -> Self:
        """Load the target and read the answers. PacelineError if `must_hold_out` and there are too few for that."""
        from accelerate import PartialState

        state = PartialState(cpu=not torch.cuda.is_available())
        console = Console(stderr=True, quiet=not state.is_main_process)
        answers, tokenizer = training.answers, load_tokenizer(training.target)
        teacher = open_teacher(training_folder(training.target)).to(state.device)
        length = min(config.length, teacher.config.max_position_embeddings)
        rows, held = split_rows(answers, length, pad_token(tokenizer), config.held_out)
        most = max(MEASURED // (length * max(len(held), 1)), 1)
        held = {name: (ids[:most], labels[:most]) for name, (ids, labels) in held.items()}
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
        look: Look | None = None,
    ) -> bool:
        """Train `module` on batches of the rows. False when interrupted; the same call goes on.

        validation  batches by name; None: the first held-out rows of every source.
        wrap        makes the stream to train on from the stream of batches.
        look        says now and then what is expected (`outlook.py`)."""
        loop, run = self.training.loop, self.training.run
        rows = Mixture(self.rows, self.config.rows, loop.seed)
        if validation is None:
            validation = {name: [first_batch(rows)] for name, rows in self.held.items()}
        begun = isinstance(module, Student) and module.begun is not None
        return train(module, wrap(rows) if wrap else rows, loop, run, validation, look=look, look_first=begun)

    def facts(self, stage: str, **measured: Any) -> dict[str, Any]:
        """Entries of config.json about the training: recipe, data, tokens learnt by source, and what was `measured`."""
        config = {name: value.name if isinstance(value, Path) else value for name, value in asdict(self.config).items()}
        log = read_log(self.training.run / LOG)
        spent = {key: row[key] for row in log[-1:] for key in ("step", "tokens", "minutes")}
        recipe = {"stage": stage, "loop": asdict(self.training.loop), "config": config, "spent": spent}
        learnt = {name: int((labels != IGNORE).sum()) for name, (_, labels) in self.rows.items()}
        return {"recipe": recipe, "data": [self.training.answers.name], "learnt_tokens": learnt, **measured}

    @property
    def precision(self) -> torch.autocast:
        """The context in which the target runs outside of steps, with the numbers that it has in them."""
        return torch.autocast(self.teacher.device.type, torch.bfloat16, self.training.loop.mixed_precision == "bf16")

    def target_facts(self) -> TargetFacts:
        """The target's entry in a drafter's folder."""
        config, target = self.teacher.config, self.training.target
        if is_gguf(target):  # `load` names it so.
            file = GGUF(gguf_of(target))
            name, weights = file.path.stem, weights_of(file, config)
        else:
            name, weights = training_folder(target).name, {**as_checkpoint(dict(self.teacher.named_parameters()))}
            buffers = as_checkpoint(dict(self.teacher.named_buffers()))
            wanted = weight_shapes(config) if unsupported(config) is None else {}
            weights |= {name: buffers[name] for name in buffers.keys() & wanted.keys()}
        return TargetFacts(
            name,
            self.tokenizer.fingerprint,
            fingerprint(weights),
            config.hidden_size,
            config.num_hidden_layers,
            config.vocab_size,
        )

    def frequent(self, size: int) -> Tensor:
        """The `size` tokens that the target writes most, int64 ascending."""
        total = self.teacher.config.vocab_size
        ends = [token for token in (self.tokenizer.eos_token_id,) if token is not None]
        return most_frequent(counts_of(self.rows, total), size, must_keep(self.tokenizer, ends)[:1])

    def covered(self, tokens: Tensor) -> float:
        """The share of the held-out answers that these tokens are."""
        return coverage(counts_of(self.held, self.teacher.config.vocab_size), tokens)

    def prepare(self, student: Student, config: StudentConfig) -> None:
        """Say which tokens the student's loss compares, and where its states are kept."""
        if config.loss_vocab < self.teacher.config.vocab_size:
            student.tokens = (tokens := self.frequent(config.loss_vocab)).to(self.teacher.device)
            self.console.print(
                f"{config.loss_vocab:,} tokens in the loss: {self.covered(tokens):.2%} of the held-out answers"
            )
        if config.states is not None:
            every = [row for ids, _ in (*self.rows.values(), *self.held.values()) for row in ids]
            facts = self.target_facts()
            run: States = partial(target_states, self.teacher)
            by = facts.weights_fingerprint
            if self.teacher.device.type == "cpu":
                run, by = decoder_states(load(training_folder(self.training.target))), f"{by} decoder"
            cache = student.cache = StateCache.open(config.states, by, run, every, facts.hidden_size)
            if self.first:
                with self.precision, self.console.status("states of the target ..."):
                    cache.fill((*student.reads, facts.num_layers))

    def held_out(self, student: Student) -> tuple[Fits, dict[str, Any], list[str]]:
        """The figures of a trained student on held-out rows: fits, entries of config.json, and lines of a report."""
        untrained = student.untrained()
        with self.precision:
            fits, lines = measure(student, self.held), []
            if untrained:
                untrained.cache = student.cache
                before = measure(untrained, self.held)
        if not fits:
            return fits, {}, []
        facts: dict[str, Any] = {"held_out": rows_of(fits)}
        if untrained:
            facts["untrained"] = rows_of(before)
            lines += ["before training:", *fit_lines(before), "after training:"]
        facts["accepted_length"] = length = round(accepted_length(fits["all"]), 3)
        lines += fit_lines(fits)
        lines.append(f"a chain of {student.depths} would bring {length:.2f} tokens a round at temperature 1")
        return fits, facts, lines

    def save_head(self, student: Student) -> None:
        """Measure a head and write it for `kind:OUT`, with the training's log; then report."""
        out, run = self.training.out, self.training.run
        weights: Weights = {
            name: tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in student.saved().items()
        }
        if isinstance(self.config, HeadConfig) and self.config.stored == "int8":
            weights = quantised(weights, "int8")
        fits, measured, lines = self.held_out(student)
        config = self.facts(student.kind, **student.facts(), **measured)
        if student.begun is not None:
            config["recipe"]["spent"] = total_spent(config["recipe"]["spent"], student.begun)
            config["recipe"]["begun_with"] = student.begun
        save_drafter(out, student.kind, config=config, tensors=weights, target=self.target_facts())
        rows = whole_log(student.earlier, read_log(run / LOG))
        (out / TRAINING).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        if student.has_tree:
            write_slots(out, fits["all"])
        self.report(lines)

    def save_model(self, network: Any, dtype: torch.dtype, facts: Mapping[str, Any]) -> None:
        """Write a model folder with the target's tokenizer; `facts` are further entries of config.json."""
        out = self.training.out
        out.mkdir(parents=True, exist_ok=True)
        self.tokenizer.inner.save_pretrained(out)
        network.generation_config.save_pretrained(out)
        weights = {name: p.detach().to(dtype) for name, p in network.named_parameters()}  # Tied weights are kept once.
        drop_adapter(out)
        save_folder(out, model_config(network, dtype) | dict(facts), weights)

    def report(self, lines: Sequence[str]) -> None:
        """Print the measurements, and where the drafter was written."""
        for line in lines or ["too few prompts to hold any out: acceptance was not measured"]:
            self.console.print(line, highlight=False, soft_wrap=True)
        self.console.print(f"wrote {self.training.out}")


@dataclass(frozen=True, kw_only=True)
class HeadConfig(StudentConfig):
    """What drafters that run inside the native decoder have in common. A recipe's config makes its `student`."""

    stored: Literal["bfloat16", "int8"] = option("bfloat16", "Kind of numbers in which matrices are stored.")
    begin: Path | None = option(
        None, "Folder of a head that this recipe has trained, with whose weights training begins.", file_okay=False
    )

    def check(self, target: Path) -> None:
        """Raise PacelineError if the native decoder, which heads need, cannot run the model in `target`."""
        if reason := unsupported(read_config(target)):
            raise PacelineError(f"{target}: the native decoder cannot run it, {reason}; a head would be of no use")

    def student(self, trainer: Trainer) -> Student:
        """The head to train."""
        raise NotImplementedError


def train_head(training: Training, config: HeadConfig) -> bool:
    """Train a head, measure it, write a folder for `kind:OUT`. False when interrupted; the same call goes on."""
    config.check(training_folder(training.target))
    trainer = Trainer.open(training, config, must_hold_out=True)
    student = config.student(trainer)
    if config.begin is not None:
        begin_with(student, config.begin)
    trainer.prepare(student, config)
    student.compiled = worth_compiling(training.loop)
    look = None
    if trainer.first:
        look = Outlook.of(student, trainer.held, training.target, read_log(training.run / LOG)).look
    if not trainer.train(student, look=look):
        return False
    if trainer.first:
        trainer.save_head(student)
    return True


def worth_compiling(loop: LoopConfig) -> bool:
    """Whether a training is long enough to compile its loss, which takes half a minute, and a C++ compiler is there."""
    is_long = (loop.tokens or 0) >= LONG_TOKENS or (loop.minutes or 0) >= LONG_MINUTES
    return is_long and any(map(shutil.which, ("g++", "clang++")))


@torch.no_grad()
def begin_with(student: Student, folder: Path) -> None:
    """Give a student the weights of the head in `folder`. PacelineError if there is none, or one of another make: with
    other tensors, or with the same ones that mean something else, such as other taps or norms."""
    (config, weights), own = open_drafter(folder, student.kind, None), student.saved()
    facts = json.loads(json.dumps(student.facts()))
    entries = sorted(facts.keys() - OF_RUN)
    wrong = (
        sorted(set(weights) ^ set(own))
        or [name for name in own if own[name].shape != weights[name].shape]
        or [f"its {name} is {config[name]}" for name in entries if not _agree(config, facts, name)]
    )
    if wrong:
        raise PacelineError(f"--begin: {folder} has a head of another make: {', '.join(wrong[:3])}")
    for name, weight in own.items():
        weight.copy_(weights[name])
    recipe = config.get("recipe")
    student.begun = recipe if isinstance(recipe, dict) else {}
    student.earlier = earlier_log(folder)


def _agree(config: Mapping[str, Any], facts: Mapping[str, Any], name: str) -> bool:
    """Whether an entry is the same in both, or only one has it: a head of an earlier version has fewer or more."""
    if name not in config or name not in facts:
        return True
    here, there = config[name], facts[name]
    both = isinstance(here, dict) and isinstance(there, dict)
    return all(_agree(here, there, one) for one in there) if both else bool(here == there)


def total_spent(spent: Mapping[str, float], before: Mapping[str, Any]) -> dict[str, float]:
    """Steps, tokens and minutes of a training with those of the recipe `before` it, as far as this has them."""
    earlier = before.get("spent")
    total = {key: n for key, n in earlier.items() if type(n) in (int, float)} if isinstance(earlier, dict) else {}
    return total | {key: round(total.get(key, 0) + count, 2) for key, count in spent.items()}


def earlier_log(folder: Path) -> list[dict[str, Any]]:
    """The log of a head's training, in its folder; empty if there is none that tells how much it read. PacelineError if
    it is broken."""
    rows = read_log(folder / TRAINING)
    return rows if rows and all(type(rows[-1].get(key)) is int for key in ("step", "tokens")) else []


def whole_log(earlier: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a training's log after the `earlier` ones of the head it began with, from which they count on."""
    last = earlier[-1] if earlier else {"step": 0, "tokens": 0}
    return [*earlier, *(row | {key: row[key] + last[key] for key in ("step", "tokens")} for row in rows)]


def open_teacher(target: Path) -> Any:
    """The target as a transformers model in float32. ModelError if it has no `model` and `lm_head`, as Llamas have."""
    with quiet():  # It would report a head in the checkpoint as unexpected weights.
        teacher: Any = AutoModelForCausalLM.from_pretrained(target, config=read_config(target), dtype=torch.float32)
    if not hasattr(teacher, "model") or not hasattr(teacher, "lm_head"):
        raise ModelError(f"{target}: a {teacher.config.model_type} keeps its layers in another place than a Llama does")
    return teacher


def model_config(network: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The entries of config.json of a model, whose weights are stored in `dtype`."""
    config: dict[str, Any] = json.loads(network.config.to_json_string(use_diff=False))
    return config | {"architectures": [type(network).__name__], "dtype": str(dtype).removeprefix("torch.")}


def dtype_of(folder: Path) -> torch.dtype:
    """The dtype that a model folder is stored in."""
    return AutoConfig.from_pretrained(folder).dtype or torch.float32


def pad_token(tokenizer: Tokenizer) -> int:
    """The token that fills up rows; a run of it is not trained on."""
    pad = getattr(tokenizer.inner, "pad_token_id", None)
    token = tokenizer.eos_token_id if pad is None else int(pad)
    if token is None:
        raise PacelineError(f"{tokenizer.name} has neither a padding nor an end token, and rows need one of the two")
    return token
