"""Fine-tuning with noise: a model learns to predict after wrong inputs, so that it can draft for itself.

Wang et al. 2024, "Make Some Noise" (arXiv 2406.17404): supervised fine-tuning with clean labels and noisy inputs.
Section 3.1, "ahead noise": from left to right each token of a segment is replaced by one drawn from all tokens before
it, replaced ones included, because decoding fills its slots with known tokens only. The model keeps its architecture,
but its weights change: decoding with `jacobi` is exact for the tuned weights, not for the original ones. A second run
with `--noise 0` and the same data, seed and budget shows the effect of the noise alone.

At the end it measures the loss on clean held-out answers, also of the original model and of others (`--also`), and
how often the candidates of each slot after the root are the model's own tokens. From these comes slots.json, with which
`jacobi:OUT,tree=N` builds its tree.

Differences to the authors, whose training code was not released: only answers have labels, and a long answer may have
several segments (`--every`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.formats.folder import TUNED_FILE
from paceline.outputs import write_json
from paceline.train.data import Rows, batches
from paceline.train.loop import Batch, Stream
from paceline.train.loss import IGNORE, LmLoss
from paceline.train.measure import RANKS, Fit, slot_lines, write_slots
from paceline.train.options import Compiled, DrafterOptions
from paceline.train.saving import adapter_tensors, save_adapter, with_adapters
from paceline.train.trainer import Trainer, TrainerConfig, Training, dtype_of, open_teacher, pad_token, training_folder

SLOTS = 5  # Slots to measure: as many as `jacobi` has.
MOST_ROWS, PLACES = 12, 3  # Held-out rows to measure per source, and measurements per row.
Source = Literal["prefix", "vocabulary", "mask"]
"""Noise is drawn from the tokens before it (the paper), from the whole vocabulary, or is always the same token."""


class Lengths(tuple[int, ...]):
    """Least and most tokens of a segment of noise; on the command line 5, or 3-6."""

    @classmethod
    def parse(cls, text: Any) -> Self:
        """Read "5" or "3-6". Raises PacelineError for anything else."""
        least, _, most = text.partition("-") if isinstance(text, str) else (text[0], "", text[1])
        try:
            return cls((int(least), int(most or least)))
        except ValueError:
            raise PacelineError(f"--noise is {text!r}; it must be a number of tokens, or two as in 3-6") from None


@dataclass(frozen=True)
class NoiseConfig:
    """How answers are corrupted.

    gap         least clean tokens between two segments.
    mask        the token of source "mask".
    vocab_size  for source "vocabulary"."""

    lengths: Lengths = option(
        Lengths((5, 5)),
        "Length of a segment of noise in tokens: a number, as in 5, or a range, as in 3-6; 0: no noise.",
        names=("--noise",), parser=Lengths.parse, show_default="5",
    )  # fmt: skip
    every: int = option(
        0,
        "Number of tokens of an answer for each segment of noise; 0: one segment an answer, as in the paper.",
        least=0,
    )
    share: float = option(
        1.0, "Share of the answers that get noise; the others stay clean.", least=0, most=1, names=("--noised",)
    )
    source: Source = option("prefix", "Where the tokens of noise come from; prefix as in the paper.")
    gap: int = 8
    mask: int = 0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        least, most = self.lengths
        if not 0 <= least <= most or (least == 0) != (most == 0):
            raise PacelineError(f"noise of {least} to {most} tokens: give 0, or 1 or more, as in 5 or 3-6")


@dataclass(frozen=True, kw_only=True)
class NoisyConfig(TrainerConfig):
    """The noise, and which weights are trained."""

    passes: ClassVar[int] = 3
    own = {"optimiser": "adamw"}

    noise: NoiseConfig = field(default_factory=NoiseConfig)
    lora: int = option(
        0, "Rank of a LoRA adapter to train and write instead of the whole model; 0: train all weights.", least=0
    )
    lr: float = option(
        0.0, "Peak learning rate; 0: 3e-5, and 3e-4 for an adapter, which needs a higher one.", least=0
    )

    @property
    def loop(self) -> dict[str, Any]:
        return super().loop | {"peak_lr": self.lr or (3e-4 if self.lora else 3e-5)}


class Span(NamedTuple):
    """An answer in a row: its conversation begins at `begin`, its inputs are first..end - 1 (the last is a label)."""

    begin: int
    first: int
    end: int


def answers_in(ids: np.ndarray, labels: np.ndarray) -> Iterator[Span]:
    """The answers in a row of packed conversations; ids, labels [T], labels shifted as in `data.pack_whole`."""
    length, begin, at = len(ids), 0, 0
    while at < length:
        if labels[at] == IGNORE:
            at += 1
            continue
        end = at + 1
        # A label and the next input differ where the next conversation begins, if that has no prompt.
        while end < length and labels[end] != IGNORE and ids[end] == labels[end - 1]:
            end += 1
        yield Span(begin, at + 1, end)
        begin = at = end


def segments(answer: Span, config: NoiseConfig, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(start, length) of the segments to corrupt, left to right, placed uniformly; fewer if not all fit."""
    length = answer.end - answer.first
    count = max((length + 1) // config.every, 1) if config.every else 1
    least, most = config.lengths
    lengths = rng.integers(least, most + 1, count).tolist()
    while lengths and (free := length - sum(lengths) - config.gap * (len(lengths) - 1)) < 0:
        lengths.pop()
    starts, moved = [], answer.first
    offsets = sorted(rng.integers(0, free + 1, len(lengths)).tolist()) if lengths else []
    for offset, size in zip(offsets, lengths, strict=True):
        starts.append((moved + offset, size))
        moved += size + config.gap
    return starts


def corrupt(
    ids: np.ndarray, answer: Span, where: Sequence[tuple[int, int]], config: NoiseConfig, rng: np.random.Generator
) -> None:
    """Replace the tokens of the segments `where`, each (start, length), in `ids` [T] in place."""
    for start, length in where:
        for at in range(start, start + length):
            if config.source == "prefix":
                ids[at] = ids[rng.integers(answer.begin, at)]
            else:
                ids[at] = config.mask if config.source == "mask" else rng.integers(config.vocab_size)


def noisy(ids: np.ndarray, labels: np.ndarray, config: NoiseConfig, rng: np.random.Generator) -> np.ndarray:
    """A copy of a row [T] with noise in its answers. Answers that are too short stay clean."""
    corrupted = ids.copy()
    for answer in answers_in(ids, labels):
        if config.lengths[1] and rng.random() < config.share:
            corrupt(corrupted, answer, segments(answer, config, rng), config, rng)
    return corrupted


class Noisy:
    """Batches with noise, which depends on seed and step only: the same in every process and after a resume."""

    def __init__(self, stream: Stream, config: NoiseConfig, seed: int) -> None:
        self.stream, self.config, self.seed = stream, config, seed
        self.step = 0

    def next(self, progress: float) -> Batch:
        batch = self.stream.next(progress)
        rng = np.random.default_rng([self.seed, self.step])
        self.step += 1
        pairs = zip(batch["input_ids"].numpy(), batch["labels"].numpy(), strict=True)
        ids = np.stack([noisy(ids, labels, self.config, rng) for ids, labels in pairs])
        return {**batch, "input_ids": torch.from_numpy(ids)}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.stream.load_state_dict(state["stream"])


def train_noisy(
    training: Training, config: NoisyConfig = NoisyConfig(), also: Sequence[Path] = (), compiled: bool = True
) -> bool:
    """Tune the target on its answers and write it in its own dtype, or as an adapter (`NoisyConfig.lora`). False when
    interrupted; the same call goes on.

    also  other models to measure the clean loss of, as folders."""
    trainer, seed = Trainer.open(training, config), training.loop.seed
    network = trainer.teacher
    noise = replace(config.noise, vocab_size=network.config.vocab_size, mask=pad_token(trainer.tokenizer))
    start = trainer.target_facts()
    adapted = with_adapters(network, config.lora) if config.lora else network
    if not trainer.train(LmLoss(network, compiled), wrap=lambda rows: Noisy(rows, noise, seed)):
        return False
    if trainer.first:
        thin = adapter_tensors(adapted) if config.lora else {}
        tuned = (adapted.merge_and_unload() if config.lora else network).cpu().eval()
        held = {name: (ids[:MOST_ROWS], labels[:MOST_ROWS]) for name, (ids, labels) in trainer.held.items()}
        report, measured, slots = [], {}, []
        if held:
            with trainer.precision, trainer.console.status("measuring on held-out answers ..."):
                after = clean_loss(tuned, held)
                originals = training_folder(training.target), *also
                before = {path: clean_loss(open_teacher(path), held) for path in originals}
                slots = measure_slots(tuned, held, noise, seed)
            measured = {"loss": after, "losses": {path.name: loss for path, loss in before.items()}}
            against = [f"  {after / loss - 1:+.2%} against {path.name}, {loss:.4f}" for path, loss in before.items()]
            report = [f"loss on clean held-out answers  {after:.4f}", *against, *slot_lines(slots)]
        facts = {"tuned_from": asdict(start), **trainer.facts("noise", **measured)}
        dtype = dtype_of(training_folder(training.target))
        if config.lora:
            save_adapter(training.out, adapted.peft_config["default"], thin, training.target, dtype)
        else:
            trainer.save_model(tuned, dtype, {})
        write_json(training.out / TUNED_FILE, facts, indent=2)
        if slots:
            write_slots(training.out, slots)
        trainer.report(report)
    return True


@torch.no_grad()
def clean_loss(network: Any, held: Mapping[str, Rows]) -> float:
    """Cross-entropy in nats a token on held-out rows without noise, the mean over sources."""
    network.eval()
    means = []
    for rows in held.values():
        total, count = 0.0, 0
        for ids, labels in batches(rows):
            logits = network(input_ids=ids).logits.float()
            total += float(cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"))
            count += int((labels != IGNORE).sum())
        means.append(total / max(count, 1))
    return float(np.mean(means))


@torch.no_grad()
def measure_slots(network: Any, held: Mapping[str, Rows], noise: NoiseConfig, seed: int) -> list[Fit]:
    """How often the candidates of each slot are the model's own best token after the clean text.

    SLOTS tokens of an answer are replaced, PLACES times per held-out row; slot d is the token d of them, from 0."""
    rng = np.random.default_rng(seed)
    slots = [Fit() for _ in range(SLOTS)]
    for ids, labels in (batch for rows in held.values() for batch in batches(rows, 1)):
        row = ids[0].numpy()
        long = [a for a in answers_in(row, labels[0].numpy()) if a.end - a.first >= SLOTS]
        if not long:
            continue
        best_tokens = network(input_ids=ids).logits[0].argmax(-1)
        for _ in range(PLACES):
            answer = long[rng.integers(len(long))]
            start = int(rng.integers(answer.first, answer.end - SLOTS + 1))
            corrupted = row[: start + SLOTS].copy()
            corrupt(corrupted, answer, [(start, SLOTS)], noise, rng)
            text = torch.from_numpy(corrupted)[None]
            candidates = network(input_ids=text, logits_to_keep=SLOTS).logits[0].topk(RANKS).indices
            for slot, of_slot, best in zip(slots, candidates, best_tokens[start : start + SLOTS], strict=True):
                slot.rank(of_slot[None], best[None])
    return slots


def command(
    setup: DrafterOptions,
    config: NoisyConfig,
    also: list[Path] | None = option(
        None,
        "Another model whose loss on clean answers is measured for comparison, such as a run with --noise 0.",
        file_okay=False,
    ),
    compiled: Compiled = True,
) -> bool:
    """Fine-tune a model with noise, so that `--draft jacobi:OUT` is faster with it. The model's weights change.

    paceline train jacobi smollm2 --data chats.jsonl --out build/noisy

    This is supervised fine-tuning: the answers in --data may come from anywhere. The model's own answers, from
    --prompts and --generate, keep it closest to what it was."""
    return train_noisy(setup.training(config), config, also or (), compiled and not config.lora)
