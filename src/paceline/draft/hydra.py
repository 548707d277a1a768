"""hydra: heads that also read the drafted tokens before them, so a fixed tree is drafted level by level.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (arXiv 2402.05109). Head k reads the
target's last state and the embeddings of the root and of the k tokens above the node it drafts below. With the prefix
layer of Hydra++ a decoder layer and a norm, with a cache of their own, come between the state and the heads. Heads
share the target's output head or bring their own. Folders that `paceline train hydra` wrote have the names of the
authors' files, which are read too.

    Engine("models/demo", draft="hydra:models/demo-hydra,tree=16")
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from paceline.draft.neural.heads.drafting import StaticConfig
from paceline.draft.neural.heads.layers import OwnLayers, native, own_shapes
from paceline.draft.neural.heads.networks import PREFIX, GroundedHeads
from paceline.draft.neural.heads.reading import ReadingHeads
from paceline.draft.neural.pending import Pending
from paceline.draft.neural.published import check_all, open_head
from paceline.draft.neural.weights import load_module, nbytes, placed
from paceline.engine.request import Request
from paceline.engine.round import Segment
from paceline.engine.tree import IntArray
from paceline.errors import MethodError
from paceline.target.base import Facts, Needs
from paceline.target.linear import Linear, linear
from paceline.target.quantised.checkpoint import tensors_of

UNUSED = (f"{PREFIX}.embed_tokens.weight", "rotary_emb.inv_freq")
"""Endings of names in the authors' files that nothing reads: an embedding that no token enters, and tables that follow
from the configuration."""
LAYER, NORM = f"{PREFIX}.layers.0.", f"{PREFIX}.norm.weight"


class Hydra(ReadingHeads):
    """Drafts a fixed tree level by level with heads that read the drafted tokens above each node."""

    name = "hydra"
    lossless = "yes"
    paper = "Ankner et al. 2024, Hydra, arXiv 2402.05109"
    Config = StaticConfig

    def __init__(self, config: StaticConfig):
        super().__init__(config)
        self._own: list[Linear] | None = None
        self.prefix: OwnLayers | None = None

    def open(self, target: Facts) -> int:
        path = self.config.checkpoint
        config, found = open_head(path, self.name, target)
        check_config(path, config)
        tensors = untied(by_position(found), config)
        heads, layers = count_heads(path, tensors)
        has_prefix = any(name.startswith(PREFIX) for name in tensors)
        has_own = any(name.startswith("hydra_lm_head") for name in tensors)
        network = GroundedHeads(heads, layers, target.hidden_size, tied=False)
        shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        if has_prefix:
            shapes |= own_shapes(native(target, self.name), [LAYER]) | {NORM: (target.hidden_size,)}
        if has_own:
            for k in range(heads):
                shapes |= {f"hydra_lm_head.{k}.weight": (target.vocab_size, target.hidden_size)}
                shapes |= {f"hydra_lm_head.{k}.bias": (target.vocab_size,)}
        check_all(path, tensors, shapes)
        here = placed(tensors, target, self.config.dtype)
        self.network, vectors = load_module(network, here, target), tensors_of(here)
        if has_own:
            names = [f"hydra_lm_head.{k}" for k in range(heads)]
            self._own = [linear([here[f"{n}.weight"]], vectors[f"{n}.bias"], target.dtype) for n in names]
        self.layer, self.device = target.num_layers, target.device
        self.pending = Pending(target, (self.layer,))
        if has_prefix:
            self.prefix, self.prefix_norm = OwnLayers(here, [LAYER], native(target, self.name)), vectors[NORM]
            self.cache = self.prefix.cache
        self.weight_bytes = nbytes(here, "hydra_lm_head")
        self.needs = Needs(hidden_layers=(self.layer,))
        return heads

    def output_heads(self) -> Sequence[Linear] | None:
        return self._own

    @torch.inference_mode()
    def read(self, rows: Sequence[Request], states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The states after the prefix layer, which keeps them; without one, as they are."""
        return torch.cat(list(states)) if self.prefix is None else self._after_prefix(self.slots(rows), states)

    def _after_prefix(self, slots: Sequence[int], states: Sequence[torch.Tensor]) -> torch.Tensor:
        assert self.prefix is not None
        packed = torch.cat(list(states))
        segments = [
            Segment.chunk(slot, np.zeros(len(of_row), np.int64), last=False)
            for slot, of_row in zip(slots, states, strict=True)
        ]
        layout, cache = self.prefix.begin(segments, packed)
        made = self.prefix(packed, layout, cache, 0, 1)
        for slot, of_row in zip(slots, states, strict=True):
            self.prefix.cache.commit(slot, range(len(of_row)))
        return self.prefix.ops.norm(made, self.prefix_norm)

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
        if self.prefix is not None:
            slot = self.prefix.cache.add_row(len(states))
            states = self._after_prefix([slot], [states])
            self.prefix.cache.drop_row(slot)
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


# Files ---------------------------------------------------------------------------------------------------------------


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


def count_heads(path: str, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """(number of heads, blocks of each that are in the file); MethodError if there are none."""
    found = [tuple(map(int, name.split(".")[1:3])) for name in tensors if name.startswith("hydra_mlp.")]
    if not found:
        raise MethodError(f"{path} has no heads: none of its tensors has a name such as hydra_mlp.0.0.linear.weight")
    heads, layers = (max(numbers) + 1 for numbers in zip(*found, strict=True))
    return heads, layers
