"""EAGLE-3: one layer over three tapped states of the target learns to draft, fed with its own output as in a draft.

Li et al. 2025 (arXiv 2503.01840), section 3: no state is predicted; at every step of the training-time test the head's
distribution over its own, smaller vocabulary is drawn to the target's over the same tokens, and a later step weighs
0.8 of the one before. Positions whose best token the draft vocabulary lacks are not learnt. The vocabulary is counted
on the answers; its head begins with the target's rows and learns. What is written is a checkpoint of the `speculators`
format, which vLLM reads too (docs/vllm.md).

Doesn't know: how drafts are made or verified.

    paceline train eagle3 models/demo --data answers.jsonl --out build/eagle3
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

from paceline.draft.eagle3 import Eagle3, Flags, default_taps
from paceline.draft.neural.checkpoint import save_drafter
from paceline.draft.neural.vocab import best_tokens, coverage, must_keep
from paceline.errors import PacelineError
from paceline.target.load import read_config
from paceline.target.shape import Shape, rotary_tables
from paceline.train import options
from paceline.train.data import Rows
from paceline.train.drafter import Lesson, LessonConfig
from paceline.train.eagle import WARMUP, check_target, layer_config
from paceline.train.loss import IGNORE, soft_cross_entropy_of
from paceline.train.plan import LoopConfig
from paceline.train.unrolled import Depth, Memory, Unrolled, UnrolledLayer, by_depth, depth_facts, depth_lines

PASSES = 4
"""Over the answers, where no budget is given; the authors make 40 over half a million."""
DEPTHS = 5
"""Of the drafts whose acceptance is measured in the end."""
SERVED = 3
"""Tokens a server drafts unless it is told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LessonConfig):
    """What a head looks like and how it is trained.

    vocab   tokens it can draft; None: half of the target's. steps: of the training-time test.
    decay   weight of a step, of the one before. taps: layers whose inputs it reads; None: `default_taps`."""

    vocab: int | None = None
    steps: int = 3
    decay: float = 0.8
    taps: tuple[int, ...] | None = None
    flags: Flags = field(default_factory=lambda: Flags(fc_norm=True, norm_output=True))


