"""Amphista's heads: causal layers of their own, K heads, and an encoder in which the heads attend to each other.

Li et al. (NAACL 2025, arXiv 2406.13170). The layers are causal over the text. The encoder attends over the K depths of
one position, never across positions, so one forward trains all positions. docs/methods/amphista.md measures what each
part brings."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.draft.methods.amphista import Amphista
from paceline.draft.models.networks import JointHeads, concat_scaled
from paceline.draft.spec import option
from paceline.train.heads import HeadsConfig, HeadsLoss, own_output_heads
from paceline.train.layers import DecoderLayers
from paceline.train.trainer import head_command


@dataclass(frozen=True, kw_only=True)
class AmphistaConfig(HeadsConfig):
    """Train Amphista's network, for `--draft amphista:OUT`: heads that attend to each other, over their own layers.

    paceline train amphista smollm2 --prompts mine=prompts.jsonl --generate 5000 --out build/amphista

    At the end the heads are measured on held-out answers, by depth and rank; slots.json has the trees that follow from
    that."""

    encoder_ffn: bool = option(True, "Put a gated MLP into the encoder, after the attention.")
    own_heads: bool = option(
        False, "Give each head its own output head; output heads are then most of the size.", names=("--own-heads",)
    )

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
        self.fusion2 = nn.Linear(2 * width, width, bias=False)  # before stage 2
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
        following = self.embedded(input_ids).roll(-1, 1)  # the last position gets a wrong token, but has no label
        return self.stage2(self.fusion2(concat_scaled(self.stage1(states, turns), following)), turns)

    def facts(self) -> dict[str, Any]:
        own = self.lm_heads is not None
        return {"network": {"heads": self.depths, "encoder_ffn": self.ffn, "own_heads": own}}


command = head_command(AmphistaConfig)
