"""Drafting with heads that fill a tree of fixed shape: the loop that they share.

After a round the target's state of the last committed token is read, one way or another, into one vector a row; from
it, and from the root, the heads guess the tokens of a template's nodes. A head's guess of rank r at depth d is node
(..., r). Every guess is a point mass, fixed before the target decides a token, so acceptance stays lossless.

A drafter fills in `open` (load the network; how deep it drafts) and `guess` (the tokens), and keeps the vectors in
`last`; `fill_table` is the guess of heads that do not look at each other's tokens. `ReadingHeads` read every committed
state, with layers and a cache of their own. Knows no method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np
import torch

from paceline.draft.base import Drafter
from paceline.draft.cost import SIZES, best_size, time_forwards
from paceline.draft.neural.layers import PRECISION, Precision, table_and_head
from paceline.draft.neural.pending import StateReader
from paceline.draft.neural.vocab import kept_rows, kept_tokens
from paceline.draft.shapes import (
    SLOTS,
    SLOTS_FILE,
    RankPath,
    Template,
    best_paths,
    compile_template,
    path_values,
    published,
    read_accuracies,
    template_of,
)
from paceline.draft.spec import Options, option
from paceline.engine.logits import top_tokens
from paceline.engine.request import Request
from paceline.engine.round import Segment
from paceline.engine.tree import DraftTree, IntArray
from paceline.engine.typical import Typical
from paceline.errors import MethodError
from paceline.target.base import Facts
from paceline.target.linear import Linear

RANKS = 10
"""Most candidates of each depth where no file of paths asks for more."""


@dataclass(frozen=True, kw_only=True)
class StaticConfig(Options):
    """Options of drafters whose heads fill a tree of fixed shape."""

    checkpoint: str = option(help="folder of the heads, ours or published ones; or their file of weights")
    tree: int | Literal["auto"] | str = option(
        16, "drafted nodes; auto: as many as pay by what verifying costs here; or a file of paths", least=1
    )
    vocab: str | None = option(
        None, "draft only these tokens: the K the target writes most, or a file of `paceline train vocab`"
    )
    dtype: Precision = option("auto", PRECISION)
    accept: Literal["lossless", "typical"] = option(
        "lossless", "at a temperature: keep the target's distribution, or not (typical acceptance, as published)"
    )


class StaticHeads(Drafter):
    """Base of drafters whose heads fill a tree of fixed shape.

    last        by row the state [H] that its next draft is made of.
    own_heads   output heads of the network's own, one for each depth; None: the target's for all. Set by `open`.
    own_tokens  tokens int64 [K] of the columns of these; None: all tokens."""

    template: Template
    depth: int
    own_heads: Sequence[Linear] | None = None
    own_tokens: IntArray | None = None

    def __init__(self, config: StaticConfig):
        self.config = config
        self.last: dict[int, torch.Tensor] = {}
        if config.accept == "typical":
            self.acceptance, self.lossless = Typical(), "no: typical acceptance"

    # What a drafter fills in ----------------------------------------------------------------------------------

    def open(self, target: Facts) -> int:
        """Load the heads; set `needs`, and `weight_bytes` without output heads. The most tokens a draft can be deep."""
        raise NotImplementedError

    def states(self, rows: Sequence[Request]) -> torch.Tensor:
        """What the heads read for each row, [R, H]."""
        return torch.stack([self.last[row.id] for row in rows])

    def guess(self, states: torch.Tensor, roots: IntArray, size: int) -> IntArray:
        """Tokens int64 [R, size] of the template's first `size` nodes; column 0 is `roots` int64 [R]."""
        raise NotImplementedError

    def read_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        """What the output heads read at every position of a text, [T, depth, H], for measuring: tokens int64 [T], the
        target's states [T, H] as `needs` asks for them. Missing tokens after the end of the text are 0."""
        raise NotImplementedError

    def able(self, row: Request) -> bool:
        """Whether a state of the row is known."""
        return row.id in self.last

    def drop(self, row: Request) -> None:
        super().drop(row)
        self.last.pop(row.id, None)

    # The loop -------------------------------------------------------------------------------------------------

    def bind(self, target: Facts) -> None:
        """Load the heads and lay out the tree. MethodError if they are not for this target, or the tree is not one."""
        super().bind(target)
        self.embedding, head = table_and_head(target)
        depth = self.depth = self.open(target)
        self.heads = [head] * depth if self.own_heads is None else list(self.own_heads)
        self.columns = self.own_tokens
        if self.config.vocab is not None:
            self._trim(kept_tokens(self.config.vocab, self.folder, target))
        tokens = target.vocab_size if self.columns is None else len(self.columns)
        self.weight_bytes += sum({id(head): head.nbytes for head in self.heads}.values())
        self._lay_out(target, depth, tokens)

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        able = [row for row in rows if row.max_draft > 0 and self.able(row)]
        made: dict[int, DraftTree] = {}
        if able:
            sizes = [self.template.within(row.max_draft) for row in able]
            roots = np.array([row.last_token for row in able])
            with torch.inference_mode():
                tokens = self.guess(self.states(able), roots, max(sizes))
            for row, of_row, size in zip(able, tokens, sizes, strict=True):
                made[row.id] = planted(self.template, of_row[:size], self.end_tokens(row), self.name)
        return [made.get(row.id) or DraftTree.root(row.last_token) for row in rows]

    def candidates(self, read: torch.Tensor, k: int) -> IntArray:
        """The best tokens of depth k, best first, int64 [N, ranks], from what its output head reads, [N, H]."""
        best = top_tokens(self.heads[k](read), self._ranks)[1].cpu().numpy()
        return best if self.columns is None else self.columns[best]

    def fill_table(self, read: torch.Tensor, roots: IntArray, size: int) -> IntArray:
        """`guess` of heads that do not read each other's tokens: every node of a depth has the same candidates.

        read [R, depths, H] is what the output heads read."""
        depth = int(self.template.depth[size - 1])
        table = np.stack([self.candidates(read[:, k], k) for k in range(depth)], 1)
        below = slice(1, size)
        drafted = table[:, self.template.depth[below] - 1, self.template.rank[below]]
        return np.concatenate([roots[:, None], drafted], 1)

    def use_ranks(self, ranks: int = RANKS) -> None:
        """Let `candidates` name `ranks` tokens, or all there are."""
        self._ranks = min(ranks, len(self.embedding) if self.columns is None else len(self.columns))

    # Setting up -----------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Where the heads lie, and slots.json beside them."""
        path = Path(self.config.checkpoint).expanduser()
        return path if path.is_dir() else path.parent

    def _trim(self, keep: torch.Tensor) -> None:
        """Reduce the output heads to those of their tokens that are in `keep`."""
        own = torch.arange(len(self.embedding)) if self.columns is None else torch.from_numpy(self.columns)
        rows, tokens = kept_rows(own.to(keep.device), keep, str(self.config.vocab), self.config.checkpoint)
        trimmed: dict[int, Linear] = {}
        for head in self.heads:
            trimmed.setdefault(id(head), head.rows(rows))
        self.heads, self.columns = [trimmed[id(head)] for head in self.heads], tokens.cpu().numpy()

    def _lay_out(self, target: Facts, depth: int, tokens: int) -> None:
        """Choose and compile the tree."""
        tree, ranks = self.config.tree, min(RANKS, tokens)
        if isinstance(tree, str) and tree != "auto":
            self.template = template_of(tree, tokens, self.name, "a number, auto")
            deepest = int(self.template.depth[-1])
            if deepest > depth:
                raise MethodError(
                    f"{self.name}: the tree {tree} is {deepest} deep, and {self.folder} has {depth} heads"
                )
        else:
            shares = self._accuracies(depth, ranks)
            paths = best_paths(shares, SIZES[-1]) if tree == "auto" else self._paths(shares, int(tree), depth, ranks)
            self.template = compile_template(paths, ranks)
        self._ranks = int(self.template.rank.max()) + 1
        if tree == "auto":
            self.template = compile_template(paths[: self._paying(target, shares, paths)], ranks)
            self._ranks = int(self.template.rank.max()) + 1

    def _accuracies(self, depth: int, ranks: int) -> list[list[float]]:
        """How often the candidates of each depth are right: as measured, or else as published."""
        known = (self.folder / SLOTS_FILE).is_file()
        shares = read_accuracies(str(self.folder)) if known else SLOTS
        return [list(row[:ranks]) for row in shares[:depth]]

    def _paths(self, shares: Sequence[Sequence[float]], count: int, depth: int, ranks: int) -> list[RankPath]:
        whole = published()
        if (self.folder / SLOTS_FILE).is_file() or count != len(whole):
            return best_paths(shares, count)
        return [path for path in whole if len(path) <= depth and max(path) < ranks]

    def _paying(self, target: Facts, shares: Sequence[Sequence[float]], paths: Sequence[RankPath]) -> int:
        """The number of nodes that pays best here, at least 1."""
        states = torch.zeros(1, target.hidden_size, dtype=target.dtype, device=target.device)
        times = []
        with torch.inference_mode():
            for _ in range(3):
                began = perf_counter()
                self.guess(states, np.zeros(1, np.int64), len(paths) + 1)
                times.append(perf_counter() - began)
        gains = [0.0, *accumulate(path_values(shares, paths))]
        return max(best_size(gains, time_forwards(target), min(times)), 1)


