"""Pending: the target's states of committed tokens that a head has not read yet, and the head's cache of the others.

A head reads the target's states of all committed tokens, the prompt's too, but it runs only when it is asked to draft.
Meanwhile states wait here: those of a prompt that is run in pieces, of rounds in which another drafter drafted, and of
tokens that ended a draft. Rows are independent of each other. Knows no particular head.

    self.pending = Pending(target, layers=(2, 4, 5), cache, run_head)   # also Needs(hidden_layers=...)
    states = self.pending.of(row)                             # when drafting: the states of the row's next tokens
    self.pending.cache.commit(self.pending.slot(row), nodes)  # states of committed tokens wait no longer
    self.pending.feed(round)                                  # after the round, and after the commit
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from paceline.core.options import option
from paceline.core.request import Request
from paceline.core.round import Round
from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.draft.models import stop
from paceline.draft.models.draft_model import ANY, Draft, DraftModel
from paceline.draft.models.layers import PRECISION, Precision
from paceline.draft.models.model_drafter import TREE, ModelDrafterConfig
from paceline.formats.facts import Facts
from paceline.kernels.linear import Linear
from paceline.kernels.ops import Pair
from paceline.target.base import Needs
from paceline.target.cache import RaggedCache

CHUNK = 512
"""Largest number of states that the head reads with a draft; it reads those before them in chunks."""
WAITING = 16 << 20
"""Bytes of a row's states that wait at most; the head reads more as they come. A drafter that is never asked, because
it does not pay, should not read prompts either."""

RunHead = Callable[[torch.Tensor, IntArray, Sequence[Segment]], torch.Tensor]
"""run_head(states [N, L * H], following int64 [N], segments): run a head's own layers over states of committed tokens.
Returns the states [N, H] from which the head drafts. Nothing is committed. segments: the states' positions and tokens;
following: the token after each."""


class Pending:
    """The waiting states of each row, [n, L * H], oldest first: for each token the states of L layers side by side.

    layers    the L layers, numbered as in `Needs.hidden_layers`.
    cache     cache of the head's layers; None: it has no layers, and no keys or values are kept.
    run_head  function that runs the head."""

    def __init__(self, target: Facts, layers: Sequence[int], cache: RaggedCache | None, run_head: RunHead):
        self.layers = tuple(layers)
        width = len(self.layers) * target.hidden_size
        self.cache = cache or RaggedCache(0, 1, 1, target.max_context, target.dtype, target.device)
        self.run_head = run_head
        self._nothing = torch.empty(0, width, dtype=target.dtype, device=target.device)
        self._most = max(CHUNK, WAITING // max(width * self._nothing.itemsize, 1))
        self._states: dict[int, list[torch.Tensor]] = {}  # by row id, in pieces: `of` joins them
        self._first: dict[int, int] = {}  # by row id: number of the first state's token
        self._end: dict[int, int] = {}  # by row id: number of the token after the last state
        self._slots: dict[int, int] = {}

    def start(self, row: Request) -> None:
        """Add a row. Nothing of it waits, and nothing has been read."""
        self._slots[row.id] = self.cache.add_row(row.expected_length)
        self._states[row.id], self._first[row.id], self._end[row.id] = [self._nothing], 0, 0

    def drop(self, row: Request) -> None:
        for of_row in (self._states, self._first, self._end):
            of_row.pop(row.id, None)
        if row.id in self._slots:
            self.cache.drop_row(self._slots.pop(row.id))

    def slot(self, row: Request) -> int:
        return self._slots[row.id]

    def cached(self, row: Request) -> int:
        """How many of the row's states have been read."""
        return self.cache.length(self._slots[row.id])

    def count(self, row: Request) -> int:
        """How many of the row's states wait."""
        return self._end[row.id] - self.cached(row)

    def of(self, row: Request) -> torch.Tensor:
        """The row's waiting states, [count, L * H]."""
        parts = self._states[row.id]
        if len(parts) > 1:
            parts[:] = [torch.cat(parts)]
        return parts[0][self.cached(row) - self._first[row.id] :]

    def feed(self, round: Round) -> None:
        """Take the states of the tokens that the round committed, whichever drafter made them. Of more than WAITING
        bytes, the head reads the first ones at once."""
        for i, row in enumerate(round.rows):
            states = torch.cat([round.committed(i, layer) for layer in self.layers], -1)
            self._states[row.id].append(states)
            self._end[row.id] += len(states)
            if self.cached(row) > self._first[row.id]:
                self._states[row.id] = [self.of(row)]
                self._first[row.id] = self.cached(row)
            goes_on = self.cached(row) + self.count(row) < len(row)  # false if the row ended inside a draft
            if goes_on and self.count(row) > self._most:
                self.catch_up(row)

    def catch_up(self, row: Request) -> None:
        """Read the row's waiting states in chunks, but for the last."""
        while self.count(row) > CHUNK:
            self.read([row], [self.of(row)[:CHUNK]])

    @torch.inference_mode()
    def read(self, rows: Sequence[Request], states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the head over each row's next states [n, L * H], and commit them. Returns the output [sum(n), H]."""
        segments, following = [], []
        for row, of_row in zip(rows, states, strict=True):
            begin = self.cached(row)
            tokens, after = (row.tokens[at : at + len(of_row)] for at in (begin, begin + 1))
            segments.append(Segment.chunk(self.slot(row), tokens, last=False))
            following.append(after)
        made = self.run_head(torch.cat(list(states)), np.concatenate(following), segments)
        for row, of_row in zip(rows, states, strict=True):
            self.cache.commit(self.slot(row), range(len(of_row)))
        return made

    def read_waiting(self, rows: Sequence[Request]) -> dict[int, torch.Tensor]:
        """`read` all waiting states of these rows. Returns outputs by row id, without rows for which none waited."""
        waiting = [row for row in rows if self.count(row)]
        if not waiting:
            return {}
        states = [self.of(row) for row in waiting]
        parts = self.read(waiting, states).split([len(of_row) for of_row in states])
        return {row.id: part for row, part in zip(waiting, parts, strict=True)}


class StatesModel(DraftModel):
    """Base of models that read the target's states, which wait in `pending` until a draft begins."""

    def __init__(self, target: Facts, layers: Sequence[int], cache: RaggedCache | None, run_head: RunHead):
        self.vocab_size = target.vocab_size
        self.pending = Pending(target, layers, cache, run_head)
        self.needs = Needs(hidden_layers=tuple(sorted(layers)))

    def start(self, row: Request) -> None:
        self.pending.start(row)

    def drop(self, row: Request) -> None:
        self.pending.drop(row)
        self.ran.pop(row.id, None)

    def slot(self, row: Request) -> int:
        return self.pending.slot(row)

    def length(self, row: Request) -> int:
        return self.pending.cached(row)

    def catch_up(self, row: Request) -> None:
        self.pending.catch_up(row)

    def feed(self, round: Round) -> None:
        self.pending.feed(round)


# Drafting on features: a head reads the target's state and the token after it, then its own output -------------------


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(ModelDrafterConfig):
    """Options of drafters with a head over features."""

    checkpoint: str = option(help="folder of the head, ours or a published one; or its file of weights")
    stop: stop.Name = option("fixed", "when to stop: at a fixed length, or where the draft is no longer sure")
    draft: int | None = option(4, "most tokens drafted a round; for a tree, its depth", least=1)
    tree: int = option(16, TREE, least=0)
    dtype: Precision = option("auto", PRECISION)


class Network:
    """Base of heads that are bound to a target.

    taps     layers of the target whose inputs it reads (`Needs.hidden_layers`). cache: cache of its own layers.
    table    embedding [V, H]. head: its output head. columns: tokens of the head's rows; None: all tokens.
    nbytes   bytes of weights that a forward reads, without the output head."""

    taps: tuple[int, ...]
    cache: RaggedCache
    table: torch.Tensor
    head: Linear
    columns: torch.Tensor | None = None
    nbytes: int

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """The embeddings [N, H] of tokens [N]."""
        return F.embedding(tokens, self.table)

    def first(self, states: torch.Tensor) -> torch.Tensor:
        """Make features [N, H] of the target's states [N, taps * target's H]."""
        return states

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, segments: Sequence[Segment]) -> Pair:
        """Run the segments' nodes, given their embeddings and features [N, H]. Returns the features [N, H] of their
        children, and the output head's input [M, H] for the nodes whose logits are wanted."""
        raise NotImplementedError


