"""Draft heads: the training that all of them share, and Medusa's, Hydra's and Amphista's.

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

Amphista (Li et al., NAACL 2025, arXiv 2406.13170): causal layers of its own, K heads, and an encoder in which the heads
attend to each other. The layers are causal over the text. The encoder attends over the K depths of one position, never
across positions, so one forward trains all positions. docs/methods/amphista.md measures what each part brings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from paceline.draft.methods.amphista import Amphista
from paceline.draft.methods.hydra import Hydra
from paceline.draft.methods.medusa import Medusa
from paceline.draft.spec import option
from paceline.formats.heads.networks import PREFIX, GroundedHeads, JointHeads, ResidualHeads, concat_scaled
from paceline.train.layers import DecoderLayers
from paceline.train.loss import IGNORE, chunked_cross_entropy
from paceline.train.measure import measure_folder
from paceline.train.options import DrafterOptions, TargetName, Threads, use_threads
from paceline.train.student import Student, known_depths
from paceline.train.trainer import HeadConfig, Trainer, train_head


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(HeadConfig):
    """What the heads of all methods have in common."""

    passes: ClassVar[int] = 4
    own = {"weight_decay": 0.0, "warmup_steps": 20}

    depth: int = option(4, "Number of heads, which is the depth of drafts.", least=1, names=("--heads",))
    share: float = option(0.25, "Share of a batch's positions whose logits are computed.", least=0.001, most=1)
    soft: float = option(
        1.0,
        "Weight of the target's distribution in the loss; the rest of the weight is for the target's tokens.",
        least=0, most=1,
    )
    decay: float = option(0.8, "Weight of a depth in the loss relative to the depth before.", least=0)
    lr: float = option(4e-3, "Peak learning rate.", least=0)
    optimiser: Literal["muon", "adamw"] = option("muon", "Optimiser: muon (for matrices), or adamw for everything.")

    @property
    def loop(self) -> dict[str, Any]:
        return super().loop | {"optimiser": self.optimiser}

    def student(self, trainer: Trainer) -> Student:
        return self.heads(trainer.teacher)

    def heads(self, teacher: Any) -> HeadsLoss:
        """Untrained heads for a target."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OwnHeadsConfig(HeadsConfig):
    """What heads have in common that may have output heads of their own."""

    own_heads: bool = option(
        False, "Give each head its own output head; output heads are then most of the size.", names=("--own-heads",)
    )


