"""Segment, Verdict and Round: the input of a forward, its output, and both with what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from paceline.engine.accept import Accepted
from paceline.engine.request import Row
from paceline.engine.sampling import token_logprobs
from paceline.engine.tree import DraftTree, IntArray, depths
from paceline.errors import MethodError

_UNKNOWN: IntArray = np.empty(0, np.int64)


@dataclass(slots=True)
class Segment:
    """Tokens of one row in one forward: a tree, or a chunk of the prompt (a chain).

    slot        the row's slot in the cache; the target knows the row's committed length.
    tokens      int64 [n]; parent int64 [n] as in DraftTree.
    start       nodes before `start` have their keys and values after the row already (from a self-drafter); only nodes
                start..n-1 are run.
    num_logits  logits are wanted for the last `num_logits` nodes.
    hidden      [n - start, H] or None: states of the nodes after layer `resume_layer - 1`; those layers are not run.
    depth       int64 [n]: depth of each node, 0 for the first; computed if not given.
    is_prompt   the tokens are a piece of the row's prompt.
    mutual      every node sees all others, not only its ancestors (a drafter's own layers)."""

    slot: int
    tokens: IntArray
    parent: IntArray
    start: int = 0
    num_logits: int = 0
    hidden: torch.Tensor | None = None
    depth: IntArray = field(default_factory=lambda: _UNKNOWN)
    is_prompt: bool = False
    mutual: bool = False

    def __post_init__(self) -> None:
        if self.depth is _UNKNOWN:
            self.depth = depths(self.parent)

    @property
    def num_run(self) -> int:
        """Nodes that the forward runs."""
        return len(self.tokens) - self.start

    def longer(self, count: int) -> Segment:
        """The segment with a chain of `count` more nodes, whose tokens are 0."""
        n = len(self.tokens)
        return Segment(
            self.slot,
            np.concatenate([self.tokens, np.zeros(count, np.int64)]),
            np.concatenate([self.parent, np.arange(n - 1, n + count - 1)]),
            self.start,
            self.num_logits,
            self.hidden,
            np.concatenate([self.depth, self.depth[-1] + 1 + np.arange(count)]),
            self.is_prompt,
        )

    @classmethod
    def tree(cls, slot: int, tree: DraftTree) -> Segment:
        """Verify every node of `tree`."""
        return cls(slot, tree.tokens, tree.parent, num_logits=len(tree), hidden=tree.hidden, depth=tree.depth)

    @classmethod
    def chunk(cls, slot: int, tokens: IntArray, last: bool, scored: int = 0) -> Segment:
        """A piece of a prompt; logits after its last `scored` tokens, and after its last one if `last`."""
        return cls(slot, tokens, np.arange(-1, len(tokens) - 1), num_logits=max(int(last), scored), is_prompt=True)


@dataclass(slots=True)
class Verdict:
    """The output of one forward, packed in the order of the segments.

    logits     [M, V] for the nodes whose logits were wanted, in the model's dtype.
    logits_at  where segment s begins: its logits are logits[logits_at[s] : logits_at[s + 1]].
    hidden     {layer: [N, H]} for all nodes that were run; hidden_at as logits_at.
    top_k      (values [M, k], token ids [M, k]) or None."""

    logits: torch.Tensor
    logits_at: list[int]
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden_at: list[int] = field(default_factory=list)
    top_k: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def on(
        cls, segments: Sequence[Segment], logits: torch.Tensor, hidden: dict[int, torch.Tensor], top_k: Any = None
    ) -> Verdict:
        """The verdict on these segments, whose logits and states are packed in their order."""
        counts = [s.num_logits for s in segments], [s.num_run for s in segments]
        logits_at, hidden_at = ([*accumulate(each, initial=0)] for each in counts)
        return cls(logits, logits_at, hidden, hidden_at, top_k)

    def count(self, s: int) -> int:
        """Nodes of segment s that have logits."""
        return self.logits_at[s + 1] - self.logits_at[s]

    def of(self, s: int) -> torch.Tensor:
        """Logits of segment s, [its count, V]."""
        return self.logits[self.logits_at[s] : self.logits_at[s + 1]]

    def select(self, logits: Sequence[slice]) -> Verdict:
        """The verdict on as many segments, of which segment i has the packed logits[i] alone."""

        def joined(packed: torch.Tensor) -> torch.Tensor:
            return torch.cat([packed[part] for part in logits])

        ends = list(accumulate((part.stop - part.start for part in logits), initial=0))
        top_k = None if self.top_k is None else (joined(self.top_k[0]), joined(self.top_k[1]))
        return Verdict(joined(self.logits), ends, self.hidden, self.hidden_at, top_k)


@dataclass(eq=False)
class Round:
    """One turn of the loop. Index i of every list is about the same row.

    trees     each row's draft, cut to the length that it has left; the root alone where nothing was drafted.
    segments  what the target runs for each row: its tree, or a piece of its prompt.
    verdict   the target's forward over `segments`; None before it.
    accepted  what was accepted of each tree; empty before acceptance.
    places    the rows' numbers in the verdict, which may be on more rows; empty: it is on these."""

    rows: list[Row]
    trees: list[DraftTree]
    segments: list[Segment]
    verdict: Verdict | None = None
    accepted: list[Accepted] = field(default_factory=list)
    places: Sequence[int] = ()
    _committed: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def is_prompt(self, i: int) -> bool:
        """Whether row i ran a piece of its prompt; its tree is then the piece's last token alone."""
        return self.segments[i].is_prompt

    def is_from(self, i: int, drafter: object) -> bool:
        """Whether row i's tree is one that `drafter` proposed in this round."""
        return self.trees[i].owner is drafter

    def logits(self, i: int) -> torch.Tensor:
        """Logits of the nodes of row i's tree, [n, V]; [0, V] before the end of a prompt."""
        return self._forward.of(self._place(i))

    def top_k(self, i: int) -> torch.Tensor:
        """Token ids of the best logits of the nodes of row i's tree, best first, [n, k]; k as in `Needs.top_k`."""
        verdict = self._forward
        assert verdict.top_k is not None, "Needs.top_k asks for it"
        place = self._place(i)
        return verdict.top_k[1][verdict.logits_at[place] : verdict.logits_at[place + 1]]

    def hidden(self, i: int, layer: int) -> torch.Tensor:
        """States before layer `layer` of the nodes of row i's segment that were run, [N, H]; see `Needs`."""
        at, place = self._forward.hidden_at, self._place(i)
        return self._forward.hidden[layer][at[place] : at[place + 1]]

    def committed(self, i: int, layer: int) -> torch.Tensor:
        """States before layer `layer` of the tokens that row i keeps from this round's forward, [len(path), H]."""
        if (i, layer) not in self._committed:
            states, path = self.hidden(i, layer), self.accepted[i].path
            is_chain = not path or path[-1] == len(path) - 1
            self._committed[i, layer] = states[: len(path)] if is_chain else states[path]
        return self._committed[i, layer]

    def spans(self) -> list[slice]:
        """Where each row's nodes lie among the packed nodes of the forward: `hidden[spans[i]]` of `on_layer`."""
        ends = accumulate((segment.num_run for segment in self.segments), initial=0)
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def only(self, indices: Sequence[int]) -> Round:
        """The round with the rows at `indices` alone."""
        rows, trees, segments = ([of_rows[i] for i in indices] for of_rows in (self.rows, self.trees, self.segments))
        accepted, places = [self.accepted[i] for i in indices], [self._place(i) for i in indices]
        return Round(rows, trees, segments, self.verdict, accepted, places)  # type: ignore[arg-type]

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows of its forward."""
        return not self.places or len(self) == len(self._forward.logits_at) - 1

    def _place(self, i: int) -> int:
        return self.places[i] if self.places else i

    @property
    def _forward(self) -> Verdict:
        if self.verdict is None:
            raise MethodError("This round has no forward: a recording holds tokens, and the drafter asks for more.")
        return self.verdict


def score_prompts(plan: Round, verdict: Verdict) -> Verdict:
    """Give rows the log-probabilities of their prompts' tokens; return the verdict on what decides new tokens alone."""
    deciding = [slice(*verdict.logits_at[s : s + 2]) for s in range(len(plan))]
    for i, (row, segment) in enumerate(zip(plan.rows, plan.segments, strict=True)):
        if row.count_unscored(len(segment.tokens)):
            end = row.cached + len(segment.tokens)
            own = row.tokens[end - segment.num_logits + 1 : min(end + 1, row.prompt_length)].tolist()
            logits = verdict.of(i)[: len(own)].float()
            row.prompt_logprobs += token_logprobs(logits, own, row.params.prompt_logprobs or 0)
            last = int(not row.num_new and end == row.prompt_length)
            deciding[i] = slice(deciding[i].stop - last, deciding[i].stop)
    return verdict.select(deciding)
