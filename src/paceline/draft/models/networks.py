"""Residual blocks: what draft heads put between the target's state and an output head.

Cai et al. 2024, "Medusa" (arXiv 2401.10774, section 2.1.1): head k is x + SiLU(W x + b), repeated, then an output head.
W begins at 0, so that an untrained head says what the target's own head says. So does b here; the authors leave it
random. Names of the parameters are those of their files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from paceline.draft.spec import Options, option
from paceline.errors import MethodError


class ResBlock(nn.Module):
    """x + SiLU(W x + b), [..., width]. An input of another width is projected: A x + SiLU(W x + b), which is the first
    block of Hydra's heads (Ankner et al. 2024, arXiv 2402.05109)."""

    def __init__(self, width: int, inputs: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs or width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection = nn.Identity() if inputs is None else nn.Linear(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.res_connection(x) + silu(self.linear(x))
        return y


class ResidualHeads(nn.ModuleList):
    """K heads of `layers` blocks each over one state. Parameters are called `{head}.{layer}.linear.weight`."""

    def __init__(self, heads: int, layers: int, width: int) -> None:
        super().__init__(nn.Sequential(*(ResBlock(width) for _ in range(layers))) for _ in range(heads))


# Grounded heads: each one reads the drafted tokens before it, so the tree is drafted level by level.

PREFIX = "prefix_embeding_layer"  # what the authors' files call the prefix layer, misspelt as there


class GroundedHeads(nn.Module):
    """K heads of `layers` blocks. Head k's first block begins as the identity on the state, so an untrained head says
    what the target's own head says.

    tied  the blocks after the first are one block, run again and again, as the authors' are."""

    def __init__(self, heads: int, layers: int, width: int, tied: bool = True) -> None:
        super().__init__()
        self.width = width
        self.hydra_mlp = nn.ModuleList(_head(k, layers, width, tied) for k in range(heads))

    def __len__(self) -> int:
        return len(self.hydra_mlp)

    def forward(self, k: int, state: Tensor, tokens: Sequence[Tensor]) -> Tensor:
        """What head k's output head reads, [N, width], from a state [N, width] and the embeddings [N, width] of the
        k + 1 tokens that follow it."""
        y: Tensor = self.hydra_mlp[k](torch.cat([state, *tokens], -1))
        return y


def _head(k: int, layers: int, width: int, tied: bool) -> nn.Sequential:
    first = ResBlock(width, (k + 2) * width)
    connection = first.res_connection
    assert isinstance(connection, nn.Linear)
    with torch.no_grad():  # the state itself, and nothing of the tokens
        connection.weight.zero_()
        connection.weight[:, :width].copy_(torch.eye(width))
        connection.bias.zero_()
    again = ResBlock(width)
    rest = [again if tied else ResBlock(width) for _ in range(layers - 1)]
    return nn.Sequential(first, *rest)


# Heads that see each other: residual heads over one state, and a bidirectional encoder over their K positions.

Tap = Literal["pre_norm", "post_norm"]
First = Literal["state", "state+token", "state+next"]
Second = Literal["concat", "add", "none"]
Mlp = Literal["residual", "swiglu"]
Positions = Literal["learnt", "sinusoidal", "rotary", "none"]
Sight = Literal["full", "causal"]


def concat_scaled(states: Tensor, embedded: Tensor) -> Tensor:
    """States and tokens' embeddings, both [..., H], one after the other, [..., 2 H].

    Each embedding is scaled to its state's root mean square: embeddings are tens of times smaller than states before
    the final norm, and a projection of both would hardly learn from them."""
    sizes = [side.float().square().mean(-1, keepdim=True).sqrt() for side in (states, embedded)]
    scale = sizes[0] / sizes[1].clamp_min(1e-6)
    return torch.cat([states, embedded * scale.to(embedded.dtype)], -1)


@dataclass(frozen=True)
class Switches(Options):
    """What the network is made of; all but `heads` are options of training. MethodError for a value that is not one.

    heads  K. A target's state before its final norm (`tap`) gets the norm before the output head."""

    heads: int = field(default=4, metadata={"least": 1})
    tap: Tap = option("pre_norm", "State of the target that the heads read.")
    stage1_layers: int = option(1, "Causal layers over the states; 0: none.", least=0)
    stage1_input: First = option("state", "Input of these layers: the state, or with its own token or the one after.")
    stage2_layers: int = option(1, "Causal layers after them; 0: none, and no sampled token.", least=0)
    stage2_input: Second = option("concat", "How the token after a state is joined to it.")
    mlp: Mlp = option("residual", "The heads: Medusa's block, or a gated one of two layers.")
    positions: Positions = option("learnt", "Position embeddings of the encoder.")
    encoder_layers: int = option(1, "Blocks of the encoder; 0: heads do not attend to each other.", least=0)
    encoder_ffn: bool = option(True, "A gated MLP in each block of the encoder, after the attention.")
    encoder_sight: Sight = option("full", "Depths that a depth attends to in the encoder: all, or those up to itself.")
    own_heads: bool = option(False, "An output head for each depth, instead of the target's.", names=("--own-heads",))

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value, choices = getattr(self, name), get_args(kind)
            if value not in choices if choices else type(value) is not kind:
                wanted = f"one of {', '.join(choices)}" if choices else f"of type {kind.__name__}"
                raise MethodError(f"{name} is {value!r}; it must be {wanted}")
        super().__post_init__()  # the ranges

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """From config.json; MethodError if one is missing or wrong."""
        names = [known.name for known in fields(cls)]
        if missing := [name for name in names if name not in config]:
            raise MethodError(f"config.json lacks {', '.join(missing)}")
        return cls(**{name: config[name] for name in names})


class JointHeads(nn.Module):
    """K heads over a state, and the encoder over their K positions.

    width  of the states; heads: attention heads of the encoder; inner: width of its gated MLP; eps: of its norms."""

    def __init__(self, switches: Switches, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.switches = switches
        self.mlps = nn.ModuleList(
            ResBlock(width) if switches.mlp == "residual" else Gated(width, width) for _ in range(switches.heads)
        )
        if switches.positions == "learnt":
            self.position_embedding = nn.Embedding(switches.heads, width)
            nn.init.zeros_(self.position_embedding.weight)
        elif switches.positions == "sinusoidal":
            self.register_buffer("sinusoids", _sinusoids(switches.heads, width), persistent=False)
        self.encoder = nn.ModuleList(
            EncoderBlock(switches, width, heads, inner, eps) for _ in range(switches.encoder_layers)
        )

    def forward(self, z: Tensor) -> Tensor:
        """States [N, width] to what the final norm and the output head read, [N, K, width]."""
        u = torch.stack([mlp(z) for mlp in self.mlps], 1)
        if self.switches.positions == "learnt":
            u = u + self.position_embedding.weight
        elif self.switches.positions == "sinusoidal":
            u = u + self.sinusoids.to(u)  # type: ignore[operator]
        for block in self.encoder:
            u = block(u)
        return u


class EncoderBlock(nn.Module):
    """Attention over the K positions, then a gated MLP, each on a norm of what is before it and added to that."""

    def __init__(self, switches: Switches, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        if width % heads:
            raise MethodError(f"{heads} attention heads do not divide a width of {width}")
        self.heads, self.causal = heads, switches.encoder_sight == "causal"
        self.input_norm = nn.RMSNorm(width, eps)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        nn.init.zeros_(self.o_proj.weight)
        self.ffn = Gated(width, inner, eps) if switches.encoder_ffn else None
        self._turns = _turns(switches.heads, width // heads) if switches.positions == "rotary" else None

    def forward(self, u: Tensor) -> Tensor:
        """[N, K, width], the same."""
        h = self.input_norm(u)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self._turns is not None:
            cos, sin = (table.to(q) for table in self._turns)
            q, k = (x * cos + x.roll(x.shape[-1] // 2, -1) * sin for x in (q, k))
        seen = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        u = u + self.o_proj(seen.transpose(1, 2).flatten(2))
        return u if self.ffn is None else self.ffn(u)


class Gated(nn.Module):
    """x + down(SiLU(gate(x)) * up(x)), over a norm of x if `eps` is given; `down` begins at 0."""

    def __init__(self, width: int, inner: int, eps: float | None = None) -> None:
        super().__init__()
        self.norm = nn.Identity() if eps is None else nn.RMSNorm(width, eps)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y: Tensor = x + self.down_proj(silu(self.gate_proj(h)) * self.up_proj(h))
        return y


def _angles(positions: int, width: int) -> Tensor:
    inverse = 10000.0 ** -(torch.arange(0, width, 2).float() / width)
    return torch.outer(torch.arange(positions).float(), inverse)


def _sinusoids(positions: int, width: int) -> Tensor:
    """Vaswani et al. 2017, section 3.5, scaled to the size of an embedding; [positions, width]."""
    angle = _angles(positions, width)
    return 0.02 * torch.cat([angle.sin(), angle.cos()], -1)


def _turns(positions: int, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin, [positions, width], of rotary positions; the first half of sin is negated."""
    angle = _angles(positions, width)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
