"""The native decoder: Llama-family transformers, built for decoding. Knows nothing of drafters or sampling.

Llama 1/2/3 and Vicuna, Mistral, Qwen2/2.5, Qwen3, SmolLM: pre-norm blocks of rotary attention and a gated MLP. What
is different from a training implementation: Q, K, V and gate, up are one matrix each, rows of different lengths are
packed without padding, keys and values go straight into the ragged cache, and on CPUs with bfloat16 units the
weights are kept in the order in which they stream from memory fastest: oneDNN's, or our own (`target/products.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.clock import Clock
from paceline.kernels.topk import top_tokens
from paceline.target import products
from paceline.target.base import LayerCallback, Needs, Segment, Verdict
from paceline.target.cache import CachedTarget, RaggedCache, Writer
from paceline.target.fingerprint import fingerprint
from paceline.target.layout import Layout, familiar, plan
from paceline.target.ops import TorchOps

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary tables that do not depend on how long the text has become."""


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder, read from a Hugging Face configuration."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    max_context: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    window: int | None

    @classmethod
    def of(cls, config: PretrainedConfig) -> Shape:
        """Read `config`; call `unsupported` first."""
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            eps=config.rms_norm_eps,
            max_context=config.max_position_embeddings,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=attention_bias or config.model_type == "qwen2",
            out_bias=attention_bias and config.model_type != "qwen2",
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=config.model_type == "qwen3",
            window=_window(config),
        )


def _window(config: PretrainedConfig) -> int | None:
    """The sliding window every layer uses, or None."""
    types = set(getattr(config, "layer_types", None) or ())
    if types == {"full_attention"} or (config.model_type != "mistral" and not types):
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def unsupported(config: PretrainedConfig) -> str | None:
    """Why the native decoder cannot run this configuration, in a few words; None if it can."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    rope = dict(getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        return f"rope type {rope!r} is not one of {', '.join(STATIC_ROPE)}"
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        return "its layers use different kinds of attention"
    activation = getattr(config, "hidden_act", "silu")
    if activation != "silu":
        return f"activation {activation!r} is not 'silu'"
    return None


def weight_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint that the decoder reads."""
    s = Shape.of(config)
    q, kv, h, m = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.hidden_size, s.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (s.vocab_size, h),
        "model.norm.weight": (h,),
    }
    if not s.tied:
        shapes["lm_head.weight"] = (s.vocab_size, h)
    linear = [
        ("self_attn.q_proj", q, h, s.qkv_bias),
        ("self_attn.k_proj", kv, h, s.qkv_bias),
        ("self_attn.v_proj", kv, h, s.qkv_bias),
        ("self_attn.o_proj", h, q, s.out_bias),
        ("mlp.gate_proj", m, h, s.mlp_bias),
        ("mlp.up_proj", m, h, s.mlp_bias),
        ("mlp.down_proj", h, m, s.mlp_bias),
    ]
    for layer in range(s.num_layers):
        at = f"model.layers.{layer}."
        for name, rows, columns, bias in linear:
            shapes[f"{at}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}{name}.bias"] = (rows,)
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (h,)
        if s.qk_norm:
            shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (s.head_dim,)
    return shapes


