"""kangaroo: the target's own first layers, a small adapter and the target's head draft for it.

Liu et al. 2024, "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting" (arXiv 2404.18911). A draft
leaves the network after layer l (the first exit) and through the adapter; it ends where the draft is no longer sure
(the second, the stop rule `confidence`). Nothing is run twice: the early states of the drafted tokens are handed to
the target, whose `verify` goes on from layer l.

Two caches. The target's holds the first layers' keys and values of a draft before it is verified, and the engine
commits them with the rest; the adapter has one of its own. The adapter never sees the last token of a draft, so after
a draft that was accepted whole, or drafted by someone else, committed tokens wait for it: their early states, taken
from the target's forward, are `pending`, and so are a prompt's.

Where we differ from the published method and why: docs/methods/kangaroo.md.

    Engine("models/demo", draft="kangaroo:build/kangaroo,threshold=0.4")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.draft.neural import stop
from paceline.draft.neural.checkpoint import check_all, open_drafter
from paceline.draft.neural.drafts import Draft, segments
from paceline.draft.neural.layers import PRECISION, Precision, nbytes, placed
from paceline.draft.neural.pending import Pending, StateReader
from paceline.draft.neural.stepping import Stepping, SteppingConfig
from paceline.draft.neural.vocab import kept_tokens
from paceline.draft.spec import option
from paceline.engine.request import Request
from paceline.engine.round import Segment
from paceline.engine.tree import DraftTree
from paceline.errors import MethodError
from paceline.target.attention import Attention, attention_shapes, begin
from paceline.target.base import Facts, Needs
from paceline.target.decoder import Decoder
from paceline.target.quantised.blocks import tensors_of
from paceline.target.shape import Shape


@dataclass(frozen=True, kw_only=True)
class KangarooConfig(SteppingConfig):
    """Options of `kangaroo`."""

    checkpoint: str = option(help="folder of the adapter, as `paceline train` wrote it")
    stop: stop.Name = option("confidence", "when to stop; paper: below confidence 0.6, after 6 tokens at most")
    dtype: Precision = option("auto", PRECISION)


def adapter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and shape of the adapter's tensors for a target of that shape: attention and two norms, no MLP. 4 h^2 + 2 h
    numbers where every head has keys of its own."""
    norm = (shape.hidden_size,)
    return {"input_norm.weight": norm, **attention_shapes(shape), "output_norm.weight": norm}


