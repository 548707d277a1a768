"""EAGLE and EAGLE-3: one layer over states of the target learns to draft.

EAGLE (Li et al. 2024, arXiv 2401.15077, section 3.2): the layer predicts the target's next last state from the state
before it and the token between them. The loss, where the next token is the target's own, is SmoothL1 between predicted
and true state, plus a tenth of the soft cross-entropy between the distributions that the target's head gives for the
two. Noise on the input states makes the layer robust to its own errors. The text is written by the target; the authors
use recorded text.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840, section 3): no state is predicted. At every step of the training-time test
the head's distribution over its own, smaller vocabulary learns the target's over the same tokens; a step weighs 0.8 of
the one before. Positions whose best token is not in the draft vocabulary are left out. The vocabulary is counted on the
answers; the output head begins as the target's rows and learns. The output is a checkpoint of the `speculators` format,
which vLLM reads too (docs/vllm.md).

    paceline train eagle models/demo --data answers.jsonl --out build/eagle
    paceline train eagle3 models/demo --data answers.jsonl --out build/eagle3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.draft.eagle import Eagle
from paceline.draft.eagle3 import Eagle3, Flags, default_taps
from paceline.draft.neural.vocab import best_tokens, coverage, must_keep
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.target.shape import Shape, rotary_tables
from paceline.train.data import Rows, all_batches
from paceline.train.loss import IGNORE, soft_cross_entropy
from paceline.train.options import DrafterOptions, Layers, layers_of, with_options
from paceline.train.trainer import Student, Trainer, TrainerConfig, Training, check_target
from paceline.train.unrolled import Memory, Unrolled, UnrolledLayer

PASSES = 4
"""Over the answers, if no budget is given. The authors make 20, and for EAGLE-3 40 over half a million answers."""
LOOP = {"warmup_steps": 20, "weight_decay": 0.01}
"""For both methods. The paper's AdamW at 3e-5 is for 7 billion parameters and 800,000 steps."""
DEPTHS = 5
"""Depths at which acceptance is measured."""
SERVED = 3
"""Default number of tokens that a server drafts with EAGLE-3."""


class StateLoss(Student):
    """A head over the target's states whose forward is its loss. input_ids, labels [B, T]; a label is the next token,
    or IGNORE if that is not the target's own."""

    module: Any
    """An `Unrolled`."""

    @torch.no_grad()
    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(states that the head reads [B, T, ...], last states after the final norm [B, T, H])."""
        raise NotImplementedError

    def unroll(self, read: Tensor, input_ids: Tensor, steps: int) -> Iterator[Tensor]:
        """`Unrolled.unroll` with the target's embeddings."""
        table = self.teacher.model.embed_tokens.weight
        unrolled: Iterator[Tensor] = self.module.unroll(read, input_ids, table, steps)
        return unrolled

    def drafted(self, ids: Tensor, steps: int) -> tuple[Tensor, Iterator[Tensor]]:
        """For ids [B, T]: the target's last states [B, T, H], and the input of the output head at every step."""
        ids = ids.to(self.teacher.device)
        read, last = self.states(ids)
        return last.cpu(), (of_step.cpu() for of_step in self.unroll(read, ids, steps))

    def target_probs(self, states: Tensor) -> Tensor:
        """The target's distribution [N, V] after states [N, H]."""
        probs: Tensor = self.teacher.lm_head(states.to(self.teacher.device)).float().softmax(-1).cpu()
        return probs

    def draft_probs(self, read: Tensor) -> Tensor:
        """The head's distribution [N, V] for inputs of its output head [N, H]."""
        return self.target_probs(read)


@dataclass(frozen=True)
class Depth:
    """Acceptance at one depth of the drafts below texts that the target wrote.

    reached  positions whose draft agrees with the text up to this depth.
    top1     share of them where the draft's best token is the target's.
    overlap  mean of sum min(p, q): the share that sampling accepts."""

    reached: int
    top1: float
    overlap: float


@torch.no_grad()
def by_depth(texts: Mapping[str, Rows], head: StateLoss, depths: int, batch: int = 4) -> list[Depth]:
    """Acceptance by depth over the labelled positions of held-out rows."""
    sums = torch.zeros(depths, 3, dtype=torch.float64)
    for ids, labels in all_batches(texts, batch):
        states, steps = head.drafted(ids, depths)
        known = labels != IGNORE
        right = known[:, 1:]
        for step, read in enumerate(steps):
            here = right[:, : read.shape[1]] & known[:, 1 + step :]
            target = head.target_probs(states[:, 1 + step :][here])
            own = head.draft_probs(read[here])
            best = own.argmax(-1)
            sums[step, 0] += len(own)
            sums[step, 1] += (best == target.argmax(-1)).sum()
            sums[step, 2] += torch.minimum(target, own).sum()
            right = torch.zeros_like(here)  # the next depth counts only where the text continues with this draft
            right[here] = best == labels[:, 1 + step :][here]
    return [
        Depth(int(reached), top1 / max(reached, 1), overlap / max(reached, 1))
        for reached, top1, overlap in sums.tolist()
    ]


