"""Fine-tuning with noise: a model learns to predict past wrong inputs, so that it can draft for itself.

Wang et al. 2024, "Make Some Noise" (arXiv 2406.17404): ordinary supervised fine-tuning, the labels clean, the inputs
with junk in them (`corrupt.py`). Nothing is added to the model, but it is another one afterwards: decoding with
`jacobi` is exact for the tuned weights, not for those it began with. Run it with `--noise 0` too, from the same start,
with the same data, seed and budget, to see what the noise alone does.

At the end: the loss on clean held-out answers, beside that of the start and of other models (`--beside`); how often the
candidates of each slot after the root are what the model itself would say; and, from these, slots.json, from which
`jacobi:OUT,tree=N` builds its tree.

Where we differ from the authors, whose training code was not released: labels on the answers alone, and several
segments in a long answer if wished (`--every`).

Doesn't know: how drafts are verified.

    paceline train noise models/demo --data answers.jsonl --out build/noisy
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from paceline.errors import PacelineError, install
from paceline.jsonl import write_whole
from paceline.target.folder import TUNED_FILE
from paceline.train import options
from paceline.train.corrupt import NoiseConfig, Noisy, answers_in, corrupt
from paceline.train.data import Rows, batches
from paceline.train.drafter import Lesson, LessonConfig, open_teacher, pad_token
from paceline.train.loss import IGNORE, LmLoss
from paceline.train.plan import LoopConfig
from paceline.train.slots import slot_lines, write_slots

PASSES = 3
"""Over the answers, where no budget is given."""
SLOTS, RANKS = 5, 10
"""Slots and candidates that are measured; `jacobi` has as many."""
MOST_ROWS, PLACES = 32, 4
"""Held-out rows of a source that are measured, and places in each at which slots are."""


@dataclass(frozen=True, kw_only=True)
class NoisyConfig(LessonConfig):
    """What a batch is made of, its noise, and what is trained."""

    noise: NoiseConfig = field(default_factory=NoiseConfig)
    lora: int = 0  # rank of the adapters; 0: all weights are trained


def train_noisy(
    target: Path,
    answers: Path,
    out: Path,
    run: Path,
    loop: LoopConfig,
    config: NoisyConfig = NoisyConfig(),
    beside: Sequence[Path] = (),
    compiled: bool = True,
) -> bool:
    """Tune the model in `target` on `answers` (a file of `generated_rows`); writes the model folder `out`, in the
    target's own dtype. False when interrupted; the same call goes on.

    beside  model folders whose clean loss is measured too."""
    lesson = Lesson.open(target, answers, config)
    network, others = lesson.teacher, [target, *beside]
    noise = replace(config.noise, vocab_size=network.config.vocab_size, mask=pad_token(lesson.tokenizer))
    start = lesson.target_facts()
    adapted = with_adapters(network, config.lora) if config.lora else network
    if not lesson.train(LmLoss(network, compiled), loop, run, wrap=lambda rows: Noisy(rows, noise, loop.seed)):
        return False
    if lesson.first:
        tuned = (adapted.merge_and_unload() if config.lora else network).cpu().eval()
        held = {name: (ids[:MOST_ROWS], labels[:MOST_ROWS]) for name, (ids, labels) in lesson.held.items()}
        report, measured = [], {}
        if held:
            after, before = clean_loss(tuned, held), {path: clean_loss(open_teacher(path), held) for path in others}
            measured = {"loss": after, "losses": {path.name: loss for path, loss in before.items()}}
            accuracies = slot_accuracies(tuned, held, noise, loop.seed)
            report = lines(after, before, accuracies)
        facts = {"tuned_from": asdict(start), **lesson.facts("noise", loop, **measured)}
        save(lesson, tuned, out, facts)
        if held:
            write_slots(out, accuracies)
        lesson.report(report, out)
    return True


def with_adapters(network: Any, rank: int) -> Any:
    """Low-rank adapters in every matrix of the layers (LoRA), inside `network`; nothing else of it learns any more."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise PacelineError(f"--lora needs the package peft; {install('train')}") from None
    return get_peft_model(network, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


@torch.no_grad()
def clean_loss(network: Any, held: Mapping[str, Rows]) -> float:
    """Cross-entropy in nats a token on held-out rows without noise, every source weighing alike."""
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
def slot_accuracies(network: Any, held: Mapping[str, Rows], noise: NoiseConfig, seed: int) -> list[list[float]]:
    """Entry [d][r]: how often candidate r of slot d is what the model itself says there after the clean text.

    In each held-out row SLOTS tokens of one answer are replaced, at PLACES places; slot d is the (d + 1)th of them."""
    rng = np.random.default_rng(seed)
    right, count = np.zeros((SLOTS, RANKS)), 0
    ranks = min(RANKS, network.config.vocab_size)
    for ids, labels in (pair for rows in held.values() for pair in batches(rows, 1)):
        row = ids[0].numpy()
        room = [a for a in answers_in(row, labels[0].numpy()) if a.end - a.first >= SLOTS]
        if not room:
            continue
        said = network(input_ids=ids).logits[0].argmax(-1)
        for _ in range(PLACES):
            answer = room[rng.integers(len(room))]
            start = int(rng.integers(answer.first, answer.end - SLOTS + 1))
            junk = row[: start + SLOTS].copy()
            corrupt(junk, answer, [(start, SLOTS)], noise, rng)
            logits = network(input_ids=torch.from_numpy(junk)[None]).logits[0, start:]
            candidates: Tensor = logits.topk(ranks).indices
            right[:, :ranks] += (candidates == said[start : start + SLOTS, None]).numpy()
            count += 1
    shares: list[list[float]] = (right / max(count, 1)).round(4).tolist()
    return shares


def lines(after: float, before: Mapping[Path, float], accuracies: Sequence[Sequence[float]]) -> list[str]:
    """What was measured, for a reader."""
    return [
        f"loss on clean held-out answers  {after:.4f}",
        *(f"  {after / loss - 1:+.2%} beside {path.name}, {loss:.4f}" for path, loss in before.items()),
        *slot_lines(accuracies),
    ]


def save(lesson: Lesson, network: Any, out: Path, facts: Mapping[str, Any]) -> None:
    """A model folder in the target's own dtype, and noise.json beside it with `facts`."""
    dtype = AutoConfig.from_pretrained(lesson.target).dtype or torch.float32
    network.to(dtype).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    lesson.tokenizer.inner.save_pretrained(out)
    write_whole(out / TUNED_FILE, json.dumps(facts, indent=2) + "\n")


@options.with_options
def command(
    setup: options.DrafterOptions,
    lr: options.Rate = 3e-5,
    noise: Annotated[
        str, typer.Option(help="Tokens of a segment of noise, as in 5, or 3-6 for any of these; 0: none.")
    ] = "5",
    every: Annotated[
        int, typer.Option(help="A segment for each so many tokens of an answer; 0: one an answer, as published.", min=0)
    ] = 0,
    noised: Annotated[
        float, typer.Option(help="Share of the answers that get noise; the others stay clean.", min=0, max=1)
    ] = 1.0,
    source: Annotated[
        str, typer.Option(help="Where noise comes from: prefix (published), vocabulary, mask.")
    ] = "prefix",
    lora: Annotated[int, typer.Option(help="Rank of LoRA adapters to train and merge; 0: all weights.", min=0)] = 0,
    beside: Annotated[
        list[Path] | None,
        typer.Option(help="Another model whose clean loss to measure, such as a run with --noise 0.", file_okay=False),
    ] = None,
    rows: options.BatchRows = 16,
    compiled: options.Compiled = True,
) -> bool:
    """Fine-tune a model with noise, so that `--draft jacobi:OUT` gains more with it. The model changes.

    paceline train noise models/demo --data chats.jsonl --out build/noisy

    Answers in --data may be anybody's: this is supervised fine-tuning. With --prompts and --generate the model's own
    are used, which keeps it closest to what it was. Ctrl-C saves; the same command goes on from there.
    """
    config = NoisyConfig(
        noise=NoiseConfig(_lengths(noise), every=every, share=noised, source=source),
        lora=lora,
        length=setup.length,
        rows=rows,
    )
    run, answers = setup.prepare()
    loop = setup.loop(answers, PASSES, peak_lr=lr, optimiser="adamw")
    return train_noisy(setup.target, answers, setup.out, run, loop, config, beside or (), compiled and not lora)


def _lengths(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise PacelineError(f"--noise is {text!r}; it must be a number of tokens, or two as in 3-6") from None
