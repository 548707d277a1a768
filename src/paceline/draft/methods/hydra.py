"""hydra: heads that also read the drafted tokens before them, so a fixed tree is drafted level by level.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (arXiv 2402.05109). Head k drafts
below a node of depth k. It reads the target's last state and the embeddings of the tokens from the root to that node.
Hydra++ puts a prefix layer, which is a decoder layer and a norm with their own cache, between the state and the heads.
Heads share the target's output head or bring their own. The authors' files are read, too."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.draft.models.fixed_tree import Best, FixedTreeConfig, Heads, HeadsDrafter
from paceline.draft.models.layers import native, nbytes, own_layers, own_shapes, placed
from paceline.draft.shapes import Template
from paceline.formats.facts import Facts
from paceline.formats.heads.checkpoint import check_all
from paceline.formats.heads.heads import read_hydra
from paceline.formats.heads.layout import table_and_head
from paceline.formats.heads.networks import PREFIX, GroundedHeads, load_module, shapes_of
from paceline.kernels.blocks import tensors_of
from paceline.kernels.linear import linear

LAYER, NORM = f"{PREFIX}.layers.0.", f"{PREFIX}.norm.weight"


class HydraHeads(Heads):
    """K heads. Each reads the state and the embeddings of the tokens from the root to the node that it drafts below."""

    def __init__(self, config: FixedTreeConfig, target: Facts):
        path, vocab, h = config.checkpoint, target.vocab_size, target.hidden_size
        tensors, self.depth, layers = read_hydra(path, target)
        has_prefix = any(name.startswith(PREFIX) for name in tensors)
        has_own = any(name.startswith("hydra_lm_head") for name in tensors)
        own = [f"hydra_lm_head.{k}" for k in range(self.depth if has_own else 0)]
        network = GroundedHeads(self.depth, layers, h, tied=False)
        shapes = shapes_of(network)
        if has_prefix:
            decoder = native(target, "hydra with a prefix layer has layers of the target's kind")
            shapes |= own_shapes(decoder, [LAYER]) | {NORM: (h,)}
        for head in own:
            shapes |= {f"{head}.weight": (vocab, h), f"{head}.bias": (vocab,)}
        check_all(path, tensors, shapes)
        here = placed(tensors, target, config.dtype)
        self.network, vectors = load_module(network, here, target), tensors_of(here)
        if own:
            self.outputs = [linear([here[f"{one}.weight"]], vectors[f"{one}.bias"], target.dtype) for one in own]
        self.prefix = own_layers(here, [LAYER], decoder) if has_prefix else None
        self.cache = None if self.prefix is None else self.prefix.cache
        self.embedding = table_and_head(target)[0]
        self.layer, self.nbytes = target.num_layers, nbytes(here, "hydra_lm_head")

    def run_head(self, states: torch.Tensor, following: IntArray, segments: Sequence[Segment]) -> torch.Tensor:
        """Run the prefix layer and its norm, if there are any, over the states."""
        if self.prefix is None:
            return states
        layout, cache = self.prefix.begin(segments, states)
        return self.prefix.ops.norm(self.prefix(states, layout, cache), self.prefix.vectors[NORM])

    def guess(self, states: torch.Tensor, roots: IntArray, tree: Template, best: Best) -> IntArray:
        """Guess level by level. The head of a depth gets a row for each node with children."""
        tokens = np.zeros((len(roots), len(tree.parent)), np.int64)
        tokens[:, 0] = roots
        for k in range(len(tree.levels) - 1):
            below = slice(tree.levels[k], tree.levels[k + 1])
            above = np.unique(tree.parent[below])
            ids = torch.from_numpy(tokens[:, _ways(tree, above, k)]).to(states.device)  # [R, nodes, k + 1]
            embedded = F.embedding(ids.flatten(0, 1), self.embedding).unbind(1)
            repeated = states.repeat_interleave(len(above), 0)
            found = best(self.network(k, repeated, embedded), k).reshape(len(roots), len(above), -1)
            tokens[:, below] = found[:, np.searchsorted(above, tree.parent[below]), tree.rank[below]]
        return tokens

    def read_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate([tokens, np.zeros(self.depth, np.int64)])).to(states.device)
        table = F.embedding(ids, self.embedding)
        following = [table[k + 1 : k + 1 + len(tokens)] for k in range(self.depth)]
        return torch.stack([self.network(k, states, following[: k + 1]) for k in range(self.depth)], 1)


def _ways(tree: Template, nodes: IntArray, depth: int) -> IntArray:
    """The paths from the root to `nodes`, all of the same depth, int64 [nodes, depth + 1]."""
    way = [nodes]
    for _ in range(depth):
        way.insert(0, tree.parent[way[0]])
    return np.stack(way, 1)


class Hydra(HeadsDrafter):
    """Drafts a fixed tree level by level with heads that read the drafted tokens above each node."""

    name = "hydra"
    paper = "Ankner et al. 2024, Hydra, arXiv 2402.05109"
    Network = HydraHeads
