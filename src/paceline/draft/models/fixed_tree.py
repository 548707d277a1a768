"""Trees of fixed shape that heads fill: the model, the proposer, the drafter, and the interface of heads.

Heads guess the tokens of all nodes of a template from the state of a row's last token. The node of rank r at depth d
gets the r-th likeliest token of head d; at a temperature the row's noise ranks the tokens. Knows no method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from paceline.core.options import Options, option
from paceline.core.request import Request
from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.draft import shapes
from paceline.draft.base import tree_below
from paceline.draft.likeliest import ranked
from paceline.draft.models import stop
from paceline.draft.models.draft_model import ANY, Draft
from paceline.draft.models.layers import PRECISION, Precision
from paceline.draft.models.model_drafter import VOCAB, ModelDrafter
from paceline.draft.models.proposers import Proposal
from paceline.draft.models.states import StatesModel
from paceline.draft.shapes import RankPath, Template
from paceline.errors import MethodError
from paceline.formats.facts import Facts
from paceline.formats.heads.layout import table_and_head
from paceline.formats.heads.vocab import kept_rows
from paceline.kernels.linear import Linear
from paceline.kernels.rows import top_tokens
from paceline.target.cache import RaggedCache

RANKS = 10
"""Largest number of candidates of each depth, unless a file of paths asks for more."""

Best = Callable[[torch.Tensor, int], IntArray]
"""best(read, k): the likeliest tokens of depth k, int64 [N, ranks], best first. read: inputs [N, H] of the output head
of depth k; each row has the same number of them."""


@dataclass(frozen=True, kw_only=True)
class FixedTreeConfig(Options):
    """Options of drafters whose heads fill a tree of fixed shape."""

    checkpoint: str = option(help="folder of the heads, ours or published ones; or their file of weights")
    tree: int | str = option(16, "number of drafted nodes, or a file of paths", least=1)
    vocab: str | None = option(None, VOCAB)
    dtype: Precision = option("auto", PRECISION)


class Heads:
    """Base of heads, bound to a target. A method's subclass is its paper's network.

    depth    number of heads, the largest depth of a draft.
    layer    layer whose states the heads read (`Needs.hidden_layers`).
    nbytes   bytes of weights that a draft reads, without output heads.
    outputs  output heads of their own, one for each depth; None: the target's output head for all.
    tokens   tokens int64 [K] of the output heads' columns; None: all tokens.
    cache    cache of their own layers over committed text; None: they have no layers."""

    depth: int
    layer: int
    nbytes: int
    outputs: Sequence[Linear] | None = None
    tokens: IntArray | None = None
    cache: RaggedCache | None = None

    def run_head(self, states: torch.Tensor, following: IntArray, segments: Sequence[Segment]) -> torch.Tensor:
        """Run the heads' own layers over the target's states [N, H] of committed tokens. Nothing is committed.

        following  int64 [N], the token after each state. segments: the states' positions and tokens.

        Returns the states [N, H] from which the heads draft."""
        return states

    def inputs(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """The output heads' inputs [N, depths, H] for at least the first `depth` depths.

        Heads that read drafted tokens do not implement this."""
        raise NotImplementedError

    def guess(self, states: torch.Tensor, roots: IntArray, tree: Template, best: Best) -> IntArray:
        """Guess the tokens of the tree's nodes, int64 [R, nodes], from states [R, H].

        roots  int64 [R], the first column. In this base class all nodes of a depth have the same candidates."""
        depth = len(tree.levels) - 1
        read = self.inputs(states, depth)
        table = np.stack([best(read[:, k], k) for k in range(depth)], 1)
        return np.concatenate([roots[:, None], table[:, tree.depth[1:] - 1, tree.rank[1:]]], 1)

    def read_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        """The output heads' inputs [T, depth, H] at every position of a text, to measure the heads' accuracy.

        tokens  int64 [T]; tokens after the end count as 0. states: output [T, H] of `run_head`."""
        return self.inputs(states, self.depth)


class HeadsModel(StatesModel):
    """Heads that guess the tokens of a tree from the state of a row's last token.

    outputs  the heads' own output heads, or the target's, reduced to the tokens that the option `vocab` keeps.
    columns  tokens int64 [K] of the output heads' columns; None: all tokens.
    folder   folder of the heads and of slots.json."""

    def __init__(self, heads: Heads, config: FixedTreeConfig, folder: Path, target: Facts):
        super().__init__(target, (heads.layer,), heads.cache, heads.run_head)
        self.heads, self.folder = heads, folder
        head = table_and_head(target)[1]
        self.outputs = [head] * heads.depth if heads.outputs is None else list(heads.outputs)
        self.tokens = heads.tokens
        if config.vocab is not None:
            self._trim(config.vocab, target)
        self.num_tokens = target.vocab_size if self.tokens is None else len(self.tokens)
        self.use_ranks()
        self.weight_bytes = heads.nbytes + sum(output.nbytes for output in set(self.outputs))

    def _trim(self, vocab: str, target: Facts) -> None:
        """Reduce the output heads to the tokens that the option `vocab` keeps. A shared head stays shared."""
        own = None if self.tokens is None else torch.from_numpy(self.tokens)
        rows, tokens = kept_rows(own, vocab, self.folder, target)
        trimmed = {output: output.rows(rows) for output in set(self.outputs)}
        self.outputs, self.tokens = [trimmed[output] for output in self.outputs], tokens.cpu().numpy()

    def use_ranks(self, ranks: int = RANKS) -> None:
        """Let `candidates` return `ranks` tokens, or all if there are fewer."""
        self.ranks = min(ranks, self.num_tokens)

    def room(self, row: Request) -> int:
        return ANY if self.pending.count(row) else 0  # 0: the target has run nothing of it yet

    def commit(self, draft: Draft, nodes: Sequence[int]) -> None:
        """Does nothing: `guess` has committed the states that waited, and no drafted node was run."""

    @torch.inference_mode()
    def guess(self, rows: Sequence[Request], tree: Template) -> IntArray:
        """Guess the tokens of the tree's nodes, int64 [R, nodes]. The first column has the rows' last tokens."""
        made = self.pending.read_waiting(rows)
        states, roots = torch.stack([made[row.id][-1] for row in rows]), [row.last_token for row in rows]
        return self.heads.guess(states, np.array(roots), tree, partial(self.candidates, rows=rows))

    def candidates(self, read: torch.Tensor, k: int, rows: Sequence[Request] = ()) -> IntArray:
        """The likeliest tokens of depth k, as in `Best`: by the noise of `rows` that sample, else by probability."""
        logits = self.outputs[k](read)
        best: IntArray = top_tokens(logits, self.ranks)[1].cpu().numpy()
        each = len(logits) // max(len(rows), 1)
        for i, row in enumerate(rows):
            if not row.params.is_greedy:
                own = slice(i * each, (i + 1) * each)
                best[own] = ranked(row, [row.num_new + k] * each, logits[own], self.ranks, self.tokens)
        return best if self.tokens is None else self.tokens[best]

    def read_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        """`Heads.read_text` for the target's states [T, H]; nothing is committed."""
        slot = self.pending.cache.add_row(len(tokens))
        made = self.heads.run_head(states, np.append(tokens[1:], 0), [Segment.chunk(slot, tokens, last=False)])
        self.pending.cache.drop_row(slot)
        return self.heads.read_text(tokens, made)


