"""amphista: heads that see each other, over causal layers of their own, fill a fixed tree in one pass.

Li et al., "Amphista: Bi-directional Multi-head Decoding for Accelerating LLM Inference" (NAACL 2025, arXiv 2406.13170).
The layers read every committed token's state and the token that was chosen after it; K heads read the last of what
they make, an encoder lets the K positions see each other, and the target's output head reads those. One pass drafts all
depths, so the candidates of a depth are the same below every node of the depth before. No code of the authors exists:
`paceline.draft.models.networks` has the network, called Amphista-R, and its switches."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.draft.models.checkpoint import check_all, open_drafter
from paceline.draft.models.fixed_tree import FixedTree, FixedTreeConfig, Heads
from paceline.draft.models.layers import load_module, native, nbytes, own_layers, own_shapes, placed, shapes_of
from paceline.draft.models.networks import JointHeads, Switches, concat_scaled
from paceline.errors import MethodError
from paceline.target.base import BEFORE_NORM, Facts
from paceline.target.decoder import Decoder
from paceline.target.linear import linear
from paceline.target.quantised.blocks import WeightsByName


class Adaptation:
    """Both stages over committed positions, with a cache: states [N, H] and the tokens around them to states [N, H].

    weights  of `adaptation_shapes`."""

    def __init__(self, switches: Switches, weights: WeightsByName, target: Decoder):
        self.switches, self.embedding = switches, target.embedding
        names = ("fusion1.weight", "fusion2.weight")
        made = (linear([weights[name]], None, target.dtype) if name in weights else None for name in names)
        self.fusion1, self.fusion2 = made
        self.layers = own_layers(weights, prefixes(switches), target)

    def __call__(
        self, states: torch.Tensor, tokens: torch.Tensor, following: torch.Tensor, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """tokens, following  ids [N]: of the states' positions, and of those after them. Nothing is committed."""
        s = self.switches
        layout, cache = self.layers.begin(segments, states)
        if self.fusion1 is not None:
            read = tokens if s.stage1_input == "state+token" else following
            states = self.fusion1(concat_scaled(states, F.embedding(read, self.embedding)))
        states = self.layers(states, layout, cache, last=s.stage1_layers)
        if self.fusion2 is not None:
            states = self.fusion2(concat_scaled(states, F.embedding(following, self.embedding)))
        elif s.stage2_layers and s.stage2_input == "add":
            states = states + F.embedding(following, self.embedding)
        return self.layers(states, layout, cache, first=s.stage1_layers)


def prefixes(switches: Switches) -> list[str]:
    """What the names of each causal layer's tensors begin with, in order."""
    counts = {"stage1": switches.stage1_layers, "stage2": switches.stage2_layers}
    return [f"{stage}.{n}." for stage, count in counts.items() for n in range(count)]


def adaptation_shapes(switches: Switches, target: Decoder) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors of `Adaptation`."""
    h = target.hidden_size
    shapes = own_shapes(target, prefixes(switches))
    if switches.stage1_layers and switches.stage1_input != "state":
        shapes["fusion1.weight"] = (h, 2 * h)
    if switches.stage2_layers and switches.stage2_input == "concat":
        shapes["fusion2.weight"] = (h, 2 * h)
    return shapes


class AmphistaHeads(Heads):
    """K heads over the adapted state, which see each other in an encoder."""

    def __init__(self, config: FixedTreeConfig, target: Facts):
        path = config.checkpoint
        target = self.target = native(target, "amphista has layers of the target's kind")
        said, tensors = open_drafter(path, Amphista.name, target)
        try:
            switches = self.switches = Switches.read(said.get("network", {}))
        except MethodError as error:
            raise MethodError(f"{path}: {error}") from None
        s = target.shape
        network = JointHeads(switches, s.hidden_size, s.num_heads, s.intermediate_size, s.eps)
        names = [f"lm_heads.{k}.weight" for k in range(switches.heads if switches.own_heads else 0)]
        shapes = adaptation_shapes(switches, target) | shapes_of(network)
        check_all(path, tensors, shapes | dict.fromkeys(names, (s.vocab_size, s.hidden_size)))
        here = placed(tensors, target, config.dtype)
        self.adaptation = Adaptation(switches, here, target)
        self.network = load_module(network, here, target)
        self.outputs = [linear([here[name]], None, target.dtype) for name in names] or None
        self.depth, self.nbytes = switches.heads, nbytes(here, "lm_heads")
        self.layer = BEFORE_NORM if switches.tap == "pre_norm" else target.num_layers
        self.cache = self.adaptation.layers.cache

    def read(self, states: torch.Tensor, following: IntArray, segments: Sequence[Segment]) -> torch.Tensor:
        tokens = np.concatenate([segment.tokens for segment in segments])
        at, after = (torch.from_numpy(ids).to(states.device) for ids in (tokens, following))
        return self.adaptation(states, at, after, segments)

    def inputs(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        read: torch.Tensor = self.network(states)
        if self.switches.tap == "post_norm":
            return read
        return self.target.ops.norm(read.flatten(0, 1), self.target.norm).view(read.shape)


class Amphista(FixedTree):
    """Drafts a fixed tree with heads that see each other, over causal layers of their own."""

    name = "amphista"
    paper = "Li et al. 2025, Amphista, arXiv 2406.13170"
    Network = AmphistaHeads