def depth_lines(depths: Sequence[Depth]) -> list[str]:
    """A table of `by_depth`."""
    lines = ["held out, by depth of the draft"]
    lines += [f"{'depth':>7}{'reached':>10}{'top 1':>8}{'overlap':>9}"]
    lines += [f"{n:7}{d.reached:10,}{d.top1:8.3f}{d.overlap:9.3f}" for n, d in enumerate(depths, 1)]
    return lines



# EAGLE -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EagleConfig(TrainerConfig):
    """EAGLE's loss."""

    soft: float = option(0.1, "Weight of the cross-entropy; SmoothL1 weighs 1.", least=0)
    noise: float = option(0.1, "Uniform noise on the states: at most this, up or down.", least=0)


class EagleModule(Unrolled):
    """The layer in training."""

    def __init__(self, config: Any) -> None:
        shape = Shape.of(config)
        super().__init__(rotary_tables(config, shape))
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size)
        self.layers = nn.ModuleList([UnrolledLayer(shape, shape.hidden_size)])
        nn.init.zeros_(self.fc.bias)

    def step(
        self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, features], -1))
        y = self.layers[0](x, x, cos, sin, memory)
        return y, y


class EagleLoss(StateLoss):
    """The layer and its loss: SmoothL1 of the states, and the cross-entropy of their distributions."""

    def __init__(self, teacher: Any, config: EagleConfig = EagleConfig()) -> None:
        super().__init__(teacher)
        self.module = EagleModule(teacher.config)
        self.config = config

    @torch.no_grad()
    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        last: Tensor = self.teacher.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return last, last

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        states, _ = self.states(input_ids)
        noisy = states + (torch.rand_like(states) * 2 - 1) * self.config.noise if self.training else states
        (predicted,) = self.unroll(noisy, input_ids, 1)
        known = labels[:, 1:] != IGNORE
        true = states[:, 1:]
        distance = F.smooth_l1_loss(predicted[known].float(), true[known].float())
        return distance + self.config.soft * soft_cross_entropy(predicted, true, self.teacher.lm_head.weight, known)


def layer_config(config: Any) -> dict[str, Any]:
    """The layer's entries in config.json, as in published heads: those of a Llama with one layer."""
    shape = Shape.of(config)
    rope = dict(config.rope_parameters)
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.max_context,
        "vocab_size": shape.vocab_size,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }


def train_eagle(training: Training, config: EagleConfig = EagleConfig()) -> bool:
    """Train a layer for the target; writes a folder for `eagle:PATH`, in the layout of published heads. False when
    interrupted; the same call goes on."""
    check_target(training.target)
    trainer = Trainer.open(training, config, must_hold_out=True)
    loss = EagleLoss(trainer.teacher, config)
    if not trainer.train(loss):
        return False
    if trainer.first:
        depths = by_depth(trainer.held, loss.eval(), DEPTHS)
        facts = {"architectures": ["LlamaForCausalLMEagle"], **layer_config(trainer.teacher.config), "bias": True}
        facts |= {"held_out": [*map(asdict, depths)], "loss": {"soft": config.soft, "noise": config.noise}}
        trainer.save_head(Eagle.name, loss.module.named_parameters(), depth_lines(depths), **facts)
    return True


@with_options
def command(setup: DrafterOptions, config: EagleConfig) -> bool:
    """Train a layer that drafts by predicting the target's next state, for `--draft eagle:OUT`.

    paceline train eagle models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/eagle

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end
    acceptance is measured by depth on held-out answers.
    """
    check_target(setup.target)
    return train_eagle(setup.training(PASSES, peak_lr=config.lr, **LOOP), config)


# EAGLE-3 ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlagOptions(Flags):
    """The head's norms as options. Defaults: EAGLE-3.1."""

    norm_before_residual: bool = option(False, "Use the normed feature as the residual.")
    norm_before_fc: bool = option(False, "One norm over all tapped states.")
    fc_norm: bool = option(True, "A norm for each tapped state (EAGLE-3.1).")
    norm_output: bool = option(True, "Feed back the normed output (EAGLE-3.1).")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(TrainerConfig):
    """The head and its training."""

    vocab: int | None = option(None, "Size of the draft vocabulary; half of the target's if left out.", least=1)
    steps: int = option(3, "Steps of the training-time test: the depth that the head learns.", least=1)
    decay: float = option(0.8, "Weight of a step relative to the one before.", least=0)
    taps: Layers | None = option(
        None, "Layers whose inputs the head reads, as in 2,4,5; the paper's if left out.", parser=layers_of("--taps")
    )
    flags: FlagOptions = field(default_factory=FlagOptions)


class Eagle3Module(Unrolled):
    """The head in training. Parameters are named as in the files."""

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


