"""Amphista's heads: causal layers of their own, K heads, and an encoder in which the heads attend to each other.

Li et al. (NAACL 2025, arXiv 2406.13170). `paceline.draft.models.networks` has the network and its switches. The layers
are causal over the text. The encoder attends over the K depths of one position, never across positions, so one forward
trains all positions. Without layers, encoder and positions the network is Medusa's heads; docs/methods/amphista.md
measures the switches one after another."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.draft.methods.amphista import Amphista
from paceline.draft.models.networks import JointHeads, Switches, concat_scaled
from paceline.draft.spec import option
from paceline.train.heads import HeadsConfig, HeadsLoss, own_output_heads
from paceline.train.layers import DecoderLayers
from paceline.train.trainer import head_command

Fusion = Literal["identity", "random"]


@dataclass(frozen=True, kw_only=True)
class AmphistaConfig(HeadsConfig):
    """Train Amphista's network, for `--draft amphista:OUT`: heads that attend to each other, over their own layers.

    paceline train amphista smollm2 --prompts mine=prompts.jsonl --generate 5000 --out build/amphista

    At the end the heads are measured on held-out answers, by depth and rank; slots.json has the trees that follow from
    that."""

    switches: Switches = field(default_factory=Switches)
    layers_begin: Literal["zeros", "target"] = option(
        "zeros", "Initial causal layers: without effect (zeros), or copies of the target's last ones."
    )
    fusion_begins: Fusion = option("identity", "Initial projection of state and token: [I ; 0] or random.")
    positions_begin: float = option(0.0, "Standard deviation of the initial learnt positions.", least=0)

    def heads(self, teacher: Any) -> HeadsLoss:
        return AmphistaLoss(teacher, self)


class AmphistaLoss(HeadsLoss):
    """The causal layers over the whole text, then heads and encoder at the chosen positions."""

    kind = Amphista.name

    def __init__(self, teacher: Any, config: AmphistaConfig) -> None:
        super().__init__(teacher, config)
        s, shape = replace(config.switches, heads=config.depth), teacher.config
        self.switches = s
        self.normed = s.tap == "post_norm"
        copied, inner = config.layers_begin == "target", shape.intermediate_size
        self.stage1 = DecoderLayers(teacher, s.stage1_layers, copied)
        self.stage2 = DecoderLayers(teacher, s.stage2_layers, copied)
        width = shape.hidden_size
        first = bool(s.stage1_layers) and s.stage1_input != "state"
        second = bool(s.stage2_layers) and s.stage2_input == "concat"
        self.fusion1 = fusion(width, config.fusion_begins) if first else None
        self.fusion2 = fusion(width, config.fusion_begins) if second else None
        self.network = JointHeads(s, width, shape.num_attention_heads, inner, shape.rms_norm_eps)
        if s.positions == "learnt" and config.positions_begin:
            nn.init.normal_(self.network.position_embedding.weight, std=config.positions_begin)
        self.lm_heads = own_output_heads(teacher, s.heads) if s.own_heads else None

    def drafted(self, input_ids: Tensor, states: Tensor, at: Tensor) -> Tensor:
        z = self.adapted(input_ids, states).flatten(0, 1)[at]
        read: Tensor = self.network(z)
        return self.teacher.model.norm(read) if self.switches.tap == "pre_norm" else read

    def adapted(self, input_ids: Tensor, states: Tensor) -> Tensor:
        """The states [B, T, H] after both stages."""
        s, turns = self.switches, self.turns(states)
        own = self.embedded(input_ids)
        following = own.roll(-1, 1)  # the last position gets a wrong token, but has no label
        if self.fusion1 is not None:
            states = self.fusion1(concat_scaled(states, own if s.stage1_input == "state+token" else following))
        states = self.stage1(states, turns)
        if s.stage2_layers:
            if self.fusion2 is not None:
                states = self.fusion2(concat_scaled(states, following))
            elif s.stage2_input == "add":
                states = states + following
            states = self.stage2(states, turns)
        return states

    def facts(self) -> dict[str, Any]:
        return {"network": asdict(self.switches)}


def fusion(width: int, begins: Fusion) -> nn.Linear:
    """A linear layer without bias from a state and a token's embedding, [..., 2 H], to [..., H]."""
    linear = nn.Linear(2 * width, width, bias=False)
    if begins == "identity":
        with torch.no_grad():
            linear.weight.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], 1))
    return linear


command = head_command(AmphistaConfig)
