"""hydra: heads that also read the drafted tokens before them, so a fixed tree is drafted level by level.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (arXiv 2402.05109). Head k reads the
target's last state and the embeddings of the root and of the k tokens above the node it drafts below. With the prefix
layer of Hydra++ a decoder layer and a norm, with a cache of their own, come between the state and the heads. Heads
share the target's output head or bring their own. The authors' files are read too."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.draft.models.checkpoint import check_all
from paceline.draft.models.layers import load_module, native, nbytes, own_layers, own_shapes, placed, shapes_of
from paceline.draft.models.networks import PREFIX, GroundedHeads
from paceline.draft.models.pending import Pending
from paceline.draft.models.static_heads import ReadingHeads, StaticConfig
from paceline.draft.published.hydra import read
from paceline.target.base import Facts, Needs
from paceline.target.linear import linear
from paceline.target.quantised.blocks import tensors_of

LAYER, NORM = f"{PREFIX}.layers.0.", f"{PREFIX}.norm.weight"


class Hydra(ReadingHeads):
    """Drafts a fixed tree level by level with heads that read the drafted tokens above each node."""

    name = "hydra"
    paper = "Ankner et al. 2024, Hydra, arXiv 2402.05109"
    Config = StaticConfig

    def open(self, target: Facts) -> int:
        path = self.config.checkpoint
        tensors, heads, layers = read(path, target)
        has_prefix = any(name.startswith(PREFIX) for name in tensors)
        has_own = any(name.startswith("hydra_lm_head") for name in tensors)
        own = [f"hydra_lm_head.{k}" for k in range(heads if has_own else 0)]
        network = GroundedHeads(heads, layers, target.hidden_size, tied=False)
        shapes = shapes_of(network)
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
