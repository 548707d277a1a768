"""kangaroo: the target's own first layers, a small adapter and the target's head draft.

Liu et al. 2024, "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting" (arXiv 2404.18911). Drafted
tokens leave the target after layer l (the first exit), through the adapter; the draft ends where the adapter is no
longer sure (the second exit, the stop rule `confidence`). Nothing runs twice: `verify` goes on from layer l.

A draft's keys and values of the first layers are in the target's cache before it is verified; the engine commits them
with the others. The adapter has its own cache. Early states of committed tokens that it has not run wait in `pending`:
those of a prompt, of a draft's last token, and of tokens that other drafters drafted.

Where we differ from the published method and why: docs/methods/kangaroo.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.core.options import option
from paceline.core.request import Request
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree, IntArray
from paceline.draft.models import stop
from paceline.draft.models.draft_model import Draft, DraftModel
from paceline.draft.models.layers import PRECISION, Precision, native, nbytes, placed
from paceline.draft.models.model_drafter import ModelDrafter, ModelDrafterConfig
from paceline.draft.models.proposers import Proposal, Proposer
from paceline.draft.models.states import StatesModel
from paceline.errors import MethodError
from paceline.formats.facts import Facts, Inside
from paceline.formats.heads.checkpoint import check_all, open_drafter
from paceline.formats.shape import Shape
from paceline.kernels.blocks import tensors_of
from paceline.target.attention import Attention, attention_shapes, begin
from paceline.target.base import Needs


@dataclass(frozen=True, kw_only=True)
class KangarooConfig(ModelDrafterConfig):
    checkpoint: str = option(help="folder of the adapter, as `paceline train` wrote it")
    stop: stop.Name = option("confidence", "when to stop; paper: below confidence 0.6, after 6 tokens at most")
    dtype: Precision = option("auto", PRECISION)


def adapter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the adapter's tensors for a target of this shape: attention and two norms, no MLP."""
    norm = (shape.hidden_size,)
    return {"input_norm.weight": norm, **attention_shapes(shape), "output_norm.weight": norm}


