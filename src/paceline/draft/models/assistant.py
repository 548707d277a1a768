"""AssistantModel: a Gemma 4's assistant, which drafts with its target's keys and values.

A node reads its token's embedding and a state: the root that of the last token that the target has run, others what
their parent made. It sees the row's committed tokens and no other node, and all nodes of a draft are at the root's
position. So a branch costs no memory, and nothing waits to be read: the target's last state is all that a draft begins
with (Google 2026; transformers 5.23: gemma4_assistant)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from paceline.core.request import Request
from paceline.core.round import Round
from paceline.core.segment import Segment
from paceline.draft.models.draft_model import ANY, Draft, DraftModel
from paceline.draft.models.layers import native, nbytes, placed
from paceline.draft.models.states import FeatureConfig, head_of
from paceline.errors import MethodError
from paceline.formats.facts import Facts, Inside
from paceline.formats.heads.assistant import CENTROIDS, HEAD, ORDER, Assistant, read_assistant
from paceline.kernels.blocks import tensors_of, within
from paceline.kernels.linear import Linear, linear
from paceline.kernels.ops import Pair
from paceline.target.attention import Layer, begin
from paceline.target.base import Needs


class ClusteredHead:
    """An output head that makes logits of the tokens in the likeliest clusters. Those of other tokens are -inf.

    table  [V, H]. centroids: [C, H]. order: tokens int64 [V], cluster by cluster. best: number of clusters."""

    def __init__(self, table: torch.Tensor, centroids: torch.Tensor, order: torch.Tensor, best: int):
        self.order, self.best, self.centroids = order.long().view(len(centroids), -1), best, centroids
        self.table = table[self.order]
        self.nbytes = centroids.nbytes + table.nbytes * best // len(centroids)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] for states [N, H]."""
        chosen = (states @ self.centroids.T).topk(self.best).indices
        near = (self.table[chosen].flatten(1, 2) @ states[:, :, None])[..., 0]
        logits = near.new_full((len(states), self.order.numel()), -torch.inf, dtype=torch.float32)
        return logits.scatter_(1, self.order[chosen].flatten(1), near.float())


class AssistantNetwork:
    """Layers that read the target's keys and values, between two products that change the width of states.

    head     its output head. columns: None, it has all tokens. nbytes: bytes of weights that a forward reads, without
             the output head.
    sources  for each layer, the place in the target's cache of the layer whose keys and values it reads."""

    columns = None

    def __init__(self, found: Assistant, target: Inside, config: FeatureConfig):
        if found.best and config.vocab is not None:
            raise MethodError(f"vocab={config.vocab}: the head of {config.checkpoint} reads the likeliest tokens alone")
        table = found.tensors[HEAD]
        whole = {} if found.best else {HEAD: table}
        own = {name: one for name, one in found.tensors.items() if name not in (HEAD, CENTROIDS, ORDER)}
        here = placed(own | whole, target, config.dtype)
        self.target, self.shape = target, found.shape
        self.norm, self.nbytes = tensors_of(here)["norm.weight"], nbytes(here, HEAD)
        products = [here[f"{part}_projection.weight"] for part in ("pre", "post")]
        self.before, self.after = (linear([weight], None, target.dtype) for weight in products)
        sources = [kind.source or 0 for kind in found.shape.layers]
        self.sources = [sum(kind.has_keys for kind in target.shape.layers[:source]) for source in sources]
        every = [type(target.ops)(target.layers[source].ops.turns, found.shape.eps) for source in sources]
        self.layers = [
            Layer(within(here, f"layers.{number}."), found.shape, ops, kind, number)
            for number, (kind, ops) in enumerate(zip(found.shape.layers, every, strict=True))
        ]
        self.ops = every[0]
        if found.best:
            kept = {name: one.to(target.device) for name, one in tensors_of(found.tensors).items()}
            table, centroids, order = kept[HEAD].to(target.dtype), kept[CENTROIDS].to(target.dtype), kept[ORDER]
            self.head: Linear | ClusteredHead = ClusteredHead(table, centroids, order, found.best)
        else:
            self.head = linear([here[HEAD]], None, target.dtype, wide=True)

    @torch.inference_mode()
    def forward(self, states: torch.Tensor, segments: Sequence[Segment]) -> Pair:
        """Run the segments' nodes, given the states [N, target's H] that they read. Returns the states of the same size
        that their children read, and the output head's input [M, H] for the nodes whose logits are wanted."""
        tokens = torch.from_numpy(np.concatenate([segment.tokens for segment in segments])).to(states.device)
        x, delta = self.before(torch.cat([self.target.embedded(tokens), states], -1)), None
        windows = [kind.window for kind in self.shape.layers]
        layout, cache = begin(segments, self.target.cache, self.shape, self.ops, states, windows, self.ops.compiled)
        self.target.reach(max(layout.reach.values()))
        for layer, source in zip(self.layers, self.sources, strict=True):
            x, delta = layer(x, delta, layout, cache, source)
        _, y = self.ops.add_norm(x, delta, self.norm)
        return self.after(y), y if layout.wanted is None else y[layout.wanted]


class AssistantModel(DraftModel):
    """An assistant that drafts for a target. Of each row it keeps the target's last state."""

    def __init__(self, path: Path, config: FeatureConfig, target: Facts):
        inside = native(target, "A Gemma 4's assistant reads its target's keys and values", "another drafter")
        config = replace(config, checkpoint=str(path))
        self.network = AssistantNetwork(read_assistant(path, inside), inside, config)
        self.head, self.columns = head_of(self.network, config, target)
        self.vocab_size, self.layer = target.vocab_size, target.num_layers
        self.needs = Needs(new_layers=(self.layer,))
        self.weight_bytes = self.network.nbytes + self.head.nbytes
        self._last: dict[int, torch.Tensor] = {}  # by row id: state [1, H] of the last token that the target ran
        self._made: dict[int, torch.Tensor] = {}  # by row id: states [n, H] that the nodes of its draft made

    def start(self, row: Request) -> None:
        """Does nothing: `feed` brings the first state."""

    def drop(self, row: Request) -> None:
        for of_row in (self._last, self._made, self.ran):
            of_row.pop(row.id, None)

    def slot(self, row: Request) -> int:
        return row.slot

    def length(self, row: Request) -> int:
        return len(row) - 1

    def room(self, row: Request) -> int:
        return ANY if row.id in self._last else 0

    def extend(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        states = [self._last[d.row.id] if not self.ran[d.row.id] else self._of_parents(d) for d in drafts]
        new = [np.array(draft.tokens[self.ran[draft.row.id] :]) for draft in drafts]
        parts = [Segment.apart(d.row.slot, own, count) for d, own, count in zip(drafts, new, num_logits, strict=True)]
        out, read = self.network.forward(torch.cat(states), parts)
        for draft, made in zip(drafts, out.split([len(own) for own in new]), strict=True):
            before = [self._made[draft.row.id]] if self.ran[draft.row.id] else []
            self._made[draft.row.id] = torch.cat([*before, made])
        return self.head(read)

    def _of_parents(self, draft: Draft) -> torch.Tensor:
        return self._made[draft.row.id][draft.parent[self.ran[draft.row.id] :]]

    def commit(self, draft: Draft, nodes: Sequence[int]) -> None:
        """Does nothing: drafted nodes leave nothing behind."""

    def feed(self, round: Round) -> None:
        for i, row in enumerate(round.rows):
            self._last[row.id] = round.committed(i, self.layer)[-1:]