class HeadsLoss(Student):
    """Heads whose forward is their loss, a weighted mean over depths.

    A subclass implements `drafted`. It sets `normed` to False if its heads read the states before the final norm, and
    `lm_heads` if each depth has its own output head; those learn too."""

    has_tree = at_once = True
    normed = True

    def __init__(self, teacher: Any, config: HeadsConfig) -> None:
        super().__init__(teacher, config.loss)
        self.config, self.depths = config, config.depth
        self.lm_heads: nn.ModuleList | None = None

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

    def read(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(states that the heads read, states after the final norm), [B, T, H] each."""
        states, last = self.target_states(input_ids)
        return (last if self.normed else states[..., -1, :]), last

    def embedded(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.teacher.get_input_embeddings()(ids)
        return embedded

    def turns(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cos and sin [1, T, head_dim] for states [B, T, H]."""
        positions = torch.arange(states.shape[1], device=states.device)[None]
        turns: tuple[Tensor, Tensor] = self.teacher.model.rotary_emb(states, positions)
        return turns

    def _chosen(self, known: Tensor) -> Tensor:
        """The positions to compute: a share of the `known` ones, random in training."""
        at = known.nonzero().flatten()
        if self.training:
            drawn = at[torch.rand(len(at)).to(at.device) < self.config.share]
            return drawn if len(drawn) else at[:1]
        return at[:: max(round(1 / self.config.share), 1)]

    def _of_depth(self, k: int, drafted: Tensor, last: Tensor, labels: Tensor, known: Tensor) -> Tensor:
        soft, loss = self.config.soft, torch.zeros((), device=drafted.device)
        if soft > 0:
            loss = loss + soft * self.distance(drafted, last, known, k)
        if soft < 1:
            loss = loss + (1 - soft) * chunked_cross_entropy(drafted, self.table(k), torch.where(known, labels, IGNORE))
        return loss

    def table(self, depth: int = 0) -> Tensor:
        if self.lm_heads is None:
            return super().table()
        table: Tensor = self.lm_heads.get_submodule(str(depth)).weight  # type: ignore[assignment]
        return table

    def drafts(self, input_ids: Tensor, depths: int) -> tuple[Tensor, Iterator[Tensor]]:
        states, last = self.read(input_ids)
        at = torch.arange(input_ids.numel(), device=input_ids.device).view_as(input_ids)[:, :-1]
        drafted = self.drafted(input_ids, states, at.flatten()).unflatten(0, at.shape)
        return last, (drafted[:, : at.shape[1] - k, k] for k in range(depths))

    def saved(self) -> dict[str, Tensor]:
        return {name.removeprefix("network."): weight for name, weight in self.named_parameters()}


def own_output_heads(teacher: Any, depth: int) -> nn.ModuleList:
    """An output head for each depth, initially the target's."""
    vocab_size, width = teacher.lm_head.weight.shape
    heads = nn.ModuleList(nn.Linear(width, vocab_size, bias=False) for _ in range(depth))
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(teacher.lm_head.weight)
    return heads


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(OwnHeadsConfig):
    """The shape of Medusa's heads."""

    layers: int = option(1, "Number of residual blocks of a head.", least=1)

    def heads(self, teacher: Any) -> HeadsLoss:
        return MedusaLoss(teacher, self)


class MedusaLoss(HeadsLoss):
    """K residual heads over the state after the final norm."""

    kind = Medusa.name

    def __init__(self, teacher: Any, config: MedusaConfig) -> None:
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

    def facts(self) -> dict[str, Any]:
        own_heads = self.lm_heads is not None
        return {"medusa_num_heads": self.depths, "medusa_num_layers": self.layers, "own_heads": own_heads}


def medusa_command(setup: DrafterOptions, config: MedusaConfig) -> bool:
    """Train Medusa's heads, for `--draft medusa:OUT`: small networks that read the target's last state.

    paceline train medusa smollm2 --prompts mine=prompts.jsonl --generate 5000 --out build/medusa

    At the end the heads are measured on held-out answers, by depth and rank; slots.json has the trees that follow from
    that."""
    return train_head(setup.training(config), config)


@dataclass(frozen=True, kw_only=True)
class HydraConfig(HeadsConfig):
    """The shape of Hydra's heads."""

    layers: int = option(4, "Number of blocks of a head; those after the first share their weights.", least=1)
    prefix: bool = option(True, "Put a decoder layer between the target and the heads, as in Hydra++.")

    def heads(self, teacher: Any) -> HeadsLoss:
        return HydraLoss(teacher, self)


class HydraLoss(HeadsLoss):
    """Grounded heads over the state after the final norm, or over the prefix layer's output."""

    kind = Hydra.name

    def __init__(self, teacher: Any, config: HydraConfig) -> None:
        super().__init__(teacher, config)
        self.layers = config.layers
        self.network = GroundedHeads(config.depth, config.layers, teacher.config.hidden_size)
        self.prefix: nn.ModuleDict | None = None
        if config.prefix:
            # The norm begins at 1 and its input is normed already, so an untrained prefix changes next to nothing.
            norm = nn.RMSNorm(teacher.config.hidden_size, teacher.config.rms_norm_eps)
            self.prefix = nn.ModuleDict({"layers": DecoderLayers(teacher, 1), "norm": norm})

    def drafted(self, input_ids: Tensor, states: Tensor, at: Tensor) -> Tensor:
        if self.prefix is not None:
            states = self.prefix["norm"](self.prefix["layers"](states, self.turns(states)))
        state, flat = states.flatten(0, 1)[at], input_ids.flatten()
        tokens = [self.embedded(flat[(at + k + 1).clamp_max(len(flat) - 1)]) for k in range(self.depths)]
        return torch.stack([self.network(k, state, tokens[: k + 1]) for k in range(self.depths)], 1)

    def saved(self) -> dict[str, Tensor]:
        """Names of the authors' files."""
        return {name.replace("prefix.", f"{PREFIX}.", 1): weight for name, weight in super().saved().items()}

    def facts(self) -> dict[str, Any]:
        return {
            "hydra_num_heads": self.depths,
            "hydra_num_layers": self.layers,
            "hydra_head_arch": "mlp" if self.prefix is None else "prefix-mlp",
            "grounded_heads": True,
            "tied": True,  # A head's blocks after the first share weights, which are stored once.
        }


def hydra_command(setup: DrafterOptions, config: HydraConfig) -> bool:
    """Train Hydra's heads, for `--draft hydra:OUT`: each one also reads the drafted tokens before it.

    paceline train hydra smollm2 --prompts mine=prompts.jsonl --generate 5000 --out build/hydra

    At the end the heads are measured on held-out answers, by depth and rank; slots.json has the trees that follow from
    that."""
    return train_head(setup.training(config), config)


@dataclass(frozen=True, kw_only=True)
class AmphistaConfig(OwnHeadsConfig):
    """The shape of Amphista's network."""

    encoder_ffn: bool = option(True, "Put a gated MLP into the encoder, after the attention.")

    def heads(self, teacher: Any) -> HeadsLoss:
        return AmphistaLoss(teacher, self)


class AmphistaLoss(HeadsLoss):
    """The causal layers over the whole text, then heads and encoder at the chosen positions."""

    kind = Amphista.name
    normed = False

    def __init__(self, teacher: Any, config: AmphistaConfig) -> None:
        super().__init__(teacher, config)
        shape, width = teacher.config, teacher.config.hidden_size
        self.stage1, self.stage2 = DecoderLayers(teacher, 1), DecoderLayers(teacher, 1)
        self.fusion2 = nn.Linear(2 * width, width, bias=False)  # It comes before stage 2.
        with torch.no_grad():
            self.fusion2.weight.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], 1))
        self.ffn = config.encoder_ffn
        inner = shape.intermediate_size if self.ffn else None
        self.network = JointHeads(config.depth, width, shape.num_attention_heads, inner, shape.rms_norm_eps)
        self.lm_heads = own_output_heads(teacher, config.depth) if config.own_heads else None

    def drafted(self, input_ids: Tensor, states: Tensor, at: Tensor) -> Tensor:
        read: Tensor = self.teacher.model.norm(self.network(self.adapted(input_ids, states).flatten(0, 1)[at]))
        return read

    def adapted(self, input_ids: Tensor, states: Tensor) -> Tensor:
        """The states [B, T, H] after both stages."""
        turns = self.turns(states)
        following = self.embedded(input_ids).roll(-1, 1)  # The last position gets a wrong token, but has no label.
        return self.stage2(self.fusion2(concat_scaled(self.stage1(states, turns), following)), turns)

    def facts(self) -> dict[str, Any]:
        own = self.lm_heads is not None
        return {"network": {"heads": self.depths, "encoder_ffn": self.ffn, "own_heads": own}}


def amphista_command(setup: DrafterOptions, config: AmphistaConfig) -> bool:
    """Train Amphista's network, for `--draft amphista:OUT`: heads that attend to each other, over their own layers.

    paceline train amphista smollm2 --prompts mine=prompts.jsonl --generate 5000 --out build/amphista

    At the end the heads are measured on held-out answers, by depth and rank; slots.json has the trees that follow from
    that."""
    return train_head(setup.training(config), config)


def tree_command(
    target: TargetName,
    heads: str = option(help="Heads to measure, as --draft names them, such as medusa:PATH.", argument=True),
    data: Path = option(help="JSON Lines of answers with their prompts.", exists=True, dir_okay=False),
    answers: int = option(200, "Largest number of answers to measure on.", least=1),
    threads: Threads = 1,
) -> None:
    """Measure heads by depth and rank, and write slots.json next to them: `tree=N` builds its trees from that file.

    paceline train tools tree smollm2 medusa:downloads/heads --data answers.jsonl

    Use it for heads that came without the file, or for text of another kind. `paceline train medusa`, `hydra` and
    `amphista` do the same when they end."""
    use_threads(threads)
    measure_folder(heads, target, data, answers)
