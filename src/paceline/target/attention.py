"""Decoder layers: norms, rotary positions, gates and attention over a ragged cache. Trained drafters use them too."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from paceline.core.segment import Segment
from paceline.formats.shape import (
    BESIDE_GATE,
    BESIDE_NORM,
    BESIDE_OUT,
    CHOICE,
    OF_EXPERTS,
    ROUTER,
    SHARED_GATE,
    LayerKind,
    Shape,
    layer_shapes,
)
from paceline.kernels.blocks import Blocks, WeightsByName, tensors_of, within
from paceline.kernels.linear import Linear, stacked
from paceline.kernels.ops import Pair, TorchOps
from paceline.target.cache import RaggedCache, Writer
from paceline.target.layout import SHARED_QUERIES, Layout, plan
from paceline.target.parts import LayerPart


def attend(
    queries: torch.Tensor, kv_heads: int, layout: Layout, cache: Writer, layer: int, window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of the packed queries [N, heads, head_dim] over their rows' caches. Returns [N, heads * head_dim].

    kv_heads  number of key heads. window: the layer's window, as in `plan`. sinks: as in `attend_paths`."""
    calls = layout.calls(window)
    if layout.paths is None and len(calls) == 1 and layout.groups[calls[0]].gather is None:
        return _attend_group(queries, kv_heads, layout, cache, layer, calls[0], sinks)
    out = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
    if layout.paths is not None:
        from paceline.kernels.attention import attend_paths  # The decoder has compiled it.

        attend_paths(queries, kv_heads, layout.paths.scores, cache, layer, out, window, sinks)
    for g in calls:
        group = layout.groups[g]
        if group.gather is None:
            own = slice(group.begin, group.end)
            out[own] = _attend_group(queries[own], kv_heads, layout, cache, layer, g, sinks)
        else:
            padded = _attend_group(queries[group.gather], kv_heads, layout, cache, layer, g, sinks)
            out[group.packed] = padded[group.scatter]
    return out


