"""Draft heads: the training that all of them share, and Medusa's and Hydra's.

Heads that read the state after token t propose tokens t + 2, t + 3, ...; token t + 1 is known when they draft, because
the target has just chosen it. Depth k, counted from 0, predicts token t + 2 + k. It is trained on if that token and all
from t + 1 on are the target's own. Its soft label is the target's distribution at t + 1 + k, from the same forward as
the states. Most of the work is the logits: in training they are computed at a share of the positions, drawn anew for
each batch. A recipe subclasses `HeadsLoss`, which says what states its heads read and what they predict.

Medusa (Cai et al. 2024, arXiv 2401.10774) with the target frozen ("Medusa-1"): head k reads the state after the final
norm and shares the target's output head, or has its own, which begins as a copy (`--own-heads`).

Hydra (Ankner et al. 2024, arXiv 2402.05109): each head also reads the drafted tokens before it; in training, those of
the text. With `--prefix`, a part of Hydra++, a decoder layer and a norm of their own come between the target's state
and the heads. The target's output head is shared: own ones would be most of the network.

    paceline train medusa models/demo --data answers.jsonl --out build/medusa
    paceline train hydra models/demo --data answers.jsonl --out build/hydra
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.draft.hydra import Hydra
from paceline.draft.medusa import Medusa
from paceline.draft.neural.networks import PREFIX, GroundedHeads, ResidualHeads
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.jsonl import check_folder
from paceline.train.data import Rows, all_batches
from paceline.train.layers import DecoderLayers, use_blocks
from paceline.train.loss import IGNORE, chunked_cross_entropy, chunked_distillation, soft_cross_entropy
from paceline.train.options import DrafterOptions, with_options
from paceline.train.slots import RANKS, Slots, slot_lines, write_slots
from paceline.train.trainer import Trainer, TrainerConfig, Training, check_target

PASSES = 4
"""Over the answers, if no budget is given."""
MOST_ROWS = 48
"""Held-out rows measured per source."""

States = Callable[[Tensor], Tensor]
"""Token ids [B, T] to states [B, T, H]."""


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(TrainerConfig):
    """What the heads of all methods have in common."""

    depth: int = option(4, "Number of heads, which is the depth of drafts.", least=1, names=("--heads",))
    share: float = option(0.25, "Share of a batch's positions whose logits are computed.", least=0.001, most=1)
    soft: float = option(
        1.0, "Weight in the loss of the target's distribution; the rest is for the target's tokens.", least=0, most=1
    )
    decay: float = option(0.8, "Weight of a depth in the loss relative to the depth before.", least=0)
    lr: float = option(4e-3, "Peak learning rate.", least=0)
    optimiser: Literal["muon", "adamw"] = option("muon", "muon (for matrices), or adamw for everything.")
    begin: Path | None = option(None, "Heads with the same options to continue from, on more text.", file_okay=False)
    states: Path | None = option(
        None,
        "Folder for the target's states, so that other trainings on the same answers need not compute them.",
        file_okay=False,
        callback=check_folder,
    )

    def training(self, setup: DrafterOptions) -> Training:
        """The training to run. PacelineError if heads cannot run with the target."""
        check_target(setup.target)
        return setup.training(PASSES, optimiser=self.optimiser, peak_lr=self.lr, weight_decay=0.0, warmup_steps=20)


class Teacher:
    """A frozen target: its states, final norm, output head (`table` [V, H]) and embeddings."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        use_blocks(self.model)
        self.config = model.config
        self.norm, self.table = model.model.norm, model.lm_head.weight
        self.embedding = model.get_input_embeddings()

    @torch.no_grad()
    def last(self, input_ids: Tensor) -> Tensor:
        """States [B, T, H] before the final norm."""
        before: list[Tensor] = []
        hook = self.norm.register_forward_pre_hook(lambda module, given: before.append(given[0]))
        try:
            self.model.model(input_ids=input_ids, use_cache=False)
        finally:
            hook.remove()
        return before[0]

    def turns(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cos and sin [1, T, head_dim] for states [B, T, H]."""
        positions = torch.arange(states.shape[1], device=states.device)[None]
        turns: tuple[Tensor, Tensor] = self.model.model.rotary_emb(states, positions)
        return turns


class HeadsLoss(nn.Module):
    """Heads whose forward is their loss, a weighted mean over depths. input_ids, labels [B, T]; a label is the next
    token, or IGNORE if that is not the target's own.

    A subclass implements `drafted`. It sets `normed` to False if its heads read the states before the final norm, and
    `lm_heads` if each depth has its own output head; those learn too."""

    normed = True

    def __init__(self, teacher: Teacher, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        self.lm_heads: nn.ModuleList | None = None
        self.teacher = teacher
        self.states: States = teacher.last

    def drafted(self, input_ids: Tensor, states: Tensor, at: Tensor) -> Tensor:
        """Inputs of the output head, [N, depth, H], at N positions `at` of the flattened batch. states [B, T, H]."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        states, last = self.read(input_ids)
        known = known_depths(labels, self.config.depth).flatten(0, 1)
        at = self._chosen(known[:, 0])
        drafted = self.drafted(input_ids, states, at)
        last, flat = last.flatten(0, 1), labels.flatten()
        total, weights = torch.zeros((), device=last.device), 0.0
        for k in range(self.config.depth):
            weight = self.config.decay**k
            there = (at + k + 1).clamp_max(len(flat) - 1)
            total = total + weight * self._of_depth(k, drafted[:, k], last[there], flat[there], known[at, k])
            weights += weight
        return total / weights

    @torch.no_grad()
    def read(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(states that the heads read, states after the final norm), [B, T, H] each."""
        before = self.states(input_ids)
        last = self.teacher.norm(before.float())
        return (last if self.normed else before), last

    def _chosen(self, known: Tensor) -> Tensor:
        """The positions to compute: a share of the `known` ones, random in training."""
        at = known.nonzero().flatten()
        if self.training:
            drawn = at[torch.rand(len(at)).to(at.device) < self.config.share]
            return drawn if len(drawn) else at[:1]
        return at[:: max(round(1 / self.config.share), 1)]

    def _of_depth(self, k: int, drafted: Tensor, last: Tensor, labels: Tensor, known: Tensor) -> Tensor:
        soft, table = self.config.soft, self.teacher.table
        loss = torch.zeros((), device=drafted.device)
        own = self._own_table(k)
        if soft > 0 and own is not None:
            loss = loss + soft * chunked_distillation(drafted, own, last, table, known)
        elif soft > 0:
            loss = loss + soft * soft_cross_entropy(drafted, last, table, known)
        if soft < 1:
            wanted = torch.where(known, labels, IGNORE)
            loss = loss + (1 - soft) * chunked_cross_entropy(drafted, table if own is None else own, wanted)
        return loss

    def logits(self, k: int, drafted: Tensor) -> Tensor:
        """Logits [N, V] of depth k from the inputs of its output head [N, H]."""
        own = self._own_table(k)
        return drafted @ (self.teacher.table if own is None else own).T

    def _own_table(self, k: int) -> Tensor | None:
        """The weights of depth k's own output head, if it has one."""
        head = None if self.lm_heads is None else self.lm_heads[k]
        return head.weight if isinstance(head, nn.Linear) else None

    def saved(self) -> dict[str, Tensor]:
        """The parameters by the names they are saved under."""
        return {name.removeprefix("network."): weight for name, weight in self.named_parameters()}


@torch.no_grad()
def go_on(module: HeadsLoss, folder: Path) -> None:
    """Load the weights of the heads in `folder`. PacelineError if they were made with other options."""
    file = folder / "model.safetensors"
    if not file.exists():
        raise PacelineError(f"--begin: {folder} has no model.safetensors; name a folder that this command wrote")
    weights, own = load_file(file), module.saved()
    wrong = sorted(set(weights) ^ set(own)) or [name for name in own if own[name].shape != weights[name].shape]
    if wrong:
        raise PacelineError(f"--begin: {folder} has heads of another make: {', '.join(wrong[:3])}")
    for name, parameter in own.items():
        parameter.copy_(weights[name])


def known_depths(labels: Tensor, depth: int) -> Tensor:
    """bool [B, T, depth]: whether the tokens t + 1 to t + 2 + k after position t are all the target's own."""
    known = labels != IGNORE
    ahead = [torch.cat([known[:, k:], torch.zeros_like(known[:, :k])], 1) for k in range(depth + 1)]
    return torch.stack(ahead, -1).cumprod(-1)[..., 1:].bool()


@torch.no_grad()
def measure(module: HeadsLoss, held: Mapping[str, Rows]) -> Slots:
    """How often the candidates of each depth are the target's best token, over the labelled positions of `held`."""
    module.eval()
    depth, table = module.config.depth, module.teacher.table
    slots = Slots(depth)
    ranks = min(RANKS, len(table))
    few: dict[str, Rows] = {name: (ids[:MOST_ROWS], labels[:MOST_ROWS]) for name, (ids, labels) in held.items()}
    for batch in all_batches(few):
        ids, labels = (side.to(table.device) for side in batch)
        states, last = module.read(ids)
        known = known_depths(labels, depth).flatten(0, 1)
        at = known[:, 0].nonzero().flatten()
        if not len(at):
            continue
        best_tokens = (last @ table.T).argmax(-1).flatten()
        drafted = module.drafted(ids, states, at)
        for k in range(depth):
            here = known[at, k]
            best = module.logits(k, drafted[here, k]).topk(ranks).indices
            slots.add(k, best, best_tokens[at[here] + k + 1])
    return slots


def head_facts(slots: Slots) -> dict[str, Any]:
    """The measurements in config.json, by depth."""
    shares = slots.accuracies
    return {
        "positions": [int(count) for count in slots.counts],
        "top1": [row[0] for row in shares],
        "top5": [round(sum(row[:5]), 4) for row in shares],
    }


def train_heads(
    kind: str,
    training: Training,
    config: HeadsConfig,
    make: Callable[[Teacher], HeadsLoss],
    facts: Mapping[str, Any],
) -> bool:
    """Train the heads of `make`; writes a folder for `kind:PATH`. False when interrupted; the same call goes on.

    facts  entries of config.json."""
    check_target(training.target)
    trainer = Trainer.open(training, config, must_hold_out=True)
    teacher = Teacher(trainer.teacher)
    module = make(teacher)
    if config.begin is not None:
        go_on(module, config.begin)
    if config.states is not None:
        target = trainer.target_facts()
        cache = StateCache.open(
            config.states, target.weights_fingerprint, teacher.last, trainer.rows, target.hidden_size
        )
        module.states = cache.of
    if not trainer.train(module):
        return False
    if trainer.first:
        slots = measure(module, trainer.held)
        lines = slot_lines(slots.accuracies)
        trainer.save_head(kind, module.saved().items(), lines, **facts, held_out=head_facts(slots))
        write_slots(training.out, slots.accuracies, slots.counts)
    return True


# States in a file ------------------------------------------------------------------------------------------------


class StateCache:
    """States [rows, T, H] of a frozen target over training rows, in a file, so that several trainings share one
    forward. A second file has a byte per row: whether its states are there.

    States are before the final norm, in bfloat16: 2 H bytes a token, 0.8 GB for a million tokens of width 384. The
    file's name has the fingerprints of the target and the rows. Several processes may fill it at once."""

    def __init__(self, file: Path, run: States, numbers: Mapping[bytes, int], length: int, width: int) -> None:
        size = len(numbers) * length * width
        data = torch.from_file(str(file), shared=True, size=size, dtype=torch.bfloat16)
        self._states = data.view(len(numbers), length, width)
        self._filled = torch.from_file(
            str(file.with_suffix(".rows")), shared=True, size=len(numbers), dtype=torch.uint8
        )
        self._run, self._numbers = run, numbers

    @classmethod
    def open(cls, folder: Path, fingerprint: str, run: States, rows: Mapping[str, Rows], width: int) -> StateCache:
        """The cache of these rows and the target with this fingerprint; made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        every = [row for ids, _ in rows.values() for row in ids]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(map(_key, every)))}  # equal rows once
        digest = hashlib.sha256(b"".join([fingerprint.encode(), *numbers])).hexdigest()[:16]
        return cls(folder / f"states-{digest}.bin", run, numbers, len(every[0]), width)

    def of(self, input_ids: Tensor) -> Tensor:
        """States [B, T, H] of rows [B, T]. Rows that the cache was not made for are computed and not stored."""
        keys = [_key(row) for row in input_ids.cpu().numpy().astype(np.int32)]
        known = [self._numbers.get(key, -1) for key in keys]
        missing = [i for i, number in enumerate(known) if number < 0 or not self._filled[number]]
        out = self._states[torch.tensor(known).clamp_min(0)].to(input_ids.device)
        if missing:
            out[missing] = self._run(input_ids[missing]).to(out)
        for i in missing:
            if known[i] >= 0:
                self._states[known[i]] = out[i].cpu()
                self._filled[known[i]] = 1  # after the states, because another process may be reading
        return out


def _key(row: np.ndarray) -> bytes:
    return hashlib.sha256(row.astype("<i4").tobytes()).digest()[:16]


# Medusa ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadsConfig):
    """Medusa's network."""

    layers: int = option(1, "Residual blocks of a head.", least=1)
    own_heads: bool = option(
        False, "Give each head its own output head; that is most of the size.", names=("--own-heads",)
    )


class MedusaLoss(HeadsLoss):
    """K residual heads over the state after the final norm."""

    def __init__(self, teacher: Teacher, config: MedusaConfig) -> None:
        super().__init__(teacher, config)
        self.layers = config.layers
        self.network = ResidualHeads(config.depth, config.layers, teacher.config.hidden_size)
        self.lm_heads = own_output_heads(teacher, config.depth) if config.own_heads else None

    def drafted(self, input_ids: Tensor, states: Tensor, at: Tensor) -> Tensor:
        h = states.flatten(0, 1)[at]
        return torch.stack([head(h) for head in self.network], 1)

    def saved(self) -> dict[str, Tensor]:
        """Names of the authors' files, where an output head comes after the blocks of its head."""
        return {
            re.sub(r"^lm_heads\.(\d+)", rf"\1.{self.layers}", name): weight for name, weight in super().saved().items()
        }


def own_output_heads(teacher: Teacher, depth: int) -> nn.ModuleList:
    """An output head for each depth, initially the target's."""
    vocab_size, width = teacher.table.shape
    heads = [nn.Linear(width, vocab_size, bias=False) for _ in range(depth)]
    with torch.no_grad():
        for head in heads:
            head.weight.copy_(teacher.table)
    return nn.ModuleList(heads)


def train_medusa(training: Training, config: MedusaConfig = MedusaConfig()) -> bool:
    """Train heads for `medusa:PATH`. False when interrupted; the same call goes on."""
    facts = {
        "medusa_num_heads": config.depth, "medusa_num_layers": config.layers, "own_heads": config.own_heads,
    }  # fmt: skip
    return train_heads(Medusa.name, training, config, lambda teacher: MedusaLoss(teacher, config), facts)


@with_options
def medusa_command(setup: DrafterOptions, config: MedusaConfig) -> bool:
    """Train Medusa's heads, for `--draft medusa:OUT`: small networks that read the target's last state.

    paceline train medusa models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/medusa

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end the
    heads are measured on held-out answers, by depth and rank; slots.json has the trees that follow from that.
    """
    return train_medusa(config.training(setup), config)


# Hydra -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HydraConfig(HeadsConfig):
    """Hydra's network."""

    layers: int = option(4, "Blocks of a head; those after the first share their weights.", least=1)
    prefix: bool = option(True, "A decoder layer between the target and the heads, as in Hydra++.")


class HydraLoss(HeadsLoss):
    """Grounded heads over the state after the final norm, or over the prefix layer's output."""

    def __init__(self, teacher: Teacher, config: HydraConfig) -> None:
        super().__init__(teacher, config)
        self.network = GroundedHeads(config.depth, config.layers, teacher.config.hidden_size)
        self.prefix: nn.ModuleDict | None = None
        if config.prefix:
            # The norm begins at 1 and its input is normed already, so an untrained prefix changes next to nothing.
            norm = nn.RMSNorm(teacher.config.hidden_size, teacher.config.rms_norm_eps)
            self.prefix = nn.ModuleDict({"layers": DecoderLayers(teacher.model, 1), "norm": norm})

    def drafted(self, input_ids: Tensor, states: Tensor, at: Tensor) -> Tensor:
        if self.prefix is not None:
            states = self.prefix["norm"](self.prefix["layers"](states, self.teacher.turns(states)))
        state, flat = states.flatten(0, 1)[at], input_ids.flatten()
        tokens = [self.teacher.embedding(flat[(at + k + 1).clamp_max(len(flat) - 1)]) for k in range(len(self.network))]
        return torch.stack([self.network(k, state, tokens[: k + 1]) for k in range(len(self.network))], 1)

    def saved(self) -> dict[str, Tensor]:
        """Names of the authors' files."""
        return {name.replace("prefix.", f"{PREFIX}.", 1): weight for name, weight in super().saved().items()}


def train_hydra(training: Training, config: HydraConfig = HydraConfig()) -> bool:
    """Train heads for `hydra:PATH`. False when interrupted; the same call goes on."""
    facts = {
        "hydra_num_heads": config.depth,
        "hydra_num_layers": config.layers,
        "hydra_head_arch": "prefix-mlp" if config.prefix else "mlp",
        "grounded_heads": True,
        "tied": True,  # the blocks after a head's first share their weights, which are in the file once
    }
    return train_heads(Hydra.name, training, config, lambda teacher: HydraLoss(teacher, config), facts)


@with_options
def hydra_command(setup: DrafterOptions, config: HydraConfig) -> bool:
    """Train Hydra's heads, for `--draft hydra:OUT`: each one also reads the drafted tokens before it.

    paceline train hydra models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/hydra

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end the
    heads are measured on held-out answers, by depth and rank; slots.json has the trees that follow from that.
    """
    return train_hydra(config.training(setup), config)
