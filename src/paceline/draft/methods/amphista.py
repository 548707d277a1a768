"""amphista: heads that see each other, over causal layers of their own, fill a fixed tree in one pass.

Li et al., "Amphista: Bi-directional Multi-head Decoding for Accelerating LLM Inference" (NAACL 2025, arXiv 2406.13170).
The layers read the state of each committed token and the token after it. K heads read the layers' last output, an
encoder lets the K positions see each other, and the target's output head reads the result. One pass drafts all depths,
so all nodes of a depth have the same candidates. The authors have published no code: docs/methods/amphista.md says
which parts of this network, Amphista-R, are our reading."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.draft.models.fixed_tree import FixedTreeConfig, Heads, HeadsDrafter
from paceline.draft.models.layers import native, nbytes, own_layers, own_shapes, placed
from paceline.formats.facts import BEFORE_NORM, Facts
from paceline.formats.heads.checkpoint import check_all, open_drafter
from paceline.formats.heads.layout import check_numbers
from paceline.formats.heads.networks import JointHeads, concat_scaled, load_module, shapes_of
from paceline.kernels.linear import linear

STAGES = ("stage1.0.", "stage2.0.")
"""What the names of the two causal layers' tensors begin with."""


class AmphistaHeads(Heads):
    """K heads over the causal layers' output; an encoder lets them see each other."""

    def __init__(self, config: FixedTreeConfig, target: Facts):
        path = config.checkpoint
        inside = self.target = native(target, "amphista has layers of the target's kind")
        written, tensors = open_drafter(path, Amphista.name, target)
        network = written.get("network", {})
        check_numbers(path, {"heads": network.get("heads")}, most=64)
        self.depth, s = network["heads"], inside.shape
        inner = s.intermediate_size if network.get("encoder_ffn", True) else None
        joint = JointHeads(self.depth, s.hidden_size, s.num_heads, inner, s.eps)
        outputs = [f"lm_heads.{k}.weight" for k in range(self.depth if network.get("own_heads") else 0)]
        shapes = own_shapes(inside, STAGES) | {"fusion2.weight": (s.hidden_size, 2 * s.hidden_size)} | shapes_of(joint)
        check_all(path, tensors, shapes | dict.fromkeys(outputs, (s.vocab_size, s.hidden_size)))
        here = placed(tensors, target, config.dtype)
        self.fusion = linear([here["fusion2.weight"]], None, target.dtype)
        self.layers = own_layers(here, STAGES, inside)
        self.network = load_module(joint, here, target)
        self.outputs = [linear([here[name]], None, target.dtype) for name in outputs] or None
        self.layer, self.cache, self.nbytes = BEFORE_NORM, self.layers.cache, nbytes(here, "lm_heads")

    def run_head(self, states: torch.Tensor, following: IntArray, segments: Sequence[Segment]) -> torch.Tensor:
        """Run stage 1 over the states, then stage 2 over its output and the tokens after the states."""
        layout, cache = self.layers.begin(segments, states)
        states = self.layers(states, layout, cache, last=1)
        after = F.embedding(torch.from_numpy(following).to(states.device), self.target.embedding)
        return self.layers(self.fusion(concat_scaled(states, after)), layout, cache, first=1)

    def inputs(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        read: torch.Tensor = self.network(states)
        return self.target.ops.norm(read.flatten(0, 1), self.target.norm).view(read.shape)


class Amphista(HeadsDrafter):
    """Drafts a fixed tree with heads that see each other, over causal layers of their own."""

    name = "amphista"
    paper = "Li et al. 2025, Amphista, arXiv 2406.13170"
    Network = AmphistaHeads
