"""hydra: heads that also read the drafted tokens before them, so a fixed tree is drafted level by level.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (arXiv 2402.05109). Head k reads the
target's last state and the embeddings of the root and of the k tokens above the node it drafts below. With the prefix
layer of Hydra++ a decoder layer and a norm, with a cache of their own, come between the state and the heads. Heads
share the target's output head or bring their own. The authors' files are read too."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.draft.models.checkpoint import check_all, open_head
from paceline.draft.models.layers import load_module, native, nbytes, own_layers, own_shapes, placed
from paceline.draft.models.networks import PREFIX, GroundedHeads
from paceline.draft.models.pending import Pending
from paceline.draft.models.static_heads import ReadingHeads, StaticConfig, count_heads
from paceline.errors import MethodError
from paceline.target.base import Facts, Needs
from paceline.target.linear import linear
from paceline.target.quantised.blocks import tensors_of

UNUSED = (f"{PREFIX}.embed_tokens.weight", "rotary_emb.inv_freq")
"""Endings of names in the authors' files that nothing reads: an unused embedding, and tables of rotations."""
LAYER, NORM = f"{PREFIX}.layers.0.", f"{PREFIX}.norm.weight"


class Hydra(ReadingHeads):
    """Drafts a fixed tree level by level with heads that read the drafted tokens above each node."""

    name = "hydra"
    paper = "Ankner et al. 2024, Hydra, arXiv 2402.05109"
    Config = StaticConfig

    def open(self, target: Facts) -> int:
        path = self.config.checkpoint
        config, found = open_head(path, self.name, target)
        check_config(path, config)
        tensors = untied(by_position(found), config)
        heads, layers = count_heads(path, tensors, "hydra_mlp.")
        has_prefix = any(name.startswith(PREFIX) for name in tensors)
        has_own = any(name.startswith("hydra_lm_head") for name in tensors)
        own = [f"hydra_lm_head.{k}" for k in range(heads if has_own else 0)]
        network = GroundedHeads(heads, layers, target.hidden_size, tied=False)
        shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        if has_prefix:
            decoder = native(target, "hydra with a prefix layer has layers of the target's kind")
            shapes |= own_shapes(decoder, [LAYER]) | {NORM: (target.hidden_size,)}
        for head in own:
            shapes |= {f"{head}.weight": (target.vocab_size, target.hidden_size), f"{head}.bias": (target.vocab_size,)}
        check_all(path, tensors, shapes)
        here = placed(tensors, target, self.config.dtype)
        self.network, vectors = load_module(network, here, target), tensors_of(here)
        if own:
            self.own_heads = [linear([here[f"{h}.weight"]], vectors[f"{h}.bias"], target.dtype) for h in own]
        self.prefix = own_layers(here, [LAYER], decoder) if has_prefix else None
        self.device = target.device
        self.pending = Pending(target, (target.num_layers,), None if self.prefix is None else self.prefix.cache)
        self.needs = Needs(hidden_layers=(target.num_layers,))
        self.weight_bytes = nbytes(here, "hydra_lm_head")
        return heads

    def through(self, states: torch.Tensor, following: IntArray, segments: Sequence[Segment]) -> torch.Tensor:
        """The states after the prefix layer and its norm; without one, as they are."""
        if self.prefix is None:
            return states
        layout, cache = self.prefix.begin(segments, states)
        return self.prefix.ops.norm(self.prefix(states, layout, cache), self.prefix.vectors[NORM])

    def guess(self, states: torch.Tensor, roots: IntArray, size: int) -> IntArray:
        """Level by level: every node with children is one row of its depth's head."""
        template = self.template
        tokens = np.zeros((len(roots), size), np.int64)
        tokens[:, 0] = roots
        for k in range(int(template.depth[size - 1])):
            below = slice(template.levels[k], template.levels[k + 1])
            above = np.unique(template.parent[below])
            ids = torch.from_numpy(tokens[:, self._ways(above, k)]).to(self.device)  # [R, nodes, k + 1]
            embedded = F.embedding(ids.flatten(0, 1), self.embedding).unbind(1)
            repeated = states.repeat_interleave(len(above), 0)
            best = self.candidates(self.network(k, repeated, embedded), k).reshape(len(roots), len(above), -1)
            tokens[:, below] = best[:, np.searchsorted(above, template.parent[below]), template.rank[below]]
        return tokens

    def read_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        states = self.through_text(tokens, states)
        ids = torch.from_numpy(np.concatenate([tokens, np.zeros(len(self.network), np.int64)])).to(self.device)
        table = F.embedding(ids, self.embedding)
        following = [table[k + 1 : k + 1 + len(tokens)] for k in range(len(self.network))]
        return torch.stack([self.network(k, states, following[: k + 1]) for k in range(len(self.network))], 1)

    def _ways(self, nodes: IntArray, depth: int) -> IntArray:
        """For nodes at that depth the way down to each from the root, int64 [nodes, depth + 1]."""
        way = [nodes]
        for _ in range(depth):
            way.insert(0, self.template.parent[way[0]])
        return np.stack(way, 1)


def check_config(path: str, config: Mapping[str, Any]) -> None:
    """MethodError for heads of the authors' other experiments, which read something else."""
    kind = config.get("hydra_head_arch", "mlp")
    if kind not in ("mlp", "prefix-mlp"):
        raise MethodError(f"{path} has heads of kind {kind!r} (hydra_head_arch); mlp and prefix-mlp can be read")
    if not config.get("grounded_heads", True):
        raise MethodError(f"{path} has heads that do not read drafted tokens (grounded_heads is false)")
    if config.get("hidden_state_offset"):
        raise MethodError(f"{path} reads a state other than the last one (hidden_state_offset is not 0)")


def by_position(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with the blocks of a head numbered one after another: in the authors' files dropouts take numbers
    too, and an output head is number 1, after its dropout. What nothing reads is left out; unknown names stay."""
    numbers: dict[str, list[int]] = {}
    pattern = re.compile(r"(hydra_mlp\.\d+)\.(\d+)\.(.+)")
    for name in tensors:
        if match := pattern.fullmatch(name):
            numbers.setdefault(match[1], []).append(int(match[2]))
    places = {head: {at: place for place, at in enumerate(sorted(set(of)))} for head, of in numbers.items()}
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(UNUSED):
            continue
        if match := pattern.fullmatch(name):
            name = f"{match[1]}.{places[match[1]][int(match[2])]}.{match[3]}"
        out[re.sub(r"(hydra_lm_head\.\d+)\.\d+\.", r"\1.", name)] = tensor
    return out


def untied(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """With `tied` in its config.json a file has the blocks after a head's first once: all of them, then."""
    if not config.get("tied"):
        return dict(tensors)
    out = dict(tensors)
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(hydra_mlp\.\d+)\.1\.(.+)", name):
            out |= {f"{match[1]}.{n}.{match[2]}": tensor for n in range(1, int(config["hydra_num_layers"]))}
    return out
