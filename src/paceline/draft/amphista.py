"""amphista: heads that see each other, over causal layers of their own, fill a fixed tree in one pass.

Li et al., "Amphista: Bi-directional Multi-head Decoding for Accelerating LLM Inference" (NAACL 2025, arXiv 2406.13170).
The layers read every committed token's state and the token that was chosen after it; K heads read the last of what
they make, an encoder lets the K positions see each other, and the target's output head reads those. One pass drafts all
depths, so the candidates of a depth are the same below every node of the depth before. No code of the authors exists:
`paceline.draft.neural.heads.joint` has the network, called Amphista-R, and its switches.

    Engine("models/demo", draft="amphista:models/demo-amphista,tree=16")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from paceline.draft.neural.checkpoint import open_drafter
from paceline.draft.neural.heads.drafting import StaticConfig, StaticHeads, in_dtype, load_module
from paceline.draft.neural.heads.joint import JointHeads, Switches
from paceline.draft.neural.heads.layers import OwnLayers, native, own_shapes
from paceline.draft.neural.pending import Pending
from paceline.draft.neural.published import check_all
from paceline.errors import MethodError
from paceline.round import Round, Segment
from paceline.row import Request
from paceline.target.base import BEFORE_NORM, Facts, Needs
from paceline.target.decoder import Decoder
from paceline.target.linear import Linear
from paceline.tree import IntArray


class Adaptation:
    """Both stages over committed positions, with a cache: states [N, H] and the tokens around them to states [N, H].

    weights  of `adaptation_shapes`."""

    def __init__(self, switches: Switches, weights: Mapping[str, torch.Tensor], target: Decoder):
        self.switches, self.embedding = switches, target.embedding
        self.fusion1, self.fusion2 = (
            Linear(weights[name]) if name in weights else None for name in ("fusion1.weight", "fusion2.weight")
        )
        self.layers = OwnLayers(weights, prefixes(switches), target)
        self.cache = self.layers.cache

    def __call__(
        self, states: torch.Tensor, own: torch.Tensor, following: torch.Tensor, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """own, following  token ids [N]: of the states' positions, and of those after them. Nothing is committed."""
        s = self.switches
        layout, cache = self.layers.begin(segments, states)
        after = F.embedding(following, self.embedding) if s.wants_tokens else None
        if self.fusion1 is not None:
            beside = F.embedding(own, self.embedding) if s.stage1_input == "state+token" else after
            states = self.fusion1(_beside(states, beside))
        states = self.layers(states, layout, cache, 0, s.stage1_layers)
        if self.fusion2 is not None:
            states = self.fusion2(_beside(states, after))
        elif s.stage2_layers and s.stage2_input == "add":
            assert after is not None
            states = states + after
        return self.layers(states, layout, cache, s.stage1_layers, s.stage1_layers + s.stage2_layers)