class FeatureModel(StatesModel):
    """A head over features that drafts token by token, and reads its own output.

    Node j of a row is the pair (state of token j, token j + 1), so a head that has read c pairs has read 1 + c tokens.
    A committed token's state is the target's; a drafted node's state is its parent's output. After the round all
    drafted nodes are forgotten, and the accepted tokens are read again with the target's states (Li et al. 2024, EAGLE,
    section 3.1).

    head, columns  the network's, without the tokens that the option `vocab` leaves out."""

    def __init__(self, network: Network, config: FeatureConfig, target: Facts):
        super().__init__(target, network.taps, network.cache, self.run_head)
        self.network = network
        self.head, self.columns = head_of(network, config, target)
        self.weight_bytes = network.nbytes + self.head.nbytes
        self._made: dict[int, list[torch.Tensor]] = {}  # by row id: output [n, H] of its draft's nodes

    def length(self, row: Request) -> int:
        return 1 + self.pending.cached(row)

    def room(self, row: Request) -> int:
        return ANY if self.pending.count(row) else 0  # Without states, the target has not run the row.

    def extend(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        features = torch.cat([self._features(draft) for draft in drafts])
        tokens = [token for draft in drafts for token in draft.tokens[self.ran[draft.row.id] :]]
        for draft in drafts:
            if not self.ran[draft.row.id]:
                self._made[draft.row.id] = []
        parts = self.segments(drafts, num_logits)
        out, read = self._forward(tokens, features, parts)
        for draft, of_row in zip(drafts, out.split([segment.num_run for segment in parts]), strict=True):
            self._made[draft.row.id].append(of_row)
        return self.head(read)

    def _features(self, draft: Draft) -> torch.Tensor:
        """Features of the nodes to run: in the first step from the target's states, later their parents' output."""
        ran = self.ran[draft.row.id]
        if not ran:
            return self.network.first(self.pending.of(draft.row))
        return torch.cat(self._made[draft.row.id])[draft.parent[ran:]]

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int], features: torch.Tensor, segments: Sequence[Segment]) -> Pair:
        ids = torch.tensor(tokens, device=features.device)
        return self.network.forward(self.network.embedded(ids), features, segments)

    def commit(self, draft: Draft, nodes: Sequence[int]) -> None:
        # Drafted nodes were run on the head's own output. `feed` brings the target's states of the accepted tokens.
        self.pending.cache.commit(self.pending.slot(draft.row), range(draft.num_committed))
        self._made.pop(draft.row.id, None)

    def run_head(self, states: torch.Tensor, following: IntArray, segments: Sequence[Segment]) -> torch.Tensor:
        """Read committed states. Arguments and result are those of `RunHead`."""
        return self._forward(following.tolist(), self.network.first(states), segments)[0]


def head_of(network: Any, config: FeatureConfig, target: Facts) -> tuple[Linear, torch.Tensor | None]:
    """Return a network's output head and its rows' tokens, without the tokens that the option `vocab` leaves out."""
    if config.vocab is None:
        return network.head, network.columns
    from paceline.formats.heads.vocab import kept_rows

    rows, columns = kept_rows(network.columns, config.vocab, config.checkpoint, target)
    return network.head.rows(rows), columns
