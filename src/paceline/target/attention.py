"""Decoder layers: norms, rotary positions, gates and attention over a ragged cache. Trained drafters use them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from paceline.engine.round import Segment
from paceline.target.cache import RaggedCache, Writer
from paceline.target.layout import Layout, plan
from paceline.target.linear import Linear, linear
from paceline.target.quantised.blocks import Blocks, tensors_of
from paceline.target.shape import Shape, layer_shapes


class TorchOps:
    """The elementwise steps of a layer in plain torch: the reference of `kernels/steps.py`, for any device and dtype.

    cos, sin  [positions, head_dim]; the first half of sin is negated, so that rotating is x * cos + swapped(x) * sin.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, eps: float):
        self.cos, self.sin, self.eps = cos, sin, eps

    def begin(self, layout: Layout) -> None:
        """Look up the rotary tables of this forward's positions, which all layers share."""
        self._cos = self.cos[layout.positions].unsqueeze(1)
        self._sin = self.sin[layout.positions].unsqueeze(1)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of x [N, H] with `weight` [H]."""
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta, both [N, H], and its RMS norm."""
        x = x + delta
        return x, self.norm(x, weight)

    def rotate(
        self, qkv: torch.Tensor, heads: int, kv_heads: int, qk_norm: torch.Tensor | None, cache: Writer, layer: int
    ) -> torch.Tensor:
        """The rotated queries [N, heads, D] of qkv [N, heads + 2 kv_heads, D]; writes keys and values to the cache.

        qk_norm  weights [heads + kv_heads, D] of an RMS norm of queries and keys before the rotation, or None."""
        qk = qkv[:, : heads + kv_heads]
        if qk_norm is not None:
            qk = F.rms_norm(qk, qk.shape[-1:], None, self.eps) * qk_norm
        qk = torch.addcmul(qk * self._cos, qk.roll(qk.shape[-1] // 2, -1), self._sin)
        cache.write(layer, qk[:, heads:], qkv[:, heads + kv_heads :])
        return qk[:, :heads]

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [N, M] from [N, 2 M]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up


def attend(queries: torch.Tensor, layout: Layout, cache: Writer, layer: int) -> torch.Tensor:
    """Attention of the packed queries [N, heads, head_dim] over their rows' caches; [N, heads * head_dim]."""
    if layout.paths is None and len(layout.groups) == 1 and layout.groups[0].gather is None:
        return _attend_group(queries, layout, cache, layer, 0)
    out = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
    if layout.paths is not None:
        from paceline.target.kernels.attention import attend_paths  # the first compilation takes seconds

        attend_paths(queries, layout.paths, cache, layer, out)
    for g, group in enumerate(layout.groups):
        if group.gather is None:
            out[group.begin : group.end] = _attend_group(queries[group.begin : group.end], layout, cache, layer, g)
        else:
            out[group.packed] = _attend_group(queries[group.gather], layout, cache, layer, g)[group.scatter]
    return out


def _attend_group(queries: torch.Tensor, layout: Layout, cache: Writer, layer: int, g: int) -> torch.Tensor:
    """Attention of the padded queries [slots * queries, heads, head_dim] of group g.

    Query heads that share a key head become queries of one head, so that torch reads its keys once."""
    group = layout.groups[g]
    keys, values = cache.read(layer, g)
    slots, kv_heads = keys.shape[:2]
    if group.is_long and group.mask is None and group.keys > group.queries:
        return _attend_piece(queries, keys, values)
    if group.is_long:
        q = queries.unsqueeze(0).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=group.mask, is_causal=group.mask is None, enable_gqa=q.shape[1] != kv_heads
        )
        return out.transpose(1, 2).reshape(queries.shape[0], -1)
    q = queries.view(slots, group.queries, kv_heads, -1, queries.shape[-1]).transpose(1, 2).flatten(2, 3)
    if group.mask is not None and q.shape[2] < group.mask.shape[2]:
        q = F.pad(q, (0, 0, 0, group.mask.shape[2] - q.shape[2]))
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask)
    out = out[:, :, : group.queries * (queries.shape[1] // kv_heads)]
    return out.unflatten(2, (group.queries, -1)).transpose(1, 2).reshape(queries.shape[0], -1)


def _attend_piece(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of a piece of a prompt on the CPU: queries [N, heads, head_dim], keys and values [1, kv_heads, n,
    head_dim].

    The n - N earlier tokens and, causally, its own are two calls. Their sums of exponentials say how to weigh them, so
    no mask of N times n numbers is needed."""
    nodes, heads, dim = queries.shape
    kv_heads, earlier = keys.shape[1], keys.shape[2] - nodes
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q = queries.transpose(0, 1)
    own = (one[:, :, earlier:].repeat_interleave(heads // kv_heads, 1) for one in (keys, values))
    near, near_sum = attention(q[None], *own, is_causal=True)
    # Query heads that share a key head are queries of one head, so that its keys are read once.
    grouped = q.reshape(1, kv_heads, -1, dim)
    far, far_sum = attention(grouped, keys[:, :, :earlier], values[:, :, :earlier])
    share = torch.sigmoid(far_sum.reshape(heads, nodes, 1) - near_sum.reshape(heads, nodes, 1))
    out = torch.lerp(near[0].to(share.dtype), far.reshape(heads, nodes, dim).to(share.dtype), share)
    return out.to(queries.dtype).transpose(0, 1).reshape(nodes, -1)


class Attention:
    """Rotary self-attention without the norm before it: out(attend(rotate(qkv(x)))).

    weights  "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight" (`attention_shapes`); and if present,
             their biases, "q_norm.weight" and "k_norm.weight"."""

    def __init__(self, weights: Mapping[str, torch.Tensor | Blocks], shape: Shape, ops: TorchOps):
        self.shape, self.ops = shape, ops
        vectors, dtype = tensors_of(weights), ops.cos.dtype
        self.qkv = _product(weights, ("q_proj", "k_proj", "v_proj"), dtype)
        self.out = _product(weights, ("o_proj",), dtype)
        self.qk_norm: torch.Tensor | None = None
        if "q_norm.weight" in vectors:
            q, k = vectors["q_norm.weight"], vectors["k_norm.weight"]
            self.qk_norm = torch.cat([q.expand(shape.num_heads, -1), k.expand(shape.num_kv_heads, -1)])

    def write(self, x: torch.Tensor, cache: Writer, layer: int) -> torch.Tensor:
        """Write keys and values of normed states x [N, H] to a layer of the cache; queries [N, heads, head_dim]."""
        s = self.shape
        qkv = self.qkv(x).view(-1, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        return self.ops.rotate(qkv, s.num_heads, s.num_kv_heads, self.qk_norm, cache, layer)

    def __call__(self, x: torch.Tensor, layout: Layout, cache: Writer, layer: int) -> torch.Tensor:
        """Attention [N, H] over normed states x [N, H]; writes keys and values to layer `layer` of the cache."""
        return self.out(attend(self.write(x, cache, layer), layout, cache, layer))


class Layer:
    """A decoder layer over the attention input x and the residual r: r + attention(x), then the gated MLP.

    weights  "self_attn." and a name of `Attention`'s, "mlp." and a name, "post_attention_layernorm.weight"."""

    def __init__(self, weights: Mapping[str, torch.Tensor | Blocks], shape: Shape, ops: TorchOps):
        start, dtype, norm = "self_attn.", ops.cos.dtype, weights["post_attention_layernorm.weight"]
        assert isinstance(norm, torch.Tensor)
        inner = {name.removeprefix(start): weight for name, weight in weights.items() if name.startswith(start)}
        self.ops, self.mlp_norm = ops, norm
        self.attention = Attention(inner, shape, ops)
        self.gate_up = _product(weights, ("mlp.gate_proj", "mlp.up_proj"), dtype)
        self.down = _product(weights, ("mlp.down_proj",), dtype)

    @property
    def products(self) -> tuple[Linear, ...]:
        """The matrix products, in order of computation."""
        return self.attention.qkv, self.attention.out, self.gate_up, self.down

    def make_exact(self, ops: TorchOps) -> None:
        """Give every product one order of sums; use `ops` for the other steps."""
        self.ops = self.attention.ops = ops
        self.attention.qkv, self.attention.out, self.gate_up, self.down = (one.exact() for one in self.products)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, layout: Layout, cache: Writer, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output as two summands, [N, H] each, which the next norm adds in its own pass.

        x  normed states [N, width]. layer: the layer's number in the cache."""
        residual, h = self.ops.add_norm(residual, self.attention(x, layout, cache, layer), self.mlp_norm)
        return residual, self.down(self.ops.gate(self.gate_up(h)))


def _product(weights: Mapping[str, torch.Tensor | Blocks], names: Sequence[str], dtype: torch.dtype) -> Linear:
    """One product with the matrices of these names, stacked, and their biases if any."""
    biases = [bias for name in names if isinstance(bias := weights.get(f"{name}.bias"), torch.Tensor)]
    return linear([weights[f"{name}.weight"] for name in names], torch.cat(biases) if biases else None, dtype)


def attention_shapes(shape: Shape, width: int | None = None) -> dict[str, tuple[int, ...]]:
    """Name and shape of the matrices of `Attention`. width: its input's, if not the hidden size."""
    names = {f"self_attn.{name}_proj.weight": f"{name}_proj.weight" for name in "qkvo"}
    return {names[name]: size for name, size in layer_shapes(shape, width).items() if name in names}


def begin(
    segments: Sequence[Segment],
    cache: RaggedCache,
    shape: Shape,
    ops: TorchOps,
    like: torch.Tensor,
    window: int | None = None,
) -> tuple[Layout, Writer]:
    """Plan a forward of layers with their own cache, and grow that cache if necessary.

    like  a tensor with the states' dtype and device. window: as in `plan`."""
    layout = plan(
        segments,
        [cache.length(segment.slot) for segment in segments],
        shared=shape.num_heads // shape.num_kv_heads,
        window=window,
        dtype=like.dtype,
        device=like.device,
        pieces=True,
    )
    ops.begin(layout)
    return layout, cache.writer(layout)