class FixedTree:
    """Proposes trees of one shape, without the nodes below tokens that end the answer."""

    def __init__(self, model: HeadsModel, template: Template):
        self.model, self.template = model, template

    def propose(self, drafts: Sequence[Draft]) -> list[Proposal]:
        if not drafts:
            return []
        sizes = [self.template.within(draft.most) for draft in drafts]
        guessed = self.model.guess([draft.row for draft in drafts], self.template.first(max(sizes)))
        filled = zip(drafts, guessed, sizes, strict=True)
        return [self._tree(draft.row, of_row[:size]) for draft, of_row, size in filled]

    def _tree(self, row: Request, guessed: IntArray) -> Proposal:
        tree = tree_below(row, guessed[1:], self.template.parent[1 : len(guessed)])
        return Proposal(tree, [None] * len(tree))


class HeadsDrafter(ModelDrafter):
    """Base of drafters that draft a tree of fixed shape with heads.

    Network  class of the heads: Network(options, target), which raises MethodError if they do not fit.
    folder   folder of the heads."""

    Config: ClassVar[type[FixedTreeConfig]] = FixedTreeConfig
    Network: ClassVar[type[Any]]
    config: FixedTreeConfig
    model: HeadsModel
    proposer: FixedTree

    def __init__(self, config: FixedTreeConfig):
        super().__init__(config, stop.Fixed(ANY))
        path = Path(config.checkpoint).expanduser()
        self.folder = path if path.is_dir() else path.parent

    def open(self, target: Facts) -> HeadsModel:
        """Load the heads. MethodError if they are not for this target."""
        return HeadsModel(self.Network(self.config, target), self.config, self.folder, target)

    def proposer_of(self, model: HeadsModel) -> FixedTree:  # type: ignore[override]
        """Make the proposer of the tree that the options ask for. MethodError for a file without one."""
        template = self._template(model)
        model.use_ranks(int(template.rank.max()) + 1)
        return FixedTree(model, template)

    def _template(self, model: HeadsModel) -> Template:
        tree, depth, ranks = self.config.tree, model.heads.depth, min(RANKS, model.num_tokens)
        if isinstance(tree, int):
            return shapes.compile_template(_paths(model.folder, tree, depth, ranks), ranks)
        template = shapes.template_of(tree, model.num_tokens, self.name, "a number")
        if (deepest := int(template.depth[-1])) > depth:
            raise MethodError(f"{self.name}: the tree {tree} is {deepest} deep, and {model.folder} has {depth} heads")
        return template


def _paths(folder: Path, count: int, depth: int, ranks: int) -> list[RankPath]:
    """The `count` paths that are likeliest right, by the accuracies measured for the heads in `folder`, or by published
    accuracies. Without measured accuracies, 63 paths are the published tree."""
    known, whole = (folder / shapes.SLOTS_FILE).is_file(), shapes.published()
    shares = shapes.read_accuracies(str(folder)) if known else shapes.SLOTS
    if known or count != len(whole):
        return shapes.best_paths([list(row[:ranks]) for row in shares[:depth]], count)
    return [path for path in whole if len(path) <= depth and max(path) < ranks]