def planted(template: Template, tokens: IntArray, ends: frozenset[int], source: str) -> DraftTree:
    """The tree of a template's first nodes with these `tokens` int64 [n], the root's first; nothing hangs below a token
    of `ends`."""
    parent = template.parent[: len(tokens)]
    if not ends or not np.isin(tokens[1:], list(ends)).any():
        return DraftTree(tokens, parent, source=source)
    number = {0: 0}
    for node in range(1, len(tokens)):
        above = int(parent[node])
        if above in number and (above == 0 or int(tokens[above]) not in ends):
            number[node] = len(number)
    kept = list(number)
    return DraftTree(tokens[kept], np.array([-1, *(number[int(parent[node])] for node in kept[1:])]), source=source)


class ReadingHeads(StateReader, StaticHeads):
    """Base of such drafters whose heads read every committed state and the tokens around it, and draft from what they
    made of the last one. Subclasses set `pending` in `open`."""

    def through(
        self, states: torch.Tensor, tokens: IntArray, following: IntArray, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """What the heads draft from after each of the states [N, H]; [N, H].

        tokens, following  int64 [N]: those of the states' positions, and those after them. segments: the positions,
        for layers with a cache. Nothing is committed."""
        raise NotImplementedError

    @torch.inference_mode()
    def read(self, rows: Sequence[Request], states: Sequence[torch.Tensor]) -> torch.Tensor:
        """`through` the next states of rows, [n, H] each, which the cache keeps; [sum(n), H]."""
        segments, tokens, following = [], [], []
        for row, of_row in zip(rows, states, strict=True):
            begin = self.pending.cached(row)
            tokens.append(row.tokens[begin : begin + len(of_row)])
            following.append(row.tokens[begin + 1 : begin + len(of_row) + 1])
            segments.append(Segment.chunk(self.pending.slot(row), tokens[-1], last=False))
        made = self.through(torch.cat(list(states)), np.concatenate(tokens), np.concatenate(following), segments)
        for row, of_row in zip(rows, states, strict=True):
            self.pending.cache.commit(self.pending.slot(row), range(len(of_row)))
        return made

    def read_chunk(self, row: Request, states: torch.Tensor) -> None:
        self.read([row], [states])

    def through_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        """`through` a whole text, of which nothing is kept."""
        slot = self.pending.cache.add_row(len(tokens))
        segment = Segment.chunk(slot, tokens, last=False)
        made = self.through(states, tokens, np.append(tokens[1:], 0), [segment])
        self.pending.cache.drop_row(slot)
        return made

    def restart(self, row: Request) -> None:
        super().restart(row)
        self.last.pop(row.id, None)

    def able(self, row: Request) -> bool:
        return row.id in self.last or self.pending.count(row) > 0

    def states(self, rows: Sequence[Request]) -> torch.Tensor:
        waiting = [row for row in rows if self.pending.count(row)]
        if waiting:
            counts = [self.pending.count(row) for row in waiting]
            made = self.read(waiting, [self.pending.of(row) for row in waiting])
            for row, count, of_row in zip(waiting, counts, made.split(counts), strict=True):
                self.pending.read(row, count)
                self.last[row.id] = of_row[-1].clone()
        return super().states(rows)
