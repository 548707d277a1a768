"""Trees of fixed shape that heads fill: the drafter, and the interface of heads.

From one state a row, and from the root, heads guess the tokens of a template's nodes; the node of rank r at depth d
gets the r-th likeliest token of head d, at a temperature by the row's noise. Knows no method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from paceline.core.clock import seconds_of
from paceline.core.logits import top_tokens
from paceline.core.request import Request
from paceline.core.round import Round
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree, IntArray
from paceline.draft import shapes
from paceline.draft.base import Drafter
from paceline.draft.cost import SIZES, best_size, time_forwards
from paceline.draft.likeliest import ranked
from paceline.draft.models.layers import PRECISION, Precision, table_and_head
from paceline.draft.models.model_drafter import VOCAB
from paceline.draft.models.states import Pending
from paceline.draft.models.vocab import kept_rows
from paceline.draft.options import Options, option
from paceline.draft.shapes import RankPath, Template
from paceline.errors import MethodError
from paceline.target.base import Facts, Needs
from paceline.target.cache import RaggedCache
from paceline.target.linear import Linear

RANKS = 10  # most candidates of each depth, unless a file of paths asks for more

Best = Callable[[torch.Tensor, int], IntArray]
"""best(read, k): the likeliest tokens of depth k, the likeliest first, int64 [N, ranks], from what its output head
reads, [N, H], for each row the same number of places."""


@dataclass(frozen=True, kw_only=True)
class FixedTreeConfig(Options):
    """Options of drafters whose heads fill a tree of fixed shape."""

    checkpoint: str = option(help="folder of the heads, ours or published ones; or their file of weights")
    tree: int | Literal["auto"] | str = option(
        16, "drafted nodes; auto: as many as pay, by measured costs; or a file of paths", least=1
    )
    vocab: str | None = option(None, VOCAB)
    dtype: Precision = option("auto", PRECISION)


class Heads:
    """Base of heads, bound to a target. A method's subclass is its paper's network.

    depth    number of heads, the largest depth of a draft.
    layer    layer whose states they read (`Needs.hidden_layers`).
    nbytes   bytes of weights that a draft reads, without output heads.
    outputs  their own output heads, one for each depth; None: the target's for all.
    tokens   tokens int64 [K] of the output heads' columns; None: all tokens.
    cache    cache of their own layers over committed text; None: they have none."""

    depth: int
    layer: int
    nbytes: int
    outputs: Sequence[Linear] | None = None
    tokens: IntArray | None = None
    cache: RaggedCache | None = None

    def run_head(self, states: torch.Tensor, following: IntArray, segments: Sequence[Segment]) -> torch.Tensor:
        """Run their own layers over the target's states [N, H] of committed tokens. Nothing is committed.

        following  int64 [N], the token after each state. segments: the states' positions and tokens.

        Returns states [N, H], from which they draft."""
        return states

    def inputs(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """The inputs [N, depths, H] of the output heads of the first `depth` depths, or of all, for heads that do not
        read drafted tokens."""
        raise NotImplementedError

    def guess(self, states: torch.Tensor, roots: IntArray, tree: Template, best: Best) -> IntArray:
        """The tokens of the tree's nodes, int64 [R, nodes], from states [R, H]; the first column is `roots` int64 [R].

        Here, all nodes of a depth have the same candidates."""
        depth = len(tree.levels) - 1
        read = self.inputs(states, depth)
        table = np.stack([best(read[:, k], k) for k in range(depth)], 1)
        return np.concatenate([roots[:, None], table[:, tree.depth[1:] - 1, tree.rank[1:]]], 1)

    def read_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        """The inputs [T, depth, H] of the output heads at every position of a text, to measure their accuracy.

        tokens  int64 [T]; tokens after the end count as 0. states: output [T, H] of `run_head`."""
        return self.inputs(states, self.depth)


class FixedTree(Drafter):
    """Drafts a tree of fixed shape that heads fill.

    Network  class of the heads, made of (options, target); MethodError if they do not fit.
    heads    the heads. outputs: their output heads, or the target's, trimmed as the option `vocab` says.
    columns  tokens int64 [K] of the output heads' columns; None: all tokens.
    folder   folder of the heads and of slots.json."""

    lossless = "yes"
    Config: ClassVar[type[FixedTreeConfig]] = FixedTreeConfig
    Network: ClassVar[type[Any]]
    heads: Heads
    template: Template

    def __init__(self, config: FixedTreeConfig):
        self.config = config
        path = Path(config.checkpoint).expanduser()
        self.folder = path if path.is_dir() else path.parent
        self._last: dict[int, torch.Tensor] = {}  # by row: the state [H] that its next draft is made of

    def bind(self, target: Facts) -> None:
        """Load the heads and compile the tree. MethodError if they are not for this target, or the tree is wrong."""
        super().bind(target)
        heads = self.heads = self.Network(self.config, target)
        head = table_and_head(target)[1]
        self.outputs = [head] * heads.depth if heads.outputs is None else list(heads.outputs)
        self.columns = heads.tokens
        if self.config.vocab is not None:
            self._trim(self.config.vocab, target)
        self._tokens = target.vocab_size if self.columns is None else len(self.columns)
        self.weight_bytes = heads.nbytes + sum(output.nbytes for output in set(self.outputs))
        self.pending = Pending(target, (heads.layer,), heads.cache, heads.run_head)
        self.needs = Needs(hidden_layers=(heads.layer,))
        self._lay_out(target)

    def start(self, row: Request) -> None:
        self.pending.start(row)

    def drop(self, row: Request) -> None:
        self.pending.drop(row)
        self._last.pop(row.id, None)

    def observe(self, round: Round) -> None:
        self.pending.feed(round)

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        able = [row for row in rows if row.max_draft > 0 and (row.id in self._last or self.pending.count(row))]
        made: dict[int, DraftTree] = {}
        if able:
            self._last |= {id: states[-1].clone() for id, states in self.pending.read_waiting(able).items()}
            sizes = [self.template.within(row.max_draft) for row in able]
            states, roots = torch.stack([self._last[row.id] for row in able]), [row.last_token for row in able]
            with torch.inference_mode():
                best = partial(self.candidates, rows=able)
                tokens = self.heads.guess(states, np.array(roots), self.template.first(max(sizes)), best)
            for row, of_row, size in zip(able, tokens, sizes, strict=True):
                made[row.id] = self.tree_after(row, of_row[1:size], self.template.parent[1:size])
        return [made.get(row.id) or DraftTree.root(row.last_token) for row in rows]

    def candidates(self, read: torch.Tensor, k: int, rows: Sequence[Request] = ()) -> IntArray:
        """The likeliest tokens of depth k for `rows`, as in `Best`; without rows, the best ones."""
        logits = self.outputs[k](read)
        best: IntArray = top_tokens(logits, self._ranks)[1].cpu().numpy()
        each = len(logits) // max(len(rows), 1)
        for i, row in enumerate(rows):
            if not row.params.is_greedy:
                own = slice(i * each, (i + 1) * each)
                best[own] = ranked(row, [row.num_new + k] * each, logits[own], self._ranks, self.columns)
        return best if self.columns is None else self.columns[best]

    def use_ranks(self, ranks: int = RANKS) -> None:
        """Let `candidates` return `ranks` tokens, or all if there are fewer."""
        self._ranks = min(ranks, self._tokens)

    def read_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        """`Heads.read_text` for the target's states [T, H]; nothing is committed."""
        slot = self.pending.cache.add_row(len(tokens))
        made = self.heads.run_head(states, np.append(tokens[1:], 0), [Segment.chunk(slot, tokens, last=False)])
        self.pending.cache.drop_row(slot)
        return self.heads.read_text(tokens, made)

    # Setting up -----------------------------------------------------------------------------------------------

    def _trim(self, vocab: str, target: Facts) -> None:
        """Reduce the output heads to the tokens that the option `vocab` keeps; a shared head stays shared."""
        own = None if self.columns is None else torch.from_numpy(self.columns)
        rows, tokens = kept_rows(own, vocab, self.folder, target)
        trimmed = {output: output.rows(rows) for output in set(self.outputs)}
        self.outputs, self.columns = [trimmed[output] for output in self.outputs], tokens.cpu().numpy()

    def _lay_out(self, target: Facts) -> None:
        """Choose and compile the tree."""
        tree, depth, ranks = self.config.tree, self.heads.depth, min(RANKS, self._tokens)
        if isinstance(tree, str) and tree != "auto":
            self.template = shapes.template_of(tree, self._tokens, self.name, "a number, auto")
            deepest = int(self.template.depth[-1])
            if deepest > depth:
                raise MethodError(
                    f"{self.name}: the tree {tree} is {deepest} deep, and {self.folder} has {depth} heads"
                )
        else:
            shares = self._accuracies(depth, ranks)
            paths = self._paths(shares, SIZES[-1] if tree == "auto" else int(tree), depth, ranks)
            self.template = shapes.compile_template(paths, ranks)
        self._ranks = int(self.template.rank.max()) + 1
        if tree == "auto":
            self.template = shapes.compile_template(paths[: self._paying(target, shares, paths)], ranks)
            self._ranks = int(self.template.rank.max()) + 1

    def _accuracies(self, depth: int, ranks: int) -> list[list[float]]:
        """The share of right candidates by depth and rank, as measured for these heads, or else as published."""
        known = (self.folder / shapes.SLOTS_FILE).is_file()
        shares = shapes.read_accuracies(str(self.folder)) if known else shapes.SLOTS
        return [list(row[:ranks]) for row in shares[:depth]]

    def _paths(self, shares: Sequence[Sequence[float]], count: int, depth: int, ranks: int) -> list[RankPath]:
        whole = shapes.published()
        if (self.folder / shapes.SLOTS_FILE).is_file() or count != len(whole):
            return shapes.best_paths(shares, count)
        return [path for path in whole if len(path) <= depth and max(path) < ranks]

    def _paying(self, target: Facts, shares: Sequence[Sequence[float]], paths: Sequence[RankPath]) -> int:
        """The number of nodes that is fastest by measured costs, at least 1."""
        states = torch.zeros(1, target.hidden_size, dtype=target.dtype, device=target.device)
        root = np.zeros(1, np.int64)
        with torch.inference_mode():
            seconds = min(
                seconds_of(lambda: self.heads.guess(states, root, self.template, self.candidates)) for _ in range(3)
            )
        gains = [0.0, *accumulate(shapes.path_values(shares, paths))]
        return max(best_size(gains, time_forwards(target), seconds), 1)