class Eagle3Module(Unrolled):
    """The head as it is trained; parameters have the names of the files."""

    def __init__(self, config: Any, taps: int, vocab: int, flags: Flags) -> None:
        shape = Shape.of(config)
        super().__init__(rotary_tables(config, shape))
        hidden = shape.hidden_size
        self.flags = flags
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([UnrolledLayer(shape, 2 * hidden, ("input_layernorm", "hidden_norm"))])
        self.norm = nn.RMSNorm(hidden, shape.eps)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        if flags.norm_before_fc:
            self.input_norm = nn.RMSNorm(taps * hidden, shape.eps)
        if flags.fc_norm:
            self.fc_norm = nn.ModuleList([nn.RMSNorm(hidden, shape.eps) for _ in range(taps)])

    def first(self, taps: Tensor) -> Tensor:
        if self.flags.norm_before_fc:
            taps = self.input_norm(taps)
        if self.flags.fc_norm:
            parts = taps.chunk(len(self.fc_norm), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        features: Tensor = self.fc(taps)
        return features

    def step(
        self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[0]
        normed = layer.hidden_norm(features)
        x = torch.cat([layer.input_layernorm(embedded), normed], -1)
        y = layer(x, normed if self.flags.norm_before_residual else features, cos, sin, memory)
        read = self.norm(y)
        return (read if self.flags.norm_output else y), read


class Eagle3Loss(nn.Module):
    """A head whose forward is its loss. input_ids, labels [B, T], labels shifted: IGNORE where the next token is not
    the target's own.

    teacher: a transformers model. keep: int64 [D], the tokens that can be drafted, ascending."""

    keep: Tensor
    is_kept: Tensor
    table: Tensor

    def __init__(self, teacher: Any, keep: Tensor, config: Eagle3Config = Eagle3Config()) -> None:
        super().__init__()
        self.config = config
        self.taps = config.taps or default_taps(teacher.config.num_hidden_layers)
        self.module = Eagle3Module(teacher.config, len(self.taps), len(keep), config.flags)
        with torch.no_grad():
            self.module.norm.weight.copy_(teacher.model.norm.weight)
            self.module.lm_head.weight.copy_(teacher.lm_head.weight[keep])
        self.register_buffer("keep", keep, persistent=False)
        is_kept = torch.zeros(teacher.config.vocab_size, dtype=torch.bool)
        is_kept[keep] = True
        self.register_buffer("is_kept", is_kept, persistent=False)
        self.register_buffer("table", teacher.lm_head.weight[keep].detach().clone(), persistent=False)
        # In a list: the target must not appear among the parameters.
        self._teacher = [teacher.eval().requires_grad_(False)]

    @property
    def teacher(self) -> Any:
        """The frozen target."""
        return self._teacher[0]

    @torch.no_grad()
    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The tapped states side by side, [B, T, L * H], and the last ones after the final norm, [B, T, H]."""
        out = self.teacher.model(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        return torch.cat([out.hidden_states[layer] for layer in self.taps], -1), out.last_hidden_state

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        taps, last = self.states(input_ids)
        kept = labels != IGNORE
        with torch.no_grad():
            kept[kept.clone()] = self.is_kept[self._best(last[kept])]
        total, config = torch.zeros((), device=last.device), self.config
        unrolled = self.module.unroll(taps, input_ids, self.teacher.model.embed_tokens.weight, config.steps)
        for step, read in enumerate(unrolled):
            here, target = kept[:, 1 + step :], last[:, 1 + step :]
            loss = soft_cross_entropy_of(read, self.module.lm_head.weight, target, self.table, here)
            total = total + config.decay**step * loss
        return total

    def _best(self, last: Tensor) -> Tensor:
        """The target's best token after every state [N, H]."""
        head = self.teacher.lm_head
        parts = [head(part).argmax(-1) for part in last.split(512)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=last.device)

    def drafted(self, ids: Tensor, steps: int) -> tuple[Tensor, Iterator[Tensor]]:
        """As `Reading`."""
        ids = ids.to(self.teacher.device)
        taps, last = self.states(ids)
        unrolled = self.module.unroll(taps, ids, self.teacher.model.embed_tokens.weight, steps)
        return last.cpu(), (read.cpu() for read in unrolled)

    def target_probs(self, states: Tensor) -> Tensor:
        """As `Reading`."""
        probs: Tensor = self.teacher.lm_head(states.to(self.teacher.device)).float().softmax(-1).cpu()
        return probs

    def draft_probs(self, read: Tensor) -> Tensor:
        """As `Reading`: 0 for the tokens that it does not draft."""
        own = self.module.lm_head(read.to(self.keep.device)).float().softmax(-1)
        return own.new_zeros(len(own), len(self.is_kept)).index_copy_(-1, self.keep, own).cpu()


def measure(loss: Eagle3Loss, held: Mapping[str, Rows]) -> list[Depth]:
    """Acceptance by depth on held-out answers."""
    return by_depth(held, loss.eval(), DEPTHS)


def counts_of(texts: Mapping[str, Rows], vocab_size: int) -> Tensor:
    """How often the target wrote each token in rows, int64 [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for _, labels in texts.values():
        counts += np.bincount(labels[labels != IGNORE], minlength=vocab_size)
    return torch.from_numpy(counts)


def speculators_config(config: Any, taps: tuple[int, ...], vocab: int, flags: Flags, target: Path) -> dict[str, Any]:
    """config.json of the `speculators` format: what vLLM reads of a head for the model with `config`."""
    method = {"proposal_type": "greedy", "speculative_tokens": SERVED, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": list(config.architectures or [])},
        },
        "transformer_layer_config": layer_config(config),
        "draft_vocab_size": vocab,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "tie_word_embeddings": False,
        **asdict(flags),
    }


def tensors_of(module: Eagle3Module, keep: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """What model.safetensors holds: the head in bfloat16, and which tokens it drafts if that is not all of them."""
    tensors = {name: weight.detach().to(torch.bfloat16) for name, weight in module.named_parameters()}
    if len(keep) == vocab_size:
        return tensors
    members = torch.zeros(vocab_size, dtype=torch.bool)
    members[keep] = True
    return tensors | {"d2t": keep - torch.arange(len(keep)), "t2d": members}


def train_eagle3(
    target: Path, answers: Path, out: Path, run: Path, loop: LoopConfig, config: Eagle3Config = Eagle3Config()
) -> bool:
    """Train a head for the model in `target` on `answers` (a file of `generated_rows`); writes `out` in bfloat16, for
    `eagle3:PATH` and for vLLM. False when interrupted; the same call goes on."""
    taps = taps_of(target, config.taps)
    lesson = Lesson.open(target, answers, config)
    if not lesson.training or not lesson.held:
        raise PacelineError(f"{answers} has too few answers to learn from some and to measure on others: generate more")
    facts = lesson.teacher.config
    counts = counts_of(lesson.training, facts.vocab_size)
    size = facts.vocab_size // 2 if config.vocab is None else config.vocab
    ends = [token for token in (lesson.tokenizer.eos_token_id,) if token is not None]
    keep = best_tokens(counts, size, must_keep(lesson.tokenizer, ends)[:1])
    share = coverage(counts_of(lesson.held, facts.vocab_size), keep)
    lesson.console.print(f"{len(keep):,} tokens to draft: {share:.2%} of what the target writes in held-out answers")
    torch.manual_seed(loop.seed)
    loss = Eagle3Loss(lesson.teacher, keep, config)
    if not lesson.train(loss, loop, run):
        return False
    if lesson.first:
        depths = measure(loss, lesson.held)
        settings = speculators_config(facts, taps, len(keep), config.flags, target.expanduser().resolve())
        settings |= lesson.facts(Eagle3.name, loop, held_out=depth_facts(depths), coverage=share)
        tensors = tensors_of(loss.module, keep, facts.vocab_size)
        save_drafter(out, Eagle3.name, config=settings, tensors=tensors, target=lesson.target_facts())
        shutil.copy(run / "log.jsonl", out / "training.jsonl")
        lesson.report(depth_lines(depths), out)
    return True


def taps_of(target: Path, taps: tuple[int, ...] | None) -> tuple[int, ...]:
    """The layers whose inputs are read. PacelineError if the model in `target` has no such layers, or cannot draft
    like this."""
    check_target(target)
    layers = Shape.of(read_config(target)).num_layers
    taps = default_taps(layers) if taps is None else taps
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= layers:
        raise PacelineError(
            f"--taps is {','.join(map(str, taps))}, and {target} has {layers} layers: "
            f"ascending numbers of 0 to {layers - 1}, such as {','.join(map(str, default_taps(layers)))}"
        )
    return taps


@options.with_options
def command(
    setup: options.DrafterOptions,
    lr: options.Rate = 2e-3,
    rows: options.BatchRows = 16,
    vocab: Annotated[int | None, typer.Option(help="Tokens it can draft; half of all if left out.", min=1)] = None,
    steps: Annotated[int, typer.Option(help="Steps of the training-time test: depth it learns to draft.", min=1)] = 3,
    decay: Annotated[float, typer.Option(help="Weight of a step, of the one before.", min=0)] = 0.8,
    taps: Annotated[
        str | None, typer.Option(help="Layers whose inputs it reads: 2,4,5; the paper's if left out.")
    ] = None,
    fc_norm: Annotated[bool, typer.Option(help="A norm for every tapped state (EAGLE-3.1).")] = True,
    norm_before_fc: Annotated[bool, typer.Option(help="One norm for all tapped states.")] = False,
    norm_output: Annotated[bool, typer.Option(help="Feed back the normed output (EAGLE-3.1).")] = True,
    norm_before_residual: Annotated[bool, typer.Option(help="Add to the normed feature.")] = False,
) -> bool:
    """Train a layer over three of the target's states to draft, for `--draft eagle3:OUT` and for vLLM.

    paceline train eagle3 models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/eagle3

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end
    acceptance is measured by depth on held-out answers. OUT is a checkpoint in the `speculators` format.
    """
    flags = Flags(norm_before_residual, norm_before_fc, fc_norm, norm_output)
    layers = taps_of(setup.target, None if taps is None else _numbers(taps))
    run, answers = setup.prepare()
    loop = setup.loop(answers, PASSES, peak_lr=lr, warmup_steps=WARMUP, weight_decay=0.01, clip=0.5)
    config = Eagle3Config(
        length=setup.length, rows=rows, vocab=vocab, steps=steps, decay=decay, taps=layers, flags=flags
    )
    return train_eagle3(setup.target, answers, setup.out, run, loop, config)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PacelineError(f"--taps is {text!r}: numbers of layers with commas between them, such as 2,4,5") from None