class Eagle3Loss(StateLoss):
    """A head whose forward is its loss: weighted soft cross-entropies of its steps. keep: int64 [D], the draft
    vocabulary, ascending."""

    keep: Tensor
    is_kept: Tensor
    table: Tensor

    def __init__(self, teacher: Any, keep: Tensor, config: Eagle3Config = Eagle3Config()) -> None:
        super().__init__(teacher)
        self.config = config
        self.taps = config.taps or default_taps(teacher.config.num_hidden_layers)
        self.module = Eagle3Module(teacher.config, len(self.taps), len(keep), config.flags)
        with torch.no_grad():
            self.module.norm.weight.copy_(teacher.model.norm.weight)
            self.module.lm_head.weight.copy_(teacher.lm_head.weight[keep])
        is_kept = torch.zeros(teacher.config.vocab_size, dtype=torch.bool)
        is_kept[keep] = True
        self.register_buffer("keep", keep, persistent=False)
        self.register_buffer("is_kept", is_kept, persistent=False)
        self.register_buffer("table", teacher.lm_head.weight[keep].detach().clone(), persistent=False)

    @torch.no_grad()
    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        out = self.teacher.model(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        return torch.cat([out.hidden_states[layer] for layer in self.taps], -1), out.last_hidden_state

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        taps, last = self.states(input_ids)
        used = labels != IGNORE
        with torch.no_grad():
            used[used.clone()] = self.is_kept[self._best(last[used])]
        total, config = torch.zeros((), device=last.device), self.config
        for step, read in enumerate(self.unroll(taps, input_ids, config.steps)):
            here, target = used[:, 1 + step :], last[:, 1 + step :]
            loss = soft_cross_entropy(read, target, self.table, here, self.module.lm_head.weight)
            total = total + config.decay**step * loss
        return total

    def _best(self, last: Tensor) -> Tensor:
        """The target's best token after every state [N, H]."""
        head = self.teacher.lm_head
        parts = [head(part).argmax(-1) for part in last.split(512)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=last.device)

    def draft_probs(self, read: Tensor) -> Tensor:
        """The head's distribution [N, V]; 0 outside the draft vocabulary."""
        own = self.module.lm_head(read.to(self.keep.device)).float().softmax(-1)
        return own.new_zeros(len(own), len(self.is_kept)).index_copy_(-1, self.keep, own).cpu()


def counts_of(texts: Mapping[str, Rows], vocab_size: int) -> Tensor:
    """How often the target wrote each token in the rows, int64 [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for _, labels in texts.values():
        counts += np.bincount(labels[labels != IGNORE], minlength=vocab_size)
    return torch.from_numpy(counts)


def speculators_config(config: Any, taps: tuple[int, ...], vocab: int, flags: Flags, target: Path) -> dict[str, Any]:
    """config.json in the `speculators` format, which vLLM reads, of a head for the model with `config`."""
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



def train_eagle3(training: Training, config: Eagle3Config = Eagle3Config()) -> bool:
    """Train a head for the target; writes a folder for `eagle3:PATH` and for vLLM. False when interrupted; the same
    call goes on."""
    taps = taps_of(training.target, config.taps)
    trainer = Trainer.open(training, config, must_hold_out=True)
    facts = trainer.teacher.config
    size = facts.vocab_size // 2 if config.vocab is None else config.vocab
    ends = [token for token in (trainer.tokenizer.eos_token_id,) if token is not None]
    keep = best_tokens(counts_of(trainer.rows, facts.vocab_size), size, must_keep(trainer.tokenizer, ends)[:1])
    share = coverage(counts_of(trainer.held, facts.vocab_size), keep)
    trainer.console.print(f"{len(keep):,} tokens to draft: {share:.2%} of what the target writes in held-out answers")
    loss = Eagle3Loss(trainer.teacher, keep, config)
    if not trainer.train(loss):
        return False
    if trainer.first:
        depths = by_depth(trainer.held, loss.eval(), DEPTHS)
        tensors: dict[str, Tensor] = dict(loss.module.named_parameters())
        if len(keep) < facts.vocab_size:
            tensors |= {"d2t": keep - torch.arange(len(keep)), "t2d": loss.is_kept}
        settings = speculators_config(facts, taps, len(keep), config.flags, training.target.expanduser().resolve())
        settings |= {"held_out": [*map(asdict, depths)], "coverage": share}
        trainer.save_head(Eagle3.name, tensors.items(), depth_lines(depths), **settings)
    return True


def taps_of(target: Path, taps: Sequence[int] | None) -> Layers:
    """The layers whose inputs the head reads; `taps`, or the paper's. PacelineError if the model in `target` has no
    such layers, or heads cannot run with it."""
    layers = Shape.of(check_target(target)).num_layers
    taps = Layers(default_taps(layers) if taps is None else taps)
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= layers:
        raise PacelineError(
            f"--taps is {','.join(map(str, taps))}, and {target} has {layers} layers: "
            f"ascending numbers of 0 to {layers - 1}, such as {','.join(map(str, default_taps(layers)))}"
        )
    return taps


@with_options
def eagle3_command(setup: DrafterOptions, config: Eagle3Config) -> bool:
    """Train a layer that drafts from three of the target's states, for `--draft eagle3:OUT` and for vLLM.

    paceline train eagle3 models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/eagle3

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end
    acceptance is measured by depth on held-out answers. OUT is a checkpoint in the `speculators` format.
    """
    config = replace(config, taps=taps_of(setup.target, config.taps))
    return train_eagle3(setup.training(PASSES, peak_lr=config.lr, clip=0.5, **LOOP), config)
