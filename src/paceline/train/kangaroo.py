"""Kangaroo's adapter: one layer of attention learns to say after layer l what the whole target says.

Liu et al. 2024 (arXiv 2404.18911): the target is frozen, and at every token of its own answers the adapter's
distribution q, read off the target's head, is drawn to the target's p by a cross-entropy with soft labels. Early and
last states come from one forward. Nothing is shifted: position t of both is the distribution of token t + 1, and it
counts if that token is the target's own. (The authors' code weighs it by token t - 1, and never shows the adapter the
first token.) The adapter begins as the target's final norm; the authors' begins at random.

Doesn't know: how drafts are made or verified.

    paceline train kangaroo models/demo --data answers.jsonl --out build/kangaroo
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from paceline.draft.kangaroo import Kangaroo, adapter_shapes
from paceline.draft.neural.checkpoint import save_drafter
from paceline.errors import PacelineError
from paceline.target.load import read_config
from paceline.target.shape import Shape, rotary_tables, unsupported
from paceline.train import options
from paceline.train.agreement import overlaps
from paceline.train.data import Rows, batches
from paceline.train.drafter import Lesson, LessonConfig
from paceline.train.loss import IGNORE, soft_cross_entropy
from paceline.train.plan import LoopConfig

PASSES = 10
"""Over the answers, where no budget is given; the authors make 20."""


class AdapterModule(nn.Module):
    """The adapter as it is trained: `paceline.draft.kangaroo.Adapter` without a cache. Parameters have the names of
    `adapter_shapes`; matrices begin as torch's linear layers do, norms at 1."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.input_norm = nn.RMSNorm(shape.hidden_size, shape.eps)
        self.q_proj = nn.Linear(shape.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden_size, bias=False)
        self.output_norm = nn.RMSNorm(shape.hidden_size, shape.eps)

    def forward(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Early states [B, T, H] to what the head reads, [B, T, H]; cos, sin [T, head_dim] of `rotary_tables`."""
        h = self.input_norm(states)
        q, k, v = (
            part(h).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (x * cos.to(x) + x.roll(x.shape[-1] // 2, -1) * sin.to(x) for x in (q, k))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y: Tensor = self.output_norm(states + self.o_proj(seen.transpose(1, 2).flatten(2)))
        return y


class KangarooLoss(nn.Module):
    """An adapter whose forward is its loss. input_ids, labels [B, T], labels shifted: IGNORE where the next token is
    not the target's own.

    teacher: a transformers model; exit: the layer before which its early states are taken."""

    cos: Tensor
    sin: Tensor

    def __init__(self, teacher: Any, exit: int) -> None:
        super().__init__()
        shape = Shape.of(teacher.config)
        self.exit = exit
        self.adapter = AdapterModule(shape)
        with torch.no_grad():  # begin where the target's own norm and head are, and add to that
            self.adapter.o_proj.weight.zero_()
            self.adapter.output_norm.weight.copy_(teacher.model.norm.weight)
        # In a list: the target must not appear among the parameters.
        self._teacher = [teacher.eval().requires_grad_(False)]
        cos, sin = rotary_tables(teacher.config, shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def teacher(self) -> Any:
        """The frozen target."""
        return self._teacher[0]

    @torch.no_grad()
    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Early states, and the last ones after the final norm, [B, T, H] each."""
        out = self.teacher.model(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        return out.hidden_states[self.exit], out.last_hidden_state

    def drafted(self, early: Tensor) -> Tensor:
        """What the head reads to draft, [B, T, H], from early states."""
        length = early.shape[1]
        drafted: Tensor = self.adapter(early, self.cos[:length], self.sin[:length])
        return drafted

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        early, last = self.states(input_ids)
        kept = labels != IGNORE
        return soft_cross_entropy(self.drafted(early), last, self.teacher.lm_head.weight, kept)


@dataclass(frozen=True)
class Fit:
    """How a draft distribution q fits the target's p over held-out answers, at temperature 1.

    soft_ce  mean of -sum p log q, nats. overlap, top1: as in `agreement.Agreement`."""

    soft_ce: float
    overlap: float
    top1: float


@torch.no_grad()
def measure(module: KangarooLoss, held: Mapping[str, Rows], batch: int = 4) -> dict[str, Any]:
    """The adapter and its baseline, the target's own norm and head after layer l, over the labelled positions of
    `held`; {"tokens", "entropy" (of p: the least soft_ce there can be), "adapter": Fit, "no_adapter": Fit}."""
    sums = {"adapter": torch.zeros(3), "no_adapter": torch.zeros(3)}
    entropy, tokens = 0.0, 0
    head, norm = module.teacher.lm_head, module.teacher.model.norm
    for ids, labels in (pair for rows in held.values() for pair in batches(rows, batch)):
        kept = (labels != IGNORE).to(head.weight.device)
        early, last = module.states(ids.to(head.weight.device))
        p = head(last[kept]).float().softmax(-1)
        entropy -= float(torch.xlogy(p, p).sum())
        tokens += len(p)
        for name, hidden in (("adapter", module.drafted(early)), ("no_adapter", norm(early))):
            log_q = head(hidden[kept]).float().log_softmax(-1)
            sums[name] += torch.tensor([-float((p * log_q).sum()), *overlaps(p, log_q.exp())])
    fits = {name: asdict(Fit(*(total / max(tokens, 1)).tolist())) for name, total in sums.items()}
    return {"tokens": tokens, "entropy": entropy / max(tokens, 1), **fits}


def no_adapter(teacher: Any) -> dict[str, Tensor]:
    """An adapter that does nothing but the target's final norm: the baseline that a trained one has to beat."""
    shape = Shape.of(teacher.config)
    tensors = {name: torch.zeros(of) for name, of in adapter_shapes(shape).items()}
    tensors["input_norm.weight"] += 1
    tensors["output_norm.weight"] += teacher.model.norm.weight.detach().cpu()
    return tensors


def exit_of(target: Path, exit: int | None = None) -> int:
    """The exit layer; an eighth of the layers, at least one, if left out: the paper's speed peaks at 0.06 to 0.08 of
    them. PacelineError if the model in `target` has no such layer, or cannot draft like this."""
    config = read_config(target)
    reason = unsupported(config)
    if reason:
        raise PacelineError(f"{target}: the native decoder cannot run it, {reason}; an adapter would be of no use")
    layers = Shape.of(config).num_layers
    exit = min(max(1, layers // 8), layers - 1) if exit is None else exit
    if not 0 <= exit < layers:
        raise PacelineError(f"--exit is {exit}, and {target} has {layers} layers: it is 0 to {layers - 1}")
    return exit


def train_adapter(
    target: Path,
    answers: Path,
    out: Path,
    run: Path,
    loop: LoopConfig,
    exit: int | None = None,
    config: LessonConfig = LessonConfig(),
) -> bool:
    """Train an adapter after layer `exit` of the model in `target` on `answers` (a file of `generated_rows`); writes
    `out` in bfloat16, for `kangaroo:PATH`. False when interrupted; the same call goes on."""
    exit = exit_of(target, exit)
    lesson = Lesson.open(target, answers, config)
    if not lesson.training or not lesson.held:
        raise PacelineError(f"{answers} has too few answers to learn from some and to measure on others: generate more")
    torch.manual_seed(loop.seed)
    module = KangarooLoss(lesson.teacher, exit)
    if not lesson.train(module, loop, run):
        return False
    if lesson.first:
        fits = measure(module, lesson.held)
        facts = lesson.facts(Kangaroo.name, loop, exit_layer=exit, held_out=fits)
        tensors = {name: weight.to(torch.bfloat16) for name, weight in module.adapter.named_parameters()}
        save_drafter(out, Kangaroo.name, config=facts, tensors=tensors, target=lesson.target_facts())
        shutil.copy(run / "log.jsonl", out / "training.jsonl")
        lesson.report(table(fits), out)
    return True


def table(fits: Mapping[str, Any]) -> list[str]:
    """What `measure` returns, for a reader."""
    lines = [f"held out: {fits['tokens']:,} tokens, entropy of the target {fits['entropy']:.3f} nats"]
    lines += [f"{'':12}{'soft CE':>9}{'overlap':>9}{'top 1':>9}"]
    for name in ("no_adapter", "adapter"):
        fit = fits[name]
        lines.append(f"{name.replace('_', ' '):12}{fit['soft_ce']:9.3f}{fit['overlap']:9.3f}{fit['top1']:9.3f}")
    return lines


@options.with_options
def kangaroo_command(
    setup: options.DrafterOptions,
    lr: options.Rate = 1e-3,
    exit: Annotated[
        int | None, typer.Option(help="Layers of the target that draft; an eighth if left out.", min=0)
    ] = None,
    rows: options.BatchRows = 16,
) -> bool:
    """Train an adapter with which the target's first layers draft, for `--draft kangaroo:OUT`.

    paceline train kangaroo models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/kangaroo

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end the
    adapter is measured on held-out answers, beside the target's own norm and head in its place.
    """
    exit = exit_of(setup.target, exit)
    run, answers = setup.prepare()
    # AdamW with its usual decay, as in the paper; the authors' rate, 5e-5, is for 7 billion parameters.
    loop = setup.loop(answers, PASSES, optimiser="adamw", peak_lr=lr, weight_decay=0.01)
    config = LessonConfig(length=setup.length, rows=rows)
    return train_adapter(setup.target, answers, setup.out, run, loop, exit, config)