class Adapter:
    """norm(f + attention(norm(f))) over early states f, with its own cache. The target's head reads the output.

    weights  tensors by the names in `adapter_shapes`."""

    def __init__(self, weights: Mapping[str, torch.Tensor], target: Inside, dtype: Precision = "auto"):
        here = placed(weights, target, dtype)
        self.nbytes, norms = nbytes(here), tensors_of(here)
        self.attention = Attention(here, target.shape, target.ops)
        self.input_norm, self.output_norm = norms["input_norm.weight"], norms["output_norm.weight"]
        self.cache = target.new_cache(1)

    @torch.inference_mode()
    def __call__(self, states: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """Run the segments' nodes, given their early states [N, H]. Returns states [M, H] of the nodes whose logits are
        wanted."""
        ops = self.attention.ops
        layout, cache = begin(segments, self.cache, self.attention.shape, ops, states)
        delta = self.attention(ops.norm(states, self.input_norm), layout, cache, 0)
        _, y = ops.add_norm(states, delta, self.output_norm)
        return y if layout.wanted is None else y[layout.wanted]


class EarlyModel(StatesModel):
    """The first exit: the target's first layers run drafted tokens, and the adapter reads their early states.

    early  by row id: early states of the draft's nodes, from the root on."""

    def __init__(self, adapter: Adapter, exit: int, target: Inside, config: KangarooConfig):
        super().__init__(target, (exit,), adapter.cache, self.run_head)
        self.needs = Needs(hidden_layers=(exit,), resume_layer=exit)
        self.adapter, self.exit, self.target, self.head = adapter, exit, target, target.head
        if config.vocab is not None:
            from paceline.formats.heads.vocab import kept_tokens

            self.columns = kept_tokens(config.vocab, config.checkpoint, target)
            self.head = target.head.rows(self.columns)
        early = sum(layer.nbytes for layer in target.layers[:exit])
        self.weight_bytes = early + adapter.nbytes + self.head.nbytes
        self.early: dict[int, list[torch.Tensor]] = {}

    def begin(self, row: Request, most: int = 0) -> Draft:
        self.early[row.id] = []
        return super().begin(row, most)

    def drop(self, row: Request) -> None:
        super().drop(row)
        self.early.pop(row.id, None)

    def extend(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        states = []
        for draft, early in zip(drafts, self.run_early(drafts), strict=True):
            states += [early] if self.ran[draft.row.id] else [self.pending.of(draft.row), early]
        return self.head(self.adapter(torch.cat(states), self.segments(drafts, num_logits)))

    def run_early(self, drafts: Sequence[Draft]) -> Sequence[torch.Tensor]:
        """Run the target's first layers over each draft's new nodes, from the root on. Returns states [nodes, H] for
        each draft."""
        early = []
        for draft in drafts:
            root = draft.num_committed - 1
            tokens, parent = np.array(draft.tokens[root:]), np.array(draft.parent[root:]) - root
            early.append(Segment(draft.row.slot, tokens, parent, start=sum(map(len, self.early[draft.row.id]))))
        states = self.target.run_layers(early, self.exit).split([segment.num_run for segment in early])
        for draft, of_row in zip(drafts, states, strict=True):
            self.early[draft.row.id].append(of_row)
        return states

    def commit(self, draft: Draft, nodes: Sequence[int]) -> None:
        self.pending.cache.commit(self.pending.slot(draft.row), nodes)

    def run_head(self, states: torch.Tensor, following: IntArray, segments: Sequence[Segment]) -> torch.Tensor:
        return self.adapter(states, segments)


class WithStates:
    """Gives another proposer's trees the early states of all their nodes, from which the target goes on.

    A chain's last token and a tree's leaves were not run while drafting, so they are run now. Keys and values are put
    into the tree's order, in which the target commits them."""

    def __init__(self, proposer: Proposer, model: EarlyModel):
        self.proposer, self.model = proposer, model

    def propose(self, drafts: Sequence[Draft]) -> list[Proposal]:
        proposals, ran = self.proposer.propose(drafts), self.model.ran
        orders = [order_of_tree(draft, *of, ran[draft.row.id]) for draft, of in zip(drafts, proposals, strict=True)]
        late = [draft for draft in drafts if ran[draft.row.id] < len(draft.tokens)]
        if late:
            self.model.run_early(late)
        for draft, (tree, _), order in zip(drafts, proposals, orders, strict=True):
            self.model.target.cache.arrange(draft.row.slot, order)
            tree.hidden = torch.cat(self.model.early[draft.row.id])[order]
        return proposals


class Kangaroo(ModelDrafter):
    """Drafts with the target's own first layers and a small trained adapter; the target goes on from their states."""

    name = "kangaroo"
    paper = "Liu et al. 2024, Kangaroo, arXiv 2404.18911"
    Config = KangarooConfig
    config: KangarooConfig
    model: EarlyModel

    def open(self, target: Facts) -> EarlyModel:
        """Load the adapter. MethodError if the target does not run natively, or the adapter is for another target."""
        path = self.config.checkpoint
        inside = native(target, "kangaroo goes on in the middle of a forward", "another drafter")
        config, weights = open_drafter(path, self.name, target)
        exit = exit_layer(path, config, target.num_layers)
        check_all(path, weights, adapter_shapes(inside.shape))
        return EarlyModel(Adapter(weights, inside, self.config.dtype), exit, inside, self.config)

    def proposer_of(self, model: DraftModel) -> Proposer:
        return WithStates(super().proposer_of(model), self.model)


def order_of_tree(draft: Draft, tree: DraftTree, nodes: Sequence[int | None], ran: int) -> list[int]:
    """The number in the draft, counted from the root, of each node of the tree. Nodes that the draft lacks are added.

    nodes  as in `Proposal`. ran: number of the draft's nodes that were run."""
    root = draft.num_committed - 1
    order: list[int] = []
    spare = iter(range(ran, len(draft.tokens)))
    for token, parent, number in zip(tree.tokens.tolist(), tree.parent.tolist(), nodes, strict=True):
        number = next(spare, None) if number is None else number
        if number is None:
            number = len(draft.tokens)
            draft.add(token, root + order[parent])
        order.append(number - root)
    return order


def exit_layer(path: str, config: Mapping[str, Any], num_layers: int) -> int:
    """Read the exit layer from a checkpoint's config. MethodError unless the target has layers after it."""
    layer = config.get("exit_layer")
    if not isinstance(layer, int) or not 0 <= layer < num_layers:
        why = f"leaves the target after layer {layer!r}, and an exit layer is 0 to {num_layers - 1}"
        raise MethodError(f"{path} {why}; train the adapter again")
    return layer