class Adapter:
    """norm(f + attention(norm(f))) over early states f, on a ragged cache of its own; the target's head reads it.

    weights  as `adapter_shapes` lists them; they are cast to the target's dtype on its device."""

    def __init__(self, weights: Mapping[str, torch.Tensor], target: Decoder, dtype: Precision = "auto"):
        here = placed(weights, target, dtype)
        self.nbytes, norms = nbytes(here), tensors_of(here)
        self.attention = Attention(here, target.shape, target.ops)
        self.input_norm, self.output_norm = norms["input_norm.weight"], norms["output_norm.weight"]
        self.cache = target.new_cache(1)

    @torch.inference_mode()
    def __call__(self, states: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """Over early states [N, H] of the segments' nodes that are to be run; [M, H] for the nodes whose logits are
        wanted. Nothing is committed."""
        ops = self.attention.ops
        layout, cache = begin(segments, self.cache, self.attention.shape, ops, states)
        delta = self.attention(ops.norm(states, self.input_norm), layout, cache, 0)
        _, y = ops.add_norm(states, delta, self.output_norm)
        return y if layout.wanted is None else y[layout.wanted]


class Kangaroo(StateReader, Stepping):
    """Drafts with the target's own first layers and a small trained adapter; the target goes on from their states."""

    name = "kangaroo"
    lossless = "yes"
    paper = "Liu et al. 2024, Kangaroo, arXiv 2404.18911"
    Config = KangarooConfig

    def __init__(self, config: KangarooConfig):
        super().__init__(config)
        self.config = config

    def bind(self, target: Facts) -> None:
        """Load the adapter. MethodError if the target cannot be cut in two, or the adapter is not for it."""
        super().bind(target)
        path = self.config.checkpoint
        if not isinstance(target, Decoder):
            raise MethodError(
                f"{self.name} goes on in the middle of a forward, and {target.name} runs in transformers: "
                "it needs a model of a family that the native decoder runs, or another drafter"
            )
        config, weights = open_drafter(path, self.name, target)
        self.exit = exit_layer(path, config, target.num_layers)
        check_all(path, weights, adapter_shapes(target.shape))
        self.target = target
        self.adapter = Adapter(weights, target, self.config.dtype)
        self.pending = Pending(target, (self.exit,), self.adapter.cache)
        self.needs = Needs(hidden_layers=(self.exit,), resume_layer=self.exit)
        self.head = target.head
        if self.config.vocab is not None:
            self.columns = kept_tokens(self.config.vocab, path, target)
            self.head = target.head.rows(self.columns)
        rows = target.vocab_size if self.columns is None else len(self.columns)
        early = sum(block.nbytes for block in target.blocks[: self.exit])
        self.weight_bytes = early + self.adapter.nbytes + rows * target.head_bytes // target.vocab_size

    def cached(self, row: Request) -> int:
        return self.pending.cached(row)

    def run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        """The first exit: the adapter over early states, those that wait and those that the target's first layers make
        of the nodes now."""
        states = []
        for draft, early in zip(drafts, self._run_early(drafts), strict=True):
            states += [early] if draft.done else [self.pending.of(draft.row), early]
        return self.head(self.adapter(torch.cat(states), segments(drafts, num_logits, self.pending.slot)))

    def _run_early(self, drafts: Sequence[Draft]) -> Sequence[torch.Tensor]:
        """The target's first layers over the nodes of every draft that they have not seen, [nodes, H] each: from the
        root on, for what is before it the target has committed."""
        early = []
        for draft in drafts:
            root = draft.known - 1
            tokens, parent = np.array(draft.tokens[root:]), np.array(draft.parent[root:]) - root
            early.append(Segment(draft.row.slot, tokens, parent, start=max(draft.done - root, 0)))
        states = self.target.run_layers(early, self.exit).split([segment.num_run for segment in early])
        for draft, of_row in zip(drafts, states, strict=True):
            draft.features.append(of_row)
        return states

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        """Draft, and give every tree the early states of its nodes.

        Nodes that were never expanded, a chain's last token and a tree's leaves, are verified too, so they are run
        now; and the keys and values of a tree's nodes are brought into its order, in which the target commits them."""
        trees = super().propose(rows)
        drafts = list(self._drafts.values())
        orders = [order_of_tree(draft) for draft in drafts]
        late = [draft for draft in drafts if draft.done < len(draft.tokens)]
        if late:
            self._run_early(late)
        for draft, order in zip(drafts, orders, strict=True):
            assert draft.tree is not None
            self.target.arrange(draft.row.slot, order)
            draft.tree.hidden = torch.cat(draft.features)[order]
        return trees

    def keep(self, draft: Draft, nodes: Sequence[int]) -> None:
        self.pending.cache.commit(self.pending.slot(draft.row), nodes)
        self.pending.read(draft.row, len(nodes))

    def read_chunk(self, row: Request, states: torch.Tensor) -> None:
        tokens = np.zeros(len(states), np.int64)  # the adapter reads none
        self.adapter(states, [Segment.chunk(self.pending.slot(row), tokens, last=False)])
        self.pending.cache.commit(self.pending.slot(row), range(len(states)))


def order_of_tree(draft: Draft) -> list[int]:
    """For every node of the draft's tree its number in the draft, counted from the root. A tree's leaves, which the
    draft does not have, are added to it; a chain's last token it has."""
    assert draft.tree is not None
    root = draft.known - 1
    order: list[int] = []
    spare = iter(range(draft.done, len(draft.tokens)))
    for token, parent, number in zip(
        draft.tree.tokens.tolist(), draft.tree.parent.tolist(), draft.numbers, strict=True
    ):
        number = next(spare, None) if number is None else number
        if number is None:
            number = len(draft.tokens)
            draft.add(token, root + order[parent])
        order.append(number - root)
    return order


def exit_layer(path: str, config: Mapping[str, Any], num_layers: int) -> int:
    """The exit layer that a checkpoint names; MethodError unless layers are left after it."""
    layer = config.get("exit_layer")
    if not isinstance(layer, int) or not 0 <= layer < num_layers:
        raise MethodError(
            f"{path} leaves the target after layer {layer!r}, and the target has {num_layers}: "
            f"an exit layer is 0 to {num_layers - 1}; train the adapter again"
        )
    return layer
