"""Drafters that fill blocks, for tests: files in the layouts that others publish, and what such a file computes, in
plain torch. Both are written out here by hand, not by what trains and runs drafters."""

import torch
import torch.nn.functional as F

from tests.draft.eagles import described, geometry, layer_tensors, write

BLOCK, LAYERS, IDS = 5, 2, (0, 2)
"""Positions of a block, layers, and the target's layers whose outputs are read."""


def random_tensors(model, seed=0, scale=0.2):
    """A random drafter in Z Lab's layout. scale: of what its layers add."""
    hidden, dim = model.config.hidden_size, geometry(model)["dim"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {"fc.weight": torch.randn(hidden, len(IDS) * hidden, generator=generator) * 0.2}
    for name in ("hidden_norm", "norm"):
        tensors[f"{name}.weight"] = 1 + torch.randn(hidden, generator=generator) * 0.1
    for number in range(LAYERS):
        layer = layer_tensors(seed + number, width=hidden, **geometry(model))
        for name in ("q_norm", "k_norm"):
            layer[f"self_attn.{name}.weight"] = 1 + torch.randn(dim, generator=generator) * 0.1
        layer["input_layernorm.weight"] = 1 + torch.randn(hidden, generator=generator) * 0.1
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            layer[f"{name}.weight"] *= scale
        tensors |= {f"layers.{number}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def config(model, **more):
    """config.json of a drafter as Z Lab publishes them; the mask is token 3."""
    own = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": LAYERS}
    own |= {"block_size": BLOCK, "num_target_layers": model.config.num_hidden_layers}
    return described(model, **own, dflash_config={"mask_token_id": 3, "target_layer_ids": list(IDS)}) | more


def dspark(model, **more):
    """config.json of a drafter as DeepSpec writes them."""
    rank, flat = model.config.hidden_size, config(model)
    own = flat.pop("dflash_config") | {"architectures": ["Qwen3DSparkModel"], "markov_rank": rank, "num_anchors": 8}
    heads = {"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
    return flat | own | heads | more


def knowing(model, seed=0, scale=0.02):
    """A drafter with DSpark's heads that knows the next token of a model whose layers add nothing.

    Its Markov head is that model: the target's final norm over the embedding of the token before, and its output head.
    A chain that is drafted in order is right, and what is drafted without the head is not. Layers add a little."""
    table, norm = model.model.embed_tokens.weight.detach(), model.model.norm.weight.detach()
    generator, hidden = torch.Generator().manual_seed(seed), len(norm)
    return random_tensors(model, seed, scale) | {
        "norm.weight": torch.full((hidden,), 0.05),
        "markov_head.markov_w1.weight": F.rms_norm(table, (hidden,), norm, 1e-5),
        "markov_head.markov_w2.weight": model.lm_head.weight.detach().clone(),
        "confidence_head.proj.weight": torch.randn(1, 2 * hidden, generator=generator),
        "confidence_head.proj.bias": torch.ones(1),
    }


GROUP, BEST = 4, 3  # channels of a kernel's group, and candidates of DFlash2's selector


def second(model, **more):
    """config.json of a DFlash2 drafter as Z Lab publishes them."""
    flat = config(model, architectures=["DFlash2DraftModel"], is_causal=False)
    own = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": 8, "selector_top_k": BEST}
    return flat | {"dflash_config": flat["dflash_config"] | own | {"block_size": flat.pop("block_size")}} | more


def second_tensors(model, seed=0, untrained=False):
    """A random DFlash2 drafter, or one that computes what a DFlash drafter does."""
    hidden, vocab, generator = model.config.hidden_size, model.config.vocab_size, torch.Generator().manual_seed(seed)
    shapes = dict.fromkeys(("predecessor_codebook", "successor_codebook"), (vocab, 8))
    shapes["hidden_projection.weight"] = (8, hidden)
    tensors = {f"candidate_selector.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for number in range(LAYERS):
        for part in ("attention_conv", "mlp_conv"):
            kernel = torch.randn(2, 2, hidden, generator=generator) * 0.3
            project = torch.randn(4 * hidden // GROUP, hidden, generator=generator) * 0.1
            if untrained:
                kernel, project = torch.stack([torch.ones(2, hidden), torch.zeros(2, hidden)], 1), project * 0
            start = f"layers.{number}.{part}."
            tensors |= {f"{start}base_kernel": kernel, f"{start}kernel_projection.weight": project}
    if untrained:
        tensors["candidate_selector.successor_codebook"] *= 0
    return random_tensors(model, seed) | tensors


def convolved(x, h, base, project, side):
    """A convolution over a block x [B, H], position by position, with the kernel of its side and what h [B, H] adds."""
    added = (h @ project.T).view(len(x), 2, 2, -1)
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for back in range(min(t + 1, 2)):
            for c in range(x.shape[1]):
                out[t, c] += (base[side, back, c] + added[t, side, back, c // GROUP]) * x[t - back, c]
    return out


def save(folder, model, kind="knowing", scale=0.02, **more):
    """A drafter of either kind in a folder. scale: of what a knowing one's layers add; more: entries of config.json."""
    if kind == "second":
        return write(folder, second(model, **more), second_tensors(model))
    if kind == "knowing":
        return write(folder, dspark(model, **more), knowing(model, scale=scale))
    return write(folder, config(model, **more), random_tensors(model))


def reference(tensors, taps, anchor, mask, windows, causal):  # fmt: skip
    """What a drafter of `geometry` puts out at every position of the block after a text, [BLOCK, H].

    taps  [T, len(IDS) * H]: the target's states of the text. anchor, mask: embeddings [H]. windows: of each layer."""
    heads, kv_heads, dim, eps = 2, 1, 24, 1e-5

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], eps)

    def turned(x, at):
        angle = at[:, None].float() * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angle.cos(), angle.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    context = norm(taps @ tensors["fc.weight"].T, "hidden_norm")
    x = torch.stack([anchor] + [mask] * (BLOCK - 1))
    length = len(context)
    keys_at, at = torch.arange(length + BLOCK), length + torch.arange(BLOCK)
    seen = torch.ones(BLOCK, length + BLOCK, dtype=torch.bool)
    if causal:
        seen &= keys_at <= at[:, None]
    for number, window in enumerate(windows):
        near = seen if window is None else seen & (at[:, None] - keys_at < window)
        layer = f"layers.{number}."
        project = {name: tensors[f"{layer}self_attn.{name}_proj.weight"] for name in "qkvo"}
        conv = [
            [tensors.get(f"{layer}{part}_conv.{name}") for name in ("base_kernel", "kernel_projection.weight")]
            for part in ("attention", "mlp")
        ]
        h = norm(x, f"{layer}input_layernorm")
        y = h if conv[0][0] is None else convolved(h, h, *conv[0], 0)
        both = torch.cat([context, y])
        q = turned(norm((y @ project["q"].T).view(-1, heads, dim), f"{layer}self_attn.q_norm"), at)
        k = turned(norm((both @ project["k"].T).view(-1, kv_heads, dim), f"{layer}self_attn.k_norm"), keys_at)
        v = (both @ project["v"].T).view(-1, kv_heads, dim)
        scores = torch.einsum("nhd,md->hnm", q, k[:, 0]) / dim**0.5
        weights = scores.masked_fill(~near, -torch.inf).softmax(-1)
        out = torch.einsum("hnm,md->nhd", weights, v[:, 0]).flatten(1) @ project["o"].T
        x = x + (out if conv[0][0] is None else convolved(out, h, *conv[0], 1))
        h = norm(x, f"{layer}post_attention_layernorm")
        y = h if conv[1][0] is None else convolved(h, h, *conv[1], 0)
        gate, up, down = (tensors[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        out = (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
        x = x + (out if conv[1][0] is None else convolved(out, h, *conv[1], 1))
    return norm(x, "norm")
