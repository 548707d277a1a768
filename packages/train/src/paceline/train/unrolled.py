"""Heads over the target's states in training: unrolled over whole texts, reading their own output.

At step 0 every position reads the target's states; at step s it reads its own prediction of step s - 1, as a drafter
does s tokens deep in a draft. Position t attends to the keys of step 0 up to t, and to its own keys of steps 1 to s
(the training-time test of EAGLE-3, Li et al. 2025, arXiv 2503.01840, section 3.2). That is a draft below every position
of a text at once, or only below those that are trained on: of the others, such as prompts, only keys and values are
computed.

Parameters are named as in published files: "fc.weight", "layers.0.self_attn.q_proj.weight"."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from paceline.formats.shape import Shape
from paceline.train.layers import BLOCK, layer_config


class Memory:
    """The keys and values [B, kv_heads, T, head_dim] of every step so far; step 0 is the true text.

    at  int64 [N], ascending: the positions of the text below which something is drafted; None: all. A later step has
        fewer, the first of them."""

    def __init__(self, at: Tensor | None = None) -> None:
        self.at, self.steps = at, list[tuple[Tensor, Tensor]]()

    def drafting(self, x: Tensor, dim: int = 1) -> Tensor:
        """The part of x that drafts. Before step 0 its dimension `dim` is the text, afterwards it is that part."""
        return x if self.at is None or self.steps or len(self.at) == x.shape[dim] else x.index_select(dim, self.at)


def begin_as_last(linear: nn.Linear) -> None:
    """Begin a projection of several states side by side as the identity on the last of them."""
    size, inputs = linear.weight.shape
    with torch.no_grad():
        linear.weight.copy_(torch.eye(size, inputs).roll(inputs - size, 1))


def attend(q: Tensor, k: Tensor, v: Tensor, memory: Memory, scale: float) -> Tensor:
    """Attention [B, heads, N, head_dim] of one step's queries, whose keys and values are added to the memory.

    One softmax over the text's keys up to a position and the position's own keys of later steps. In blocks of
    positions: fewer keys, and scores that stay in a processor's cache."""
    memory.steps.append((k, v))
    count, groups = q.shape[2], q.shape[1] // k.shape[1]
    if len(memory.steps) == 1 and count == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    q = q * scale
    keys, values = ([part.repeat_interleave(groups, 1) for part in parts] for parts in zip(*memory.steps, strict=True))
    places = torch.arange(count, device=q.device) if memory.at is None else memory.at[:count]
    parts = []
    for start in range(0, count, BLOCK):
        block = slice(start, min(start + BLOCK, count))
        here, end = q[:, :, block], int(places[block][-1]) + 1
        future = torch.arange(end, device=q.device) > places[block, None]
        text = (here @ keys[0][:, :, :end].transpose(-1, -2)).masked_fill(future, -torch.inf)
        own = [(here * key[:, :, block]).sum(-1, keepdim=True) for key in keys[1:]]
        weights = torch.cat([text, *own], -1).softmax(-1, torch.float32).to(q.dtype)
        seen = weights[..., :end] @ values[0][:, :, :end]
        for number, value in enumerate(values[1:]):
            seen = seen + weights[..., end + number, None] * value[:, :, block]
        parts.append(seen)
    return torch.cat(parts, 2)


class UnrolledAttention(nn.Module):
    """Rotary attention without norms. width: of its input."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, q, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden_size, bias=False)
        nn.init.zeros_(self.o_proj.weight)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, memory: Memory) -> Tensor:
        """x [B, T, width] of one step -> [B, N, H] where it drafts; adds the step's keys and values to `memory`.

        cos, sin [T, head_dim] of `rotary_tables`, for the positions of this step."""
        q, k, v = (
            part(given).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for part, given in ((self.q_proj, memory.drafting(x)), (self.k_proj, x), (self.v_proj, x))
        )
        q, k = turned(q, memory.drafting(cos, 0), memory.drafting(sin, 0)), turned(k, cos, sin)
        seen = attend(q, k, v, memory, self.shape.head_dim**-0.5)
        y: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return y


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, head_dim], turned to its positions."""
    return x * cos.to(x) + x.roll(x.shape[-1] // 2, -1) * sin.to(x)


class UnrolledLayer(nn.Module):
    """A decoder layer over the attention input x and the residual r: r + attention(x), then the gated MLP.

    norms  names of norms for a head to apply before the layer."""

    def __init__(self, shape: Shape, width: int, norms: Sequence[str] = ()) -> None:
        super().__init__()
        self.self_attn = UnrolledAttention(shape, width)
        self.mlp = LlamaMLP(layer_config(shape))
        nn.init.zeros_(self.mlp.down_proj.weight)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.eps)
        for name in norms:
            self.add_module(name, nn.RMSNorm(shape.hidden_size, shape.eps))

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, memory: Memory) -> Tensor:
        residual = memory.drafting(residual)
        residual = residual + self.self_attn(x, cos, sin, memory)
        y: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return y


class Unrolled(nn.Module):
    """A head in training. A subclass makes features of the target's states (`first`) and runs one step (`step`)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, tables: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.register_buffer("cos", tables[0], persistent=False)
        self.register_buffer("sin", tables[1], persistent=False)

    def first(self, taps: Tensor) -> Tensor:
        """The features of step 0, [B, T, H], from the target's states."""
        return taps

    def step(
        self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        """From embeddings and features, [B, T, H] each: (the next step's features, inputs of the output head), each
        [B, N, H], where it drafts."""
        raise NotImplementedError

    def unroll(
        self, taps: Tensor, ids: Tensor, table: Tensor, steps: int, at: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Inputs of the output head at every step: position t of step s predicts token t + 2 + s. [B, T - 1 - s, H], or
        [B, N, H] of the first N positions of `at`, those below T - 1 - s.

        taps [B, T, ...]: the target's states of the tokens ids [B, T]. table [V, H]: token embeddings.
        at int64, ascending: the positions below which it drafts; None: all."""
        last = ids.shape[1] - 1
        places = torch.arange(last, device=ids.device)
        at = places if at is None else at[at < last]
        features, tokens, memory = self.first(taps)[:, :last], ids[:, 1:], Memory(at)
        for step in range(steps):
            features, read = self.step(
                F.embedding(tokens, table), features, self.cos[places], self.sin[places], memory
            )
            yield read
            at = at[at < last - step - 1]
            features, tokens, places = features[:, : len(at)], ids[:, at + step + 2], at + step + 1
