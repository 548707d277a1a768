"""Networks of draft heads: residual blocks between the target's state and an output head.

Cai et al. 2024, "Medusa" (arXiv 2401.10774, section 2.1.1): head k is x + SiLU(W x + b), repeated, then an output head.
W begins at 0, so that an untrained head predicts what the target's own head does. Here b begins at 0, too; the authors'
b is random. Parameters have the names of the authors' files."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from paceline.errors import MethodError
from paceline.formats.facts import Facts
from paceline.kernels.blocks import Blocks, WeightsByName
from paceline.kernels.linear import linear


class ResBlock(nn.Module):
    """x + SiLU(W x + b), [..., width]. An input of another width is projected: A x + SiLU(W x + b), as in the first
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
    """K heads over the same state, of `layers` blocks each. Parameters are called `{head}.{layer}.linear.weight`."""

    def __init__(self, heads: int, layers: int, width: int) -> None:
        super().__init__(nn.Sequential(*(ResBlock(width) for _ in range(layers))) for _ in range(heads))


# Grounded heads: each head reads the drafted tokens before it, so the tree is drafted level by level.

PREFIX = "prefix_embeding_layer"  # The authors' files misspell the prefix layer's name.


class GroundedHeads(nn.Module):
    """K heads of `layers` blocks. Head k's first block begins as the identity on the state, so an untrained head
    predicts what the target's own head does.

    tied  the blocks after the first are the same block, run again and again, as in the authors' heads."""

    def __init__(self, heads: int, layers: int, width: int, tied: bool = True) -> None:
        super().__init__()
        self.width = width
        self.hydra_mlp = nn.ModuleList(_head(k, layers, width, tied) for k in range(heads))

    def __len__(self) -> int:
        return len(self.hydra_mlp)

    def forward(self, k: int, state: Tensor, tokens: Sequence[Tensor]) -> Tensor:
        """Run head k over a state [N, width] and the embeddings [N, width] of the k + 1 tokens that follow it. Returns
        the input [N, width] of its output head."""
        y: Tensor = self.hydra_mlp[k](torch.cat([state, *tokens], -1))
        return y


def _head(k: int, layers: int, width: int, tied: bool) -> nn.Sequential:
    first = ResBlock(width, (k + 2) * width)
    connection = first.res_connection
    assert isinstance(connection, nn.Linear)
    with torch.no_grad():  # This gives the state, without the tokens.
        connection.weight.zero_()
        connection.weight[:, :width].copy_(torch.eye(width))
        connection.bias.zero_()
    again = ResBlock(width)
    rest = [again if tied else ResBlock(width) for _ in range(layers - 1)]
    return nn.Sequential(first, *rest)


# Heads that see each other: residual heads over the same state, and a bidirectional encoder over their K positions.


def concat_scaled(states: Tensor, embedded: Tensor) -> Tensor:
    """Concatenate states and tokens' embeddings, both [..., H], to [..., 2 H].

    Each embedding is scaled to its state's root mean square. Embeddings are tens of times smaller than states before
    the final norm, so a projection of both would hardly learn from unscaled embeddings."""
    sizes = [side.float().square().mean(-1, keepdim=True).sqrt() for side in (states, embedded)]
    scale = sizes[0] / sizes[1].clamp_min(1e-6)
    return torch.cat([states, embedded * scale.to(embedded.dtype)], -1)


class JointHeads(nn.Module):
    """`count` heads over a state, and an encoder over their positions.

    width  width of the states. heads: number of the encoder's attention heads. eps: epsilon of its norms.
    inner  width of the gated MLP after its attention; None: it has no MLP."""

    def __init__(self, count: int, width: int, heads: int, inner: int | None, eps: float) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(ResBlock(width) for _ in range(count))
        self.position_embedding = nn.Embedding(count, width)
        nn.init.zeros_(self.position_embedding.weight)
        self.encoder = nn.Sequential(EncoderBlock(width, heads, inner, eps))

    def forward(self, z: Tensor) -> Tensor:
        """Run all heads over states [N, width]. Returns the input [N, count, width] of final norm and output head."""
        read: Tensor = self.encoder(torch.stack([mlp(z) for mlp in self.mlps], 1) + self.position_embedding.weight)
        return read


class EncoderBlock(nn.Module):
    """Attention over all K positions, then a gated MLP. Each reads a norm of its input, and is added to its input."""

    def __init__(self, width: int, heads: int, inner: int | None, eps: float) -> None:
        super().__init__()
        if width % heads:
            raise MethodError(f"{heads} attention heads do not divide a width of {width}")
        self.heads = heads
        self.input_norm = nn.RMSNorm(width, eps)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        nn.init.zeros_(self.o_proj.weight)
        self.ffn = None if inner is None else Gated(width, inner, eps)

    def forward(self, u: Tensor) -> Tensor:
        """Run the block over u [N, K, width]. Returns the same shape."""
        h = self.input_norm(u)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        u = u + self.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return u if self.ffn is None else self.ffn(u)


class Gated(nn.Module):
    """x + down(SiLU(gate(h)) * up(h)), where h is a norm of x. `down` begins at 0."""

    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y: Tensor = x + self.down_proj(silu(self.gate_proj(h)) * self.up_proj(h))
        return y


# Loading -------------------------------------------------------------------------------------------------------------


def load_module(module: nn.Module, weights: WeightsByName, target: Facts) -> Any:
    """Load these weights into `module`, on the target's device. Linear layers with weights in blocks become
    `Product`s."""
    names = module.state_dict().keys()
    own = {name: w for name, w in weights.items() if name in names}
    dense = {name: w.dense(target.dtype) if isinstance(w, Blocks) else w for name, w in own.items()}
    module.load_state_dict(dense, strict=False)
    module = module.to(target.device, target.dtype).eval().requires_grad_(False)
    for name, inner in list(module.named_modules()):
        blocks = weights.get(f"{name}.weight")
        if isinstance(inner, nn.Linear) and isinstance(blocks, Blocks):
            above, _, last = name.rpartition(".")
            setattr(module.get_submodule(above), last, Product(blocks, inner.bias, target.dtype))
    return module


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the module's parameters."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


class Product(nn.Module):
    """`nn.Linear` over blocks: [..., inputs] to [..., outputs]."""

    def __init__(self, blocks: Blocks, bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.product = linear([blocks], bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
