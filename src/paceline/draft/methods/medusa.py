"""medusa: K small heads on the target's last state, each of which proposes the tokens of one depth of a fixed tree.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (arXiv 2401.10774).
Head k reads the state after the final norm of the last committed token and says what comes k + 1 tokens after the next
one, which the target has chosen already: it is the root. The candidates of a depth are the same below every node of the
depth before. Heads share the target's output head or bring their own. Folders that `paceline train medusa` wrote and
the layouts in which others publish heads are read (docs/methods/medusa.md lists them).

Acceptance is lossless. The authors' typical acceptance, which is not, is `paceline.core.typical.Typical`."""

import torch

from paceline.core.round import Round
from paceline.core.tree import IntArray
from paceline.draft.models.layers import load_module, nbytes, placed
from paceline.draft.models.networks import ResidualHeads
from paceline.draft.models.static_heads import StaticConfig, StaticHeads
from paceline.draft.published.medusa import SHARED, TOKENS, read
from paceline.target.base import Facts, Needs
from paceline.target.linear import linear


class Medusa(StaticHeads):
    """Drafts a fixed tree with K heads that read the target's last state alone."""

    name = "medusa"
    paper = "Cai et al. 2024, Medusa, arXiv 2401.10774"
    Config = StaticConfig

    def open(self, target: Facts) -> int:
        tensors, heads, layers = read(self.config.checkpoint, target)
        if (tokens := tensors.pop(TOKENS, None)) is not None:
            self.own_tokens = tokens.long().numpy()
        here = placed(tensors, target, self.config.dtype)
        names = [SHARED if SHARED in here else f"lm_heads.{k}.weight" for k in range(heads)]
        own = {name: linear([here[name]], None, target.dtype) for name in dict.fromkeys(names) if name in here}
        self.own_heads = [own[name] for name in names] if own else None
        self.network = load_module(ResidualHeads(heads, layers, target.hidden_size), here, target)
        self.weight_bytes = nbytes(here, "lm_head")
        self.layer = target.num_layers
        self.needs = Needs(hidden_layers=(self.layer,))
        return heads

    def guess(self, states: torch.Tensor, roots: IntArray, size: int) -> IntArray:
        depth = int(self.template.depth[size - 1])
        return self.fill_table(torch.stack([head(states) for head in list(self.network)[:depth]], 1), roots, size)

    def read_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        return torch.stack([head(states) for head in self.network], 1)

    def observe(self, round: Round) -> None:
        """Keep the state of the last token that was committed, whoever drafted it."""
        for i, row in enumerate(round.rows):
            self.last[row.id] = round.committed(i, self.layer)[-1].clone()
