"""Heads that fill a tree of fixed shape: the loop that they share.

From one state a row, and from the root, the heads guess the tokens of a template's nodes; the node of rank r at depth d
gets the r-th best token of head d. Every guess is a point mass, fixed before the target decides a token, so acceptance
stays lossless. Subclasses fill in `open` and `guess`. Knows no method."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from paceline.core.logits import top_tokens
from paceline.core.request import Request
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree, IntArray
from paceline.core.typical import Typical
from paceline.draft import shapes
from paceline.draft.base import Drafter
from paceline.draft.cost import SIZES, best_size, seconds_of, time_forwards
from paceline.draft.models.layers import PRECISION, Precision, table_and_head
from paceline.draft.models.model_drafter import VOCAB
from paceline.draft.models.pending import StateReader
from paceline.draft.models.vocab import kept_rows
from paceline.draft.shapes import RankPath, Template
from paceline.draft.spec import Options, option
from paceline.errors import MethodError
from paceline.target.base import Facts
from paceline.target.linear import Linear

RANKS = 10  # most candidates of each depth, unless a file of paths asks for more


@dataclass(frozen=True, kw_only=True)
class StaticConfig(Options):
    """Options of drafters whose heads fill a tree of fixed shape."""

    checkpoint: str = option(help="folder of the heads, ours or published ones; or their file of weights")
    tree: int | Literal["auto"] | str = option(
        16, "drafted nodes; auto: as many as pay, by measured costs; or a file of paths", least=1
    )
    vocab: str | None = option(None, VOCAB)
    dtype: Precision = option("auto", PRECISION)
    accept: Literal["lossless", "typical"] = option(
        "lossless", "at a temperature: keep the target's distribution, or not (typical acceptance, as published)"
    )


def count_heads(path: str, names: Iterable[str], start: str = "") -> tuple[int, int]:
    """(number of heads, blocks of each) by the names of tensors, which are `start`, head, block and more."""
    found = [match for name in names if (match := re.match(rf"{start}(\d+)\.(\d+)\.", name))]
    if not found:
        raise MethodError(f"{path} has no heads: none of its tensors has a name such as {start}0.0.linear.weight")
    heads, blocks = (1 + max(int(match[group]) for match in found) for group in (1, 2))
    return heads, blocks


class StaticHeads(Drafter):
    """Base of drafters whose heads fill a tree of fixed shape.

    folder      of the heads and of slots.json.
    last        by row: the state [H] that its next draft is made of.
    own_heads   the network's own output heads, one for each depth; None: the target's for all. Set by `open`.
    own_tokens  tokens int64 [K] of their columns; None: all tokens. Set by `open`."""

    lossless = "yes"
    template: Template
    depth: int
    own_heads: Sequence[Linear] | None = None
    own_tokens: IntArray | None = None

    def __init__(self, config: StaticConfig):
        self.config = config
        path = Path(config.checkpoint).expanduser()
        self.folder = path if path.is_dir() else path.parent
        self.last: dict[int, torch.Tensor] = {}
        if config.accept == "typical":
            self.acceptance, self.lossless = Typical(), "no: typical acceptance"

    # What a drafter fills in ----------------------------------------------------------------------------------

    def open(self, target: Facts) -> int:
        """Load the heads; set `needs`, and `weight_bytes` without output heads. Returns the number of heads, which is
        the largest depth of a draft."""
        raise NotImplementedError

    def states(self, rows: Sequence[Request]) -> torch.Tensor:
        """What the heads read for each row, [R, H]."""
        return torch.stack([self.last[row.id] for row in rows])

    def guess(self, states: torch.Tensor, roots: IntArray, size: int) -> IntArray:
        """Tokens int64 [R, size] of the template's first `size` nodes; column 0 is `roots` int64 [R]."""
        raise NotImplementedError

    def read_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        """What the output heads read at every position of a text, [T, depth, H], to measure their accuracy.

        tokens int64 [T]; states [T, H]: the target's, of the layer in `needs`. Tokens after the end count as 0."""
        raise NotImplementedError

    def able(self, row: Request) -> bool:
        """Whether a state of the row is known."""
        return row.id in self.last

    def drop(self, row: Request) -> None:
        super().drop(row)
        self.last.pop(row.id, None)

    # The loop -------------------------------------------------------------------------------------------------

    def bind(self, target: Facts) -> None:
        """Load the heads and compile the tree. MethodError if they are not for this target, or the tree is wrong."""
        super().bind(target)
        if self.acceptance is not None:
            lossy = "typical acceptance does not keep the model's distribution where a temperature is above 0"
            self.notes = (f"{self.name}:{self.config.checkpoint}: {lossy}",)
        self.embedding, head = table_and_head(target)
        depth = self.depth = self.open(target)
        self.heads = [head] * depth if self.own_heads is None else list(self.own_heads)
        self.columns = self.own_tokens
        if self.config.vocab is not None:
            self._trim(self.config.vocab, target)
        tokens = target.vocab_size if self.columns is None else len(self.columns)
        self.weight_bytes += sum(head.nbytes for head in set(self.heads))
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
                made[row.id] = self.tree_after(row, of_row[1:size], self.template.parent[1:size])
        return [made.get(row.id) or DraftTree.root(row.last_token) for row in rows]

    def candidates(self, read: torch.Tensor, k: int) -> IntArray:
        """The best tokens of depth k, best first, int64 [N, ranks], from what its output head reads, [N, H]."""
        best = top_tokens(self.heads[k](read), self._ranks)[1].cpu().numpy()
        return best if self.columns is None else self.columns[best]

    def fill_table(self, read: torch.Tensor, roots: IntArray, size: int) -> IntArray:
        """`guess` for heads that do not read drafted tokens: all nodes of a depth have the same candidates.

        read  [R, depths, H]: the input of the output heads."""
        depth = int(self.template.depth[size - 1])
        table = np.stack([self.candidates(read[:, k], k) for k in range(depth)], 1)
        below = slice(1, size)
        drafted = table[:, self.template.depth[below] - 1, self.template.rank[below]]
        return np.concatenate([roots[:, None], drafted], 1)

    def use_ranks(self, ranks: int = RANKS) -> None:
        """Let `candidates` return `ranks` tokens, or all if there are fewer."""
        self._ranks = min(ranks, len(self.embedding) if self.columns is None else len(self.columns))

    # Setting up -----------------------------------------------------------------------------------------------

    def _trim(self, vocab: str, target: Facts) -> None:
        """Reduce the output heads to the tokens that the option `vocab` keeps; a shared head stays shared."""
        own = None if self.columns is None else torch.from_numpy(self.columns)
        rows, tokens = kept_rows(own, vocab, self.folder, target)
        trimmed = {head: head.rows(rows) for head in set(self.heads)}
        self.heads, self.columns = [trimmed[head] for head in self.heads], tokens.cpu().numpy()

    def _lay_out(self, target: Facts, depth: int, tokens: int) -> None:
        """Choose and compile the tree."""
        tree, ranks = self.config.tree, min(RANKS, tokens)
        if isinstance(tree, str) and tree != "auto":
            self.template = shapes.template_of(tree, tokens, self.name, "a number, auto")
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
        """How often each rank of each depth is right: as measured for these heads, or else as published."""
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
        with torch.inference_mode():
            times = [seconds_of(lambda: self.guess(states, np.zeros(1, np.int64), len(paths) + 1)) for _ in range(3)]
        gains = [0.0, *accumulate(shapes.path_values(shares, paths))]
        return max(best_size(gains, time_forwards(target), min(times)), 1)


class ReadingHeads(StateReader, StaticHeads):
    """Base of drafters whose heads read every committed state and the tokens around it, by layers of their own, and
    draft from the output for the last one. Subclasses set `pending` in `open`."""

    def through_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        """`through` over a whole text; nothing is committed."""
        slot = self.pending.cache.add_row(len(tokens))
        segment = Segment.chunk(slot, tokens, last=False)
        made = self.through(states, np.append(tokens[1:], 0), [segment])
        self.pending.cache.drop_row(slot)
        return made

    def restart(self, row: Request) -> None:
        super().restart(row)
        self.last.pop(row.id, None)

    def able(self, row: Request) -> bool:
        return row.id in self.last or self.pending.count(row) > 0

    def states(self, rows: Sequence[Request]) -> torch.Tensor:
        self.last |= {id: made[-1].clone() for id, made in self.read_waiting(rows).items()}
        return super().states(rows)