def _beside(states: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
    assert embedded is not None
    return torch.cat([states, embedded], -1)


def prefixes(switches: Switches) -> list[str]:
    """What the names of each causal layer's tensors begin with, in order."""
    return [
        *(f"stage1.{n}." for n in range(switches.stage1_layers)),
        *(f"stage2.{n}." for n in range(switches.stage2_layers)),
    ]


def adaptation_shapes(switches: Switches, target: Decoder) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors of `Adaptation`."""
    h = target.hidden_size
    shapes = own_shapes(target, prefixes(switches))
    if switches.stage1_layers and switches.stage1_input != "state":
        shapes["fusion1.weight"] = (h, 2 * h)
    if switches.stage2_layers and switches.stage2_input == "concat":
        shapes["fusion2.weight"] = (h, 2 * h)
    return shapes


class Amphista(StaticHeads):
    """Drafts a fixed tree with heads that see each other, over causal layers of their own."""

    name = "amphista"
    lossless = "yes"
    paper = "Li et al. 2025, Amphista, arXiv 2406.13170"
    Config = StaticConfig

    def __init__(self, config: StaticConfig):
        super().__init__(config)
        self._slots: dict[int, int] = {}
        self._last: dict[int, torch.Tensor] = {}

    def open(self, target: Facts) -> int:
        path = self.config.checkpoint
        target = self.target = native(target, self.name)
        config, tensors = open_drafter(path, self.name, target)
        try:
            switches = self.switches = Switches.read(config.get("network", {}))
        except MethodError as error:
            raise MethodError(f"{path}: {error}") from None
        s = target.shape
        network = JointHeads(switches, s.hidden_size, s.num_heads, s.intermediate_size, s.eps)
        shapes = adaptation_shapes(switches, target)
        shapes |= {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        if switches.own_heads:
            shapes |= {f"lm_heads.{k}.weight": (s.vocab_size, s.hidden_size) for k in range(switches.heads)}
        check_all(path, tensors, shapes)
        here = in_dtype(target, tensors)
        self.adaptation = Adaptation(switches, here, target)
        self.network = load_module(network, tensors, target)
        self._own = (
            [Linear(here[f"lm_heads.{k}.weight"]) for k in range(switches.heads)] if switches.own_heads else None
        )
        self.weight_bytes = sum(tensor.nbytes for name, tensor in here.items() if not name.startswith("lm_heads"))
        layer = BEFORE_NORM if switches.tap == "pre_norm" else target.num_layers
        self.pending = Pending(target, (layer,))
        self.needs = Needs(hidden_layers=(layer,))
        return switches.heads

    def output_heads(self) -> Sequence[Linear] | None:
        return self._own

    def start(self, row: Request) -> None:
        self._slots[row.id] = self.adaptation.cache.add_row(row.expected_length)
        self.pending.start(row)

    def drop(self, row: Request) -> None:
        if row.id in self._slots:
            self.adaptation.cache.drop_row(self._slots.pop(row.id))
        self.pending.drop(row)
        self._last.pop(row.id, None)

    def able(self, row: Request) -> bool:
        return row.id in self._last or self.pending.count(row) > 0

    def states(self, rows: Sequence[Request]) -> torch.Tensor:
        """What the adaptation makes of each row's last committed state, after it has read all that waited."""
        waiting = [row for row in rows if self.pending.count(row)]
        if waiting:
            counts = [self.pending.count(row) for row in waiting]
            made = self._adapt(waiting, [self.pending.of(row) for row in waiting])
            for row, count, of_row in zip(waiting, counts, made.split(counts), strict=True):
                self.pending.read(row, count)
                self._last[row.id] = of_row[-1].clone()
        return torch.stack([self._last[row.id] for row in rows])

    @torch.inference_mode()
    def _adapt(self, rows: Sequence[Request], states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the adaptation over the next states of rows, [n, H] each, and commit them; [sum(n), H]."""
        own, following, segments = [], [], []
        for row, of_row in zip(rows, states, strict=True):
            slot = self._slots[row.id]
            begin, count = self.adaptation.cache.length(slot), len(of_row)
            own.append(row.tokens[begin : begin + count])
            following.append(row.tokens[begin + 1 : begin + count + 1])
            segments.append(Segment.chunk(slot, own[-1], last=False))
        at, after = (torch.from_numpy(np.concatenate(side)).to(self.target.device) for side in (own, following))
        made = self.adaptation(torch.cat(list(states)), at, after, segments)
        for row, of_row in zip(rows, states, strict=True):
            self.adaptation.cache.commit(self._slots[row.id], range(len(of_row)))
        return made

    def guess(self, states: torch.Tensor, roots: IntArray, size: int) -> IntArray:
        return self.fill_table(self._read(states), roots, size)

    def _read(self, states: torch.Tensor) -> torch.Tensor:
        """What the output head reads, [N, depth, H], from adapted states [N, H]."""
        read: torch.Tensor = self.network(states)
        if self.switches.tap == "post_norm":
            return read
        return self.target.ops.norm(read.flatten(0, 1), self.target.norm).view(read.shape)

    def read_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        cache = self.adaptation.cache
        slot = cache.add_row(len(tokens))
        ids = torch.from_numpy(np.append(tokens, 0)).to(self.target.device)
        segment = Segment.chunk(slot, tokens, last=False)
        adapted = self.adaptation(states, ids[:-1], ids[1:], [segment])
        cache.drop_row(slot)
        return self._read(adapted)

    def observe(self, round: Round) -> None:
        """Take the states of what was committed, whoever drafted it; of long prompts most are read at once."""
        self.pending.add(round)
        for row in round.rows:
            for states in self.pending.chunks(row):
                self._adapt([row], [states])
