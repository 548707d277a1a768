"""Amphista's heads: a few causal layers of their own, K heads, and an encoder in which the heads see each other.

Li et al. (NAACL 2025, arXiv 2406.13170); `paceline.draft.neural.networks` has the network and its switches. The
layers are causal over the text, the encoder is full over the K depths and never mixes two positions of the text, so one
forward trains all positions. Without layers, encoder and positions what is left is Medusa's heads, and one switch after
the other makes the ladder of docs/methods/amphista.md.

Doesn't know: how drafts are made or verified.

    paceline train amphista models/demo --data answers.jsonl --out build/amphista
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
import typer
from torch import Tensor, nn

from paceline.draft.amphista import Amphista
from paceline.draft.neural.networks import (
    First,
    JointHeads,
    Mlp,
    Positions,
    Second,
    Sight,
    Switches,
    Tap,
    concat_scaled,
)
from paceline.train import options
from paceline.train.heads import HeadsConfig, HeadsLoss, Teacher, prepare, train_heads
from paceline.train.layers import DecoderLayers
from paceline.train.medusa import own_output_heads
from paceline.train.plan import LoopConfig

Start = Literal["zeros", "target"]
Fusion = Literal["identity", "random"]


@dataclass(frozen=True, kw_only=True)
class AmphistaConfig(HeadsConfig):
    """What a batch is made of, what of it is learnt, the network, and what it begins as."""

    switches: Switches = field(default_factory=Switches)
    layers_begin: Start = "zeros"  # output projections at 0, or copies of the target's last layers
    fusion_begins: Fusion = "identity"  # the projection of state and token: [I ; 0], or random
    positions_begin: float = 0.0  # standard deviation of the learnt positions


class AmphistaLoss(HeadsLoss):
    """Adaptation over the whole text, then heads and encoder at the chosen positions."""

    def __init__(self, teacher: Teacher, config: AmphistaConfig) -> None:
        super().__init__(teacher, config)
        s, shape = config.switches, teacher.config
        self.switches = s
        self.normed = s.tap == "post_norm"
        copied, inner = config.layers_begin == "target", shape.intermediate_size
        self.stage1 = DecoderLayers(teacher.model, s.stage1_layers, copied)
        self.stage2 = DecoderLayers(teacher.model, s.stage2_layers, copied)
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
        return self.teacher.norm(read) if self.switches.tap == "pre_norm" else read

    def adapted(self, input_ids: Tensor, states: Tensor) -> Tensor:
        """The states [B, T, H] after both stages."""
        s, turns = self.switches, self.teacher.turns(states)
        own = self.teacher.embedding(input_ids)
        following = own.roll(-1, 1)  # the last one is wrong, and no label comes after it
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


def fusion(width: int, begins: Fusion) -> nn.Linear:
    """A projection of a state and a token's embedding, [.., 2 H] to [.., H], without bias."""
    linear = nn.Linear(2 * width, width, bias=False)
    if begins == "identity":
        with torch.no_grad():
            linear.weight.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], 1))
    return linear


def train_amphista(
    target: Path,
    answers: Path,
    out: Path,
    run: Path,
    loop: LoopConfig,
    config: AmphistaConfig = AmphistaConfig(),
    states: Path | None = None,
) -> bool:
    """Train the network for the model in `target` on `answers` (a file of `generated_rows`); writes `out` in bfloat16,
    for `amphista:PATH`. False when interrupted; the same call goes on."""
    facts = {"network": asdict(config.switches)}

    def make(teacher: Teacher) -> HeadsLoss:
        return AmphistaLoss(teacher, config)

    return train_heads(Amphista.name, target, answers, out, run, loop, config, make, facts, states)


@dataclass
class SwitchOptions:
    """The network's switches on the command line."""

    tap: Annotated[str, typer.Option(help="The target's state: pre_norm or post_norm.")] = "pre_norm"
    stage1_layers: Annotated[int, typer.Option(help="Causal layers over the states; 0: none.", min=0)] = 1
    stage1_input: Annotated[str, typer.Option(help="What they read: state, state+token, state+next.")] = "state"
    stage2_layers: Annotated[int, typer.Option(help="Causal layers after them; 0: none.", min=0)] = 1
    stage2_input: Annotated[str, typer.Option(help="How the token after a state comes in: concat, add, none.")] = (
        "concat"
    )
    mlp: Annotated[str, typer.Option(help="The heads: residual (Medusa's) or swiglu.")] = "residual"
    positions: Annotated[str, typer.Option(help="Of the encoder: learnt, sinusoidal, rotary, none.")] = "learnt"
    encoder_layers: Annotated[
        int, typer.Option(help="Blocks of the encoder; 0: heads do not see each other.", min=0)
    ] = 1
    encoder_ffn: Annotated[bool, typer.Option(help="A gated MLP in each of its blocks.")] = True
    encoder_sight: Annotated[str, typer.Option(help="What a position of it sees: full or causal.")] = "full"
    own_heads: Annotated[bool, typer.Option("--own-heads", help="An output head for each depth.")] = False

    def switches(self, heads: int) -> Switches:
        """MethodError for a value that is not one."""
        return Switches(
            heads=heads,
            tap=cast(Tap, self.tap),
            stage1_layers=self.stage1_layers,
            stage1_input=cast(First, self.stage1_input),
            stage2_layers=self.stage2_layers,
            stage2_input=cast(Second, self.stage2_input),
            mlp=cast(Mlp, self.mlp),
            positions=cast(Positions, self.positions),
            encoder_layers=self.encoder_layers,
            encoder_ffn=self.encoder_ffn,
            encoder_sight=cast(Sight, self.encoder_sight),
            own_heads=self.own_heads,
        )


@options.with_options
def command(
    setup: options.DrafterOptions,
    heads: options.HeadOptions,
    network: SwitchOptions,
    layers_begin: Annotated[
        str, typer.Option(help="The causal layers begin as: zeros, or target, its last ones.")
    ] = "zeros",
    fusion_begins: Annotated[
        str, typer.Option(help="The projection of state and token: identity or random.")
    ] = "identity",
    positions_begin: Annotated[float, typer.Option(help="Standard deviation of the learnt positions.", min=0)] = 0.0,
) -> bool:
    """Train Amphista's network, for `--draft amphista:OUT`: heads that see each other, over layers of their own.

    paceline train amphista models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/amphista

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end the
    heads are measured on held-out answers, by depth and rank; slots.json has the trees that follow from that.
    """
    for name, value, kind in (
        ("--layers-begin", layers_begin, ("zeros", "target")),
        ("--fusion-begins", fusion_begins, ("identity", "random")),
    ):
        options.one_of(name, value, kind)
    switches = network.switches(heads.heads)
    target, answers, out, run, loop, of_heads = prepare(setup, heads)
    config = AmphistaConfig(
        **vars(of_heads),
        switches=switches,
        layers_begin=cast(Start, layers_begin),
        fusion_begins=cast(Fusion, fusion_begins),
        positions_begin=positions_begin,
    )
    return train_amphista(target, answers, out, run, loop, config, heads.states)