class Linear:
    """x @ weight.T + bias, from weights in the order that streams fastest on this device: in `panels` where our kernel
    is `preferred`, else oneDNN's, or as they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.bias = bias
        self.packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _has_bf16_units()
        self.panels = products.Panels(weight, bias) if products.fits(weight) and products.preferred() else None
        if self.panels is None:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.panels is not None:
            return self.panels(x)
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def rows(self, ids: torch.Tensor) -> Linear:
        """The outputs `ids` alone, from a copy of their rows: what is read is that much smaller."""
        return Linear(self.dense()[ids], None if self.bias is None else self.bias[ids])

    def dense(self) -> torch.Tensor:
        """The weight [outputs, inputs] as it was."""
        if self.panels is not None:
            return self.panels.dense()
        return self.weight.to_dense() if self.packed else self.weight


def _has_bf16_units() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def rotary_tables(config: PretrainedConfig, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, float32 [max_context + 1, head_dim]; the first half of sin is negated."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    kind, scale = parameters.get("rope_type", "default"), 1.0
    if kind == "default":
        base = parameters.get("rope_theta", 10000.0)
        inverse = base ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    else:
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angle = torch.outer(torch.arange(shape.max_context + 1).float(), inverse.float().cpu())
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def _fused_ops() -> type[TorchOps]:
    # Compiling the kernels takes seconds the first time; only those who run them should wait.
    from paceline.target.kernels import FusedOps

    return FusedOps


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Block:
    """One layer: rotary attention, then the gated MLP, each added to what came in."""

    def __init__(self, shape: Shape, layer: int, weights: Mapping[str, torch.Tensor]):
        def get(name: str) -> torch.Tensor | None:
            return weights.get(f"model.layers.{layer}.{name}")

        def linear(*names: str) -> Linear:
            parts = [weights[f"model.layers.{layer}.{name}.weight"] for name in names]
            biases = [bias for name in names if (bias := get(f"{name}.bias")) is not None]
            return Linear(_joined(parts), _joined(biases) if biases else None)

        self.shape = shape
        self.nbytes = sum(w.nbytes for name, w in weights.items() if name.startswith(f"model.layers.{layer}."))
        self.attention_norm = weights[f"model.layers.{layer}.input_layernorm.weight"]
        self.mlp_norm = weights[f"model.layers.{layer}.post_attention_layernorm.weight"]
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = linear("self_attn.o_proj")
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")
        q, k = get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")
        self.qk_norm: torch.Tensor | None = None
        if q is not None and k is not None:
            self.qk_norm = torch.cat([q.expand(shape.num_heads, -1), k.expand(shape.num_kv_heads, -1)])

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, ops: TorchOps, layout: Layout, cache: Writer, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer over x + delta, [N, H] each, as the `layer`th of the cache; what comes out is again a sum whose
        addition is left to the next norm, which does both in one pass."""
        s = self.shape
        x, h = (
            ops.add_norm(x, delta, self.attention_norm) if delta is not None else (x, ops.norm(x, self.attention_norm))
        )
        qkv = self.qkv(h).view(-1, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        queries = ops.rotate(qkv, s.num_heads, s.num_kv_heads, self.qk_norm, cache, layer)
        x, h = ops.add_norm(x, self.out(attend(queries, layout, cache, layer)), self.mlp_norm)
        return x, self.down(ops.gate(self.gate_up(h)))


def attend(queries: torch.Tensor, layout: Layout, cache: Writer, layer: int) -> torch.Tensor:
    """Attention of the packed queries [N, heads, head_dim] over their rows' caches; [N, heads * head_dim]."""
    if len(layout.groups) == 1 and layout.groups[0].gather is None:
        return _attend_group(queries, layout, cache, layer, 0)
    out = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
    for g, group in enumerate(layout.groups):
        if group.gather is None:
            out[group.begin : group.end] = _attend_group(queries[group.begin : group.end], layout, cache, layer, g)
        else:
            out[group.packed] = _attend_group(queries[group.gather], layout, cache, layer, g)[group.scatter]
    return out


def _attend_group(queries: torch.Tensor, layout: Layout, cache: Writer, layer: int, g: int) -> torch.Tensor:
    """One call for the padded queries [slots * queries, heads, head_dim] of group g.

    Query heads that share a key head become queries of one head: torch reads its keys once for all of them."""
    group = layout.groups[g]
    keys, values = cache.read(layer, g)
    slots, kv_heads = keys.shape[:2]
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


class Decoder(CachedTarget):
    """A Llama-family target (see the module's docstring).

    weights   checkpoint tensors by name, as `weight_shapes` lists them; they are cast to `dtype` on `device`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        weights: Mapping[str, torch.Tensor],
        *,
        name: str = "decoder",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        eos_token_ids: Sequence[int] = (),
    ):
        s = self.shape = Shape.of(config)
        self.name, self.dtype, self.device = name, dtype, torch.device(device)
        self.vocab_size, self.hidden_size, self.num_layers = s.vocab_size, s.hidden_size, s.num_layers
        self.max_context, self.eos_token_ids = s.max_context, tuple(eos_token_ids)
        self.weights_fingerprint = fingerprint({key: weights[key] for key in weight_shapes(config)})
        weights = {key: w.to(self.device, dtype) for key, w in weights.items()}
        self.embedding = weights["model.embed_tokens.weight"]
        read = sum(w.nbytes for w in weights.values())
        self.weight_bytes = read if s.tied else read - self.embedding.nbytes
        self.norm = weights["model.norm.weight"]
        self.head = Linear(self.embedding if s.tied else weights["lm_head.weight"])
        self.blocks = [Block(s, layer, weights) for layer in range(s.num_layers)]
        cos, sin = (table.to(self.device, dtype) for table in rotary_tables(config, s))
        self.ops = _fused_ops()(cos, sin, s.eps) if self.head.packed else TorchOps(cos, sin, s.eps)
        self.cache = self.new_cache(s.num_layers)
        self.clock = Clock()

    @torch.inference_mode()
    def verify(
        self, segments: Sequence[Segment], needs: Needs = Needs(), on_layer: LayerCallback | None = None
    ) -> Verdict:
        """As `Target.verify`, in one forward of the blocks."""
        layout = self._plan(segments)
        self.clock.lap("prepare")
        x, first = self._resume(segments, layout, needs)
        taps: dict[int, torch.Tensor] = {}
        stops = {*needs.hidden_layers, needs.callback_layer} & set(range(first, self.num_layers))
        cache = self._begin(layout)
        delta: torch.Tensor | None = None
        for layer in range(first, self.num_layers):
            if layer in stops:
                x, delta = x if delta is None else x + delta, None
                if layer in needs.hidden_layers:
                    taps[layer] = x[: layout.num_nodes]
                if on_layer is not None and layer == needs.callback_layer:
                    on_layer(layer, x[: layout.num_nodes])
            x, delta = self.blocks[layer](x, delta, self.ops, layout, cache, layer)
        self.clock.lap("layers")
        x = x if delta is None else x + delta
        if self.num_layers in needs.hidden_layers:
            x = self.ops.norm(x, self.norm)
            taps[self.num_layers] = x[: layout.num_nodes]
            x = x if layout.wanted is None else x[layout.wanted]
        else:
            x = self.ops.norm(x if layout.wanted is None else x[layout.wanted], self.norm)
        logits = self.head(x)[: layout.wanted_at[-1]]
        self.clock.lap("head")
        top = top_tokens(logits, needs.top_k) if needs.top_k else None
        if needs.top_k:
            self.clock.lap("draft")  # it is for the drafter alone
        return Verdict(
            logits,
            layout.wanted_at,
            taps,
            [begin for begin, _ in layout.spans] + [layout.num_nodes],
            top,
        )

    def new_cache(self, layers: int) -> RaggedCache:
        """An empty cache for so many layers of this decoder."""
        s = self.shape
        return RaggedCache(layers, s.num_kv_heads, s.head_dim, s.max_context, self.dtype, self.device)

    @torch.inference_mode()
    def run_layers(
        self, segments: Sequence[Segment], last: int, *, first: int = 0, cache: RaggedCache | None = None
    ) -> torch.Tensor:
        """Layers first..last-1 over the segments' nodes, [N, H]: a self-drafter's part of the forward.

        Their keys and values in those layers are written behind the rows; hand the states back in `Segment.hidden`
        and `verify` goes on from layer `last`. From a `first` above 0, every segment brings its nodes' states there
        in `hidden`. cache: one of `last - first` layers (`new_cache`) in which rows have lengths of their own."""
        layout = self._plan(segments, cache)
        writer = self._begin(layout, cache)
        if first:
            brought = [segment.hidden for segment in segments if segment.hidden is not None]
            x = _padded(torch.cat(brought).to(self.dtype), layout)
        else:
            x = F.embedding(layout.tokens, self.embedding)
        delta: torch.Tensor | None = None
        place = first if cache is None else 0
        for layer, block in enumerate(self.blocks[first:last], place):
            x, delta = block(x, delta, self.ops, layout, writer, layer)
        return (x if delta is None else x + delta)[: layout.num_nodes]

    def logits(self, hidden: torch.Tensor, normalise: bool = True) -> torch.Tensor:
        """The head over hidden states [N, H] (through the final norm first unless told not to); [N, V]."""
        hidden = hidden.to(self.dtype)
        return self.head(self.ops.norm(hidden, self.norm) if normalise else hidden)

    def trim_head(self, ids: torch.Tensor) -> None:
        """From now on logits are [M, K], those of the K tokens `ids` in their order: a drafter's trimmed vocabulary.
        What goes in may be any token still."""
        self.head = self.head.rows(ids)
        self.weight_bytes -= (self.vocab_size - len(ids)) * self.hidden_size * self.embedding.element_size()

    def _plan(self, segments: Sequence[Segment], cache: RaggedCache | None = None) -> Layout:
        s, cache = self.shape, cache or self.cache
        lengths = [cache.length(segment.slot) for segment in segments]
        return plan(
            segments,
            lengths,
            padding=self._padding(segments, lengths[-1]),
            shared=s.num_heads // s.num_kv_heads,
            window=s.window,
            dtype=self.dtype,
            device=self.device,
        )

    def _padding(self, segments: Sequence[Segment], last: int) -> int:
        """Nodes to add to the last segment, behind `last` tokens, so that the forward is over a familiar number.

        oneDNN compiles a kernel for every number of rows a matrix product meets, a millisecond or two each, and torch's
        attention for numbers of queries and keys (benchmarks/shapes.py). Drafts come in all sizes, rows without drafts
        in few."""
        nodes = sum(len(segment.tokens) - segment.start for segment in segments)
        padding = familiar(nodes) - nodes
        if not self.head.packed or nodes == len(segments):
            return 0
        return padding if last + len(segments[-1].tokens) + padding <= self.max_context else 0

    def _begin(self, layout: Layout, cache: RaggedCache | None = None) -> Writer:
        """Make room in the cache for the forward planned in `layout`, and look up its positions."""
        self.ops.begin(layout)
        return (cache or self.cache).writer(layout)

    def _resume(self, segments: Sequence[Segment], layout: Layout, needs: Needs) -> tuple[torch.Tensor, int]:
        """The states [N, H] the forward starts from, and its first layer.

        Where some segments bring states of layer `resume_layer`, the others are brought there first. If another
        drafter watches a layer below that, every layer is run and what was brought is set aside."""
        given, seam = [s.hidden for s in segments], needs.resume_layer
        watched = [layer for layer in (*needs.hidden_layers, needs.callback_layer) if layer is not None]
        if seam is None or all(hidden is None for hidden in given) or min(watched, default=seam) < seam:
            return F.embedding(layout.tokens, self.embedding), 0
        fresh = [s for s in segments if s.hidden is None]
        made = iter(())
        if fresh:
            states = self.run_layers(fresh, seam)
            made = iter(states.split([len(s.tokens) - s.start for s in fresh]))
        states = torch.cat([next(made) if hidden is None else hidden for hidden in given])
        return _padded(states.to(self.dtype), layout), seam


def _padded(states: torch.Tensor, layout: Layout) -> torch.Tensor:
    """States [N, H] of the nodes, and zeros for the padding behind them."""
    return F.pad(states, (0, 0, 0, layout.padding)) if layout.padding else states
