"""medusa: K small heads on the target's last state. Each proposes the tokens of a depth of a fixed tree.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (arXiv 2401.10774).
Each head reads the last committed state after the final norm. The token that the target chose from this state is the
root; head k predicts the token k + 1 places after the root. All nodes of a depth have the same candidates. Heads share
the target's output head or bring their own. Folders of `paceline train medusa` and the layouts in which others publish
heads are read (docs/methods/medusa.md lists them).

Acceptance is lossless. The authors' typical acceptance, which is not lossless, is left out."""

import torch

from paceline.draft.models.fixed_tree import FixedTreeConfig, Heads, HeadsDrafter
from paceline.draft.models.layers import nbytes, placed
from paceline.formats.facts import Facts
from paceline.formats.heads.heads import SHARED, TOKENS, read_medusa
from paceline.formats.heads.networks import ResidualHeads, load_module
from paceline.kernels.linear import linear


class MedusaHeads(Heads):
    """K residual heads over the state after the final norm."""

    def __init__(self, config: FixedTreeConfig, target: Facts):
        tensors, self.depth, layers = read_medusa(config.checkpoint, target)
        if (tokens := tensors.pop(TOKENS, None)) is not None:
            self.tokens = tokens.long().numpy()
        here = placed(tensors, target, config.dtype)
        names = [SHARED if SHARED in here else f"lm_heads.{k}.weight" for k in range(self.depth)]
        own = {name: linear([here[name]], None, target.dtype) for name in dict.fromkeys(names) if name in here}
        self.outputs = [own[name] for name in names] if own else None
        self.network = load_module(ResidualHeads(self.depth, layers, target.hidden_size), here, target)
        self.layer, self.nbytes = target.num_layers, nbytes(here, "lm_head")

    def inputs(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        return torch.stack([head(states) for head in list(self.network)[:depth]], 1)


class Medusa(HeadsDrafter):
    """Drafts a fixed tree with K heads that read the target's last state alone."""

    name = "medusa"
    paper = "Cai et al. 2024, Medusa, arXiv 2401.10774"
    Network = MedusaHeads