def _attend_group(
    queries: torch.Tensor, kv_heads: int, layout: Layout, cache: Writer, layer: int, g: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of the padded queries [slots * queries, heads, head_dim] of group g.

    Query heads that share a key head become queries of a single head, so that torch reads its keys once."""
    group = layout.groups[g]
    keys, values = cache.read(layer, g, (kv_heads, queries.shape[2]))
    slots = len(keys)
    if group.is_long and group.mask is None and group.keys > group.queries:
        return _attend_piece(queries, keys, values, sinks)
    if group.is_long:
        q = queries.unsqueeze(0).transpose(1, 2)
        if sinks is None:
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=group.mask, is_causal=group.mask is None, enable_gqa=q.shape[1] != kv_heads
            )
        else:
            shared = q.shape[1] // kv_heads
            keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
            out = _attend_with_sinks(q, keys, values, group.mask, sinks[:, None])
        return out.transpose(1, 2).reshape(queries.shape[0], -1)
    q = queries.view(slots, group.queries, kv_heads, -1, queries.shape[-1]).transpose(1, 2).flatten(2, 3)
    mask = group.mask_of(queries.shape[1] // kv_heads)
    if mask is not None and q.shape[2] < mask.shape[2]:
        q = F.pad(q, (0, 0, 0, mask.shape[2] - q.shape[2]))
    if sinks is None:
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    else:
        each = sinks.view(kv_heads, -1).repeat(1, group.queries)
        out = _attend_with_sinks(q, keys, values, mask, F.pad(each, (0, q.shape[2] - each.shape[1])))
    out = out[:, :, : group.queries * (queries.shape[1] // kv_heads)]
    return out.unflatten(2, (group.queries, -1)).transpose(1, 2).reshape(queries.shape[0], -1)


def _attend_with_sinks(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor
) -> torch.Tensor:
    """Attention [slots, heads, queries, head_dim] with a score in each query's softmax that has no value. mask: as in
    `Group`; None: causal. sinks: [heads, queries or 1]."""
    if q.device.type == "cpu":
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = attention(q, keys, values, is_causal=mask is None, attn_mask=mask)
    else:
        if mask is None:
            mask = q.new_full((q.shape[2], keys.shape[2]), -torch.inf).triu(1)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        sums = (q @ keys.mT * q.shape[-1] ** -0.5 + mask).float().logsumexp(-1)
    return (out * torch.sigmoid(sums - sinks)[..., None]).to(q.dtype)


def _attend_piece(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of a piece of a prompt on the CPU: queries [N, heads, head_dim], keys and values [1, kv_heads, n,
    head_dim].

    A first call attends causally to the piece's own N tokens, a second call to the n - N earlier tokens. Their sums of
    exponentials give the weights of both results, so no mask [N, n] is needed."""
    nodes, heads, dim = queries.shape
    kv_heads, earlier = keys.shape[1], keys.shape[2] - nodes
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q = queries.transpose(0, 1)
    own = (one[:, :, earlier:].repeat_interleave(heads // kv_heads, 1) for one in (keys, values))
    near, near_sum = attention(q[None], *own, is_causal=True)
    # Query heads that share a key head become queries of a single head, so that its keys are read once.
    grouped = q.reshape(1, kv_heads, -1, dim)
    far, far_sum = attention(grouped, keys[:, :, :earlier], values[:, :, :earlier])
    far_sum, near_sum = (one.reshape(heads, nodes, 1) for one in (far_sum, near_sum))
    share = torch.sigmoid(far_sum - near_sum)
    out = torch.lerp(near[0].to(share.dtype), far.reshape(heads, nodes, dim).to(share.dtype), share)
    if sinks is not None:
        out = out * torch.sigmoid(torch.logaddexp(far_sum, near_sum) - sinks[:, None, None])
    return out.to(queries.dtype).transpose(0, 1).reshape(nodes, -1)


class Attention(LayerPart):
    """Rotary self-attention without the norm before it: out(attend(rotate(qkv(x)))).

    weights  "q_proj.weight", "k_proj.weight", "v_proj.weight" (or all three as "qkv_proj.weight") and "o_proj.weight"
             (`attention_shapes`). Values without a matrix are the keys before their norm; without a matrix for keys,
             the keys and values of another layer are read. Optionally their biases, "q_norm.weight" and
             "k_norm.weight", and "sinks" as in `attend_paths`. If q_proj has twice as many rows, the second half is a
             gate: its sigmoid multiplies the output of attention.
    written  number of key heads that the layer writes."""

    PARTS = ("gate", "qkv", "out")

    def __init__(self, weights: WeightsByName, shape: Shape, ops: TorchOps, window: int | None = None):
        self.shape, self.ops, self.window = shape, ops, window
        self.written = shape.num_kv_heads if weights.keys() & {"qkv_proj.weight", "k_proj.weight"} else 0
        if "k_proj.weight" in weights and "v_proj.weight" not in weights:
            weights = {**weights, "v_proj.weight": weights["k_proj.weight"]}
        self.gate: Linear | None = None
        dtype, queries = ops.cos.dtype, shape.num_heads * shape.head_dim
        if "q_proj.weight" in weights and weights["q_proj.weight"].shape[0] == 2 * queries:
            both = {name: weight for name, weight in weights.items() if name.startswith("q_proj.")}
            self.gate = stacked({name: _rows(w, slice(queries, None)) for name, w in both.items()}, ["q_proj"], dtype)
            weights = {**weights, **{name: _rows(w, slice(queries)) for name, w in both.items()}}
        vectors = tensors_of(weights)
        self.qkv = stacked(weights, ("qkv_proj", "q_proj", "k_proj", "v_proj"), dtype)
        self.out = stacked(weights, ("o_proj",), dtype)
        self.sinks = vectors["sinks"].to(torch.promote_types(dtype, torch.float32)) if "sinks" in vectors else None
        self.qk_norm: torch.Tensor | None = None
        if "q_norm.weight" in vectors:
            norms = [vectors[f"{part}_norm.weight"] for part in ("qk" if self.written else "q")]
            if shape.v_norm:
                norms.append(torch.ones_like(norms[0]))
            if not shape.qk_norm_whole:
                counts = (shape.num_heads, self.written, self.written)
                norms = [norm.expand(count, -1) for norm, count in zip(norms, counts, strict=False)]
            self.qk_norm = torch.cat(norms)

    def write(self, x: torch.Tensor, cache: Writer, layer: int) -> torch.Tensor:
        """Write keys and values of normed states x [N, H] to a layer of the cache. Returns queries [N, heads, D]."""
        s = self.shape
        qkv = self.qkv(x).view(-1, s.num_heads + 2 * self.written, s.head_dim)
        return self.ops.rotate(qkv, s.num_heads, self.written, self.qk_norm, cache, layer)

    def __call__(self, x: torch.Tensor, layout: Layout, cache: Writer, layer: int) -> torch.Tensor:
        """Attention [N, H] over normed states x [N, H]. Writes keys and values to layer `layer` of the cache."""
        queries, kv_heads = self.write(x, cache, layer), self.shape.num_kv_heads
        attended = attend(queries, kv_heads, layout, cache, layer, self.window, self.sinks)
        return self.out(attended if self.gate is None else self.ops.scale_by_sigmoid(attended, self.gate(x)))


class LatentAttention(LayerPart):
    """Attention of latent vectors (`Latent`): out(attend(rotate(queries, keys), values)). Keys and values are cached as
    they are attended to.

    weights  "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight", "o_proj.weight"; the same for
             queries with "q_a_proj", "q_a_layernorm" and "q_b_proj", or "q_proj.weight". Optionally biases."""

    PARTS = ("down", "queries", "keys", "out")

    def __init__(self, weights: WeightsByName, shape: Shape, ops: TorchOps):
        assert shape.latent is not None
        self.shape, self.latent, self.ops, vectors = shape, shape.latent, ops, tensors_of(weights)
        dtype = ops.cos.dtype
        self.down = stacked(weights, ("kv_a_proj_with_mqa", "q_a_proj", "q_proj"), dtype)
        self.queries = stacked(weights, ("q_b_proj",), dtype) if self.latent.query_rank else None
        self.keys, self.out = (stacked(weights, (f"{part}_proj",), dtype) for part in ("kv_b", "o"))
        self.key_norm, self.query_norm = (vectors.get(f"{part}_a_layernorm.weight") for part in ("kv", "q"))
        self.scale = (shape.eps / self.latent.eps) ** 0.5  # of the norms' inputs, so that `ops` has their eps

    def write(self, x: torch.Tensor, cache: Writer, layer: int) -> torch.Tensor:
        """As `Attention.write`."""
        s, latent, count = self.shape, self.latent, len(x)
        compressed, turned, queries = self.down(x).tensor_split((latent.rank, latent.rank + latent.turned), 1)
        if self.queries is not None and self.query_norm is not None:
            queries = self.queries(self.ops.norm((queries * self.scale).contiguous(), self.query_norm))
        assert self.key_norm is not None
        made = self.keys(self.ops.norm((compressed * self.scale).contiguous(), self.key_norm))
        still, values = made.view(count, s.num_heads, -1).split((s.head_dim - latent.turned, s.head_dim), 2)
        halves = zip(turned[:, None].expand(-1, s.num_heads, -1).chunk(2, 2), still.chunk(2, 2), strict=True)
        keys = torch.cat([part for half in halves for part in half], 2)
        qkv = torch.cat([queries.reshape(count, s.num_heads, -1), keys, values], 1)
        return self.ops.rotate(qkv, s.num_heads, s.num_heads, None, cache, layer)

    def __call__(self, x: torch.Tensor, layout: Layout, cache: Writer, layer: int) -> torch.Tensor:
        """As `Attention`."""
        return self.out(attend(self.write(x, cache, layer), self.shape.num_heads, layout, cache, layer))


def _rows(weight: torch.Tensor | Blocks, which: slice) -> torch.Tensor | Blocks:
    return weight.rows(which) if isinstance(weight, Blocks) else weight[which]


class MLP(LayerPart):
    """The gated MLP, down(gate(gate_up(x))).

    weights  with `start` in front: "gate_proj.weight" and "up_proj.weight" (or both as "gate_up_proj.weight") and
             "down_proj.weight"; optionally their biases."""

    PARTS = ("gate_up", "down")

    def __init__(self, weights: WeightsByName, start: str, shape: Shape, ops: TorchOps):
        self.ops, self.activation, dtype = ops, shape.activation, ops.cos.dtype
        names = (f"{start}.{name}_proj" for name in ("gate_up", "gate", "up"))
        self.gate_up = stacked(weights, [*names], dtype)
        self.down = stacked(weights, [f"{start}.down_proj"], dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's output [N, H] for normed states x [N, H]."""
        return self.down(self.ops.gate(self.gate_up(x), self.activation))


class Mixture(LayerPart):
    """A mixture of experts: the router chooses a few experts for each token. Their outputs are weighted and added.

    Tokens are sorted by expert, so that an expert's matrices are read once. The outputs of a token's experts are added
    in the order of the experts' numbers, whatever other tokens there are. All tokens use the shared expert, if any.

    weights  "mlp.gate.weight", and the weights of an `MLP` for each expert, after "mlp.experts.0." and so on; for a
             shared expert, also those after "mlp.shared_expert." and "mlp.shared_expert_gate.weight"."""

    PARTS = ("router", "experts", "shared")

    def __init__(self, weights: WeightsByName, shape: Shape, ops: TorchOps):
        assert shape.experts is not None
        self.spec = shape.experts
        self.ops = ops
        self.router = stacked(weights, [ROUTER, SHARED_GATE], ops.cos.dtype)
        self.choice = tensors_of(weights).get(f"{ROUTER}.{CHOICE}")
        self.experts = [MLP(weights, f"mlp.experts.{number}", shape, ops) for number in range(self.spec.count)]
        self.shared = MLP(weights, "mlp.shared_expert", shape, ops) if self.spec.shared else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.chosen_for(x, self.router(x))

    def _choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers [N, chosen] of the experts for scores [N, count]."""
        spec = self.spec
        if self.choice is None:
            return self.ops.softmax(scores).topk(spec.chosen)
        sizes = self.ops.scale_by_sigmoid(torch.ones_like(scores), scores).float()
        ranks = sizes + self.choice
        if spec.groups > 1:
            of_groups = ranks.unflatten(1, (spec.groups, -1))
            best = of_groups.topk(2).values.sum(2).topk(spec.best_groups).indices
            kept = torch.zeros_like(of_groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
            ranks = of_groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = ranks.topk(spec.chosen).indices
        return sizes.gather(1, chosen), chosen

    def chosen_for(self, x: torch.Tensor, scores: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
        """The mixture's output [N, H] for normed states x [N, H] and scores of the experts. factors: of the experts'
        outputs; None: there are none."""
        share, chosen = self._choose(scores[:, : self.spec.count])
        if self.spec.normalised:
            share = share / share.cumsum(-1)[:, -1:]  # A cumulative sum has the same order on every processor.
        if self.spec.factor != 1.0:
            share = share * self.spec.factor
        if factors is not None:
            share = share * factors[chosen]
        order = chosen.flatten().argsort(stable=True)
        tokens, share = order // self.spec.chosen, share.to(x.dtype).flatten()[order, None]
        out, begin = torch.zeros_like(x), 0
        for expert, count in zip(
            self.experts, chosen.flatten().bincount(minlength=self.spec.count).tolist(), strict=True
        ):
            if count:
                own = tokens[begin : begin + count]
                out.index_add_(0, own, expert(x[own]) * share[begin : begin + count])
                begin += count
        if self.shared is None:
            return out
        if not self.spec.gated:
            return out + self.shared(x)
        return out + self.ops.scale_by_sigmoid(self.shared(x), scores[:, self.spec.count :])


class MixtureBeside(LayerPart):
    """A mixture of experts that runs beside an MLP: norm(MLP's output) + norm(mixture(norm(residual))). The router
    reads the residual with a norm of its own.

    weights  those of `Mixture`, "mlp.gate.scale", "mlp.gate.per_expert_scale" and the norms of OF_EXPERTS."""

    PARTS = ("mixture",)

    def __init__(self, weights: WeightsByName, shape: Shape, ops: TorchOps):
        self.ops, self.mixture, vectors = ops, Mixture(weights, shape, ops), tensors_of(weights)
        self.of_mlp, self.before, self.of_mixture = (vectors[f"{name}.weight"] for name in OF_EXPERTS)
        self.scale, self.factors = vectors[f"{ROUTER}.scale"], vectors[f"{ROUTER}.per_expert_scale"].float()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The sum [N, H] for the MLP's output x [N, H] and the residual before its norm."""
        scores = self.mixture.router(self.ops.norm(residual, self.scale)) * residual.shape[1] ** -0.5
        made = self.mixture.chosen_for(self.ops.norm(residual, self.before), scores, self.factors)
        x = self.ops.norm(x, self.of_mlp)
        return self.ops.add_norm(x, self.ops.norm(made, self.of_mixture), None)[0]


class Beside(LayerPart):
    """What a layer adds for the vector that it gets of each token beside its state: norm(out(gate(x) * vector)).

    weights  the matrices BESIDE_GATE and BESIDE_OUT, and the norm BESIDE_NORM."""

    PARTS = ("gate", "out")

    def __init__(self, weights: WeightsByName, shape: Shape, ops: TorchOps):
        self.ops, self.activation = ops, shape.activation
        self.gate, self.out = (stacked(weights, [name], ops.cos.dtype) for name in (BESIDE_GATE, BESIDE_OUT))
        self.norm = tensors_of(weights)[f"{BESIDE_NORM}.weight"]

    def __call__(self, x: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """The addend [N, H] for states x [N, H] and the tokens' vectors [N, P]."""
        gated = self.ops.gate(torch.cat([self.gate(x), vectors], 1), self.activation)
        return self.ops.norm(self.out(gated), self.norm)


class Layer(LayerPart):
    """A decoder layer: a norm and attention, then a norm and an MLP; each adds its output to the residual.

    weights  those of `Attention` after "self_attn.", or of `GatedDelta` after "linear_attn."; those of `MLP` after
             "mlp.", of `Mixture`, or both; of `Beside`; "layer_scalar"; and the norms of `shape`. The first norm may
             be missing.
    number   of the layer in its model. nbytes: bytes of all weights."""

    PARTS = ("attention", "mlp", "mixture", "beside")

    def __init__(
        self, weights: WeightsByName, shape: Shape, ops: TorchOps, kind: LayerKind = LayerKind(), number: int = 0
    ):
        shape, self.number = shape.of_layer(kind), number
        start, vectors = "linear_attn." if kind.recurrent else "self_attn.", tensors_of(weights)
        inner, (first, *others) = within(weights, start), shape.norms
        self.ops, self.scale, self.nbytes = ops, shape.residual_scale, sum(weight.nbytes for weight in weights.values())
        self.norm = vectors.get(f"{first}.weight")
        self.norms = [None if name is None else vectors[f"{name}.weight"] for name in others]
        if kind.recurrent:
            self.attention: GatedDelta | LatentAttention | Attention = GatedDelta(inner, shape, ops)
        elif shape.latent is not None:
            self.attention = LatentAttention(inner, shape, ops)
        else:
            self.attention = Attention(inner, shape, ops, kind.window)
        both = kind.experts and shape.experts is not None and shape.experts.beside
        self.mlp = Mixture(weights, shape, ops) if kind.experts and not both else MLP(weights, "mlp", shape, ops)
        self.mixture = MixtureBeside(weights, shape, ops) if both else None
        self.beside = Beside(weights, shape, ops) if shape.beside else None
        self.scalar = vectors["layer_scalar"] if shape.scaled else None

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None, layout: Layout, cache: Writer, layer: int) -> Pair:
        """Run the layer over x + `shape.residual_scale` * delta, [N, H] each; delta: None is 0. Returns x and delta of
        the result, which the next norm adds in its own pass. layer: the layer's number in the cache."""
        h = x
        if delta is not None:
            x, h = self.ops.add_norm(x, delta, self.norm, self.scale)
        elif self.norm is not None:
            h = self.ops.norm(x, self.norm)
        return self.after_norm(h, x, layout, cache, layer)

    def after_norm(self, x: torch.Tensor, residual: torch.Tensor, layout: Layout, cache: Writer, layer: int) -> Pair:
        """Run the layer over normed states x [N, width], and add its output to the residual [N, H]."""
        of_attention, before_mlp, of_mlp = self.norms
        delta = self.attention(x, layout, cache, layer)
        if of_attention is not None:
            delta = self.ops.norm(delta, of_attention)
        residual, h = self.ops.add_norm(residual, delta, before_mlp, self.scale)
        delta = self.mlp(h)
        if self.mixture is not None:
            delta = self.mixture(delta, residual)
        if of_mlp is not None:
            delta = self.ops.norm(delta, of_mlp)
        if self.scalar is None:
            return residual, delta
        if self.beside is not None:
            assert layout.beside is not None
            residual = self.ops.add_norm(residual, delta, None, self.scale)[0]
            delta = self.beside(residual, layout.beside[self.number])
        return residual * self.scalar, delta * self.scalar


def attention_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the matrices of `Attention`."""
    parts = layer_shapes(replace(shape, fused=False, gated=False, latent=None))
    return {f"{part}_proj.weight": parts[f"self_attn.{part}_proj.weight"] for part in "qkvo"}


def begin(
    segments: Sequence[Segment], cache: RaggedCache, shape: Shape, ops: TorchOps, like: torch.Tensor,
    windows: Iterable[int | None] = (None,), on_paths: bool = False,
) -> tuple[Layout, Writer]:  # fmt: skip
    """Plan a forward of a drafter's layers, and grow their cache if necessary.

    like      a tensor with the states' dtype and device. windows: the layers' windows, as in `plan`.
    on_paths  whether short segments attend along paths, with kernels that the decoder has compiled."""
    layout = plan(
        segments,
        [cache.length(segment.slot) for segment in segments],
        shared=shape.shared,
        windows=list(windows),
        dtype=like.dtype,
        device=like.device,
        most_on_paths=SHARED_QUERIES if on_paths else 0,
        pieces=True,
    )
    ops.turns.reach(max(layout.reach.values()))
    return layout, cache.writer(layout)


class GatedDelta(LayerPart):
    """A layer's gated delta rule, in the place of `Attention`: out(norm(rule(qkvz(x), ba(x)))).

    weights  "in_proj_qkvz.weight" and "in_proj_ba.weight", or "in_proj_qkv.weight" and the same for z, b and a; with
             "conv1d.weight", "A_log", "dt_bias", "norm.weight" and "out_proj.weight"."""

    PARTS = ("qkv", "ba", "out")

    def __init__(self, weights: WeightsByName, shape: Shape, ops: TorchOps):
        self.ops, vectors, dtype = ops, tensors_of(weights), ops.cos.dtype
        names = [[f"in_proj_{part}" for part in parts] for parts in (("qkvz", "qkv", "z"), ("ba", "b", "a"))]
        self.qkv, self.ba = (stacked(weights, of, dtype) for of in names)
        self.out = stacked(weights, ["out_proj"], dtype)
        wide = torch.promote_types(dtype, torch.float32)
        conv, rate, shift, norm = (
            vectors[name].to(wide) for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
        )
        self.conv, self.rate = conv[:, 0].T.contiguous(), -rate.exp()
        self.shift, self.norm, self.eps = shift, norm, shape.eps

    def __call__(self, x: torch.Tensor, layout: Layout, cache: Writer, layer: int) -> torch.Tensor:
        """As `Attention`; `layer` is its index among the recurrent layers."""
        assert cache.recurrence is not None
        return self.out(cache.recurrence.run(layer, self.qkv(x), self.ba(x), self))
