"""Plan and Round: the input of a round of the engine's loop, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from paceline.core.params import TokenLogprob
from paceline.core.request import Row
from paceline.core.segment import Segment, Verdict
from paceline.core.tree import DraftTree
from paceline.errors import MethodError
from paceline.moved import aliases

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Accepted:
    """The part of a row's tree that was accepted, and the tokens that follow from it.

    path      accepted nodes, root first. tokens[i] was decided at path[i]. For a piece of a prompt: [0].
    tokens    the new tokens: those of path[1:], then the target's own. For an unfinished prompt: none.
    logprobs  one entry for each of `tokens` if the request wants them, else None."""

    path: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class Failed:
    """Why a row gained nothing in a round, and ends."""

    error: BaseException


Outcome = Accepted | Failed
"""The result of a round for one row."""


@dataclass(eq=False)
class Plan:
    """The input of a round. Index i of each list is about the same row.

    trees     each row's draft, cut to the length that the row has left. Without a draft it is the root alone.
    segments  each row's tree, or a piece of its prompt, as the target runs it."""

    rows: list[Row]
    trees: list[DraftTree]
    segments: list[Segment]

    def __len__(self) -> int:
        return len(self.rows)

    def is_prompt(self, i: int) -> bool:
        """Whether row i runs a piece of its prompt. Its tree is then the piece's last token alone."""
        return self.segments[i].is_prompt

    def kept(self, i: int, accepted: Accepted) -> Sequence[int]:
        """The nodes of row i's segment that stay in the cache: all of a prompt's piece, a tree's accepted nodes."""
        return range(len(self.segments[i].tokens)) if self.is_prompt(i) else accepted.path

    def drafts(self) -> list[int]:
        """The numbers of the rows that ran a tree, not a piece of a prompt."""
        return [i for i in range(len(self)) if not self.is_prompt(i)]

    def is_from(self, i: int, drafter: object) -> bool:
        """Whether `drafter` proposed row i's tree."""
        return self.trees[i].owner is drafter

    def spans(self) -> list[slice]:
        """The slice of each row's nodes among all nodes of the forward, as in the `hidden` of `on_layer`."""
        ends = accumulate((segment.num_run for segment in self.segments), initial=0)
        return [slice(begin, end) for begin, end in pairwise(ends)]


@dataclass(eq=False)
class Round(Plan):
    """A plan that was run, without the rows that failed, and its results.

    verdict   output of the target's forward; None without a forward, as in a recording.
    accepted  the accepted part of each tree.
    places    the rows' numbers in the verdict, which may have more rows; empty: it has only these rows."""

    verdict: Verdict | None = None
    accepted: list[Accepted] = field(default_factory=list)
    places: Sequence[int] = ()
    _committed: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, plan: Plan, verdict: Verdict | None, outcomes: Sequence[Outcome]) -> Round:
        """Make the round of a plan that was run, without the rows that failed."""
        alive = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Accepted)]
        whole = cls(plan.rows, plan.trees, plan.segments, verdict, outcomes)  # type: ignore[arg-type]
        return whole if len(alive) == len(plan) else whole.only(alive)

    def logits(self, i: int) -> torch.Tensor:
        """Logits [n, V] of the nodes of row i's tree; [0, V] before the end of a prompt."""
        return self._forward.of(self._place(i))

    def top_k(self, i: int) -> torch.Tensor:
        """Token ids [n, k] of the best logits of the nodes of row i's tree, best first. k: `Needs.top_k`."""
        verdict = self._forward
        assert verdict.top_k is not None, "Needs.top_k asks for it"
        place = self._place(i)
        return verdict.top_k[1][verdict.logits_at[place] : verdict.logits_at[place + 1]]

    def hidden(self, i: int, layer: int) -> torch.Tensor:
        """States [N, H] before layer `layer` (see `Needs`) of the nodes of row i's segment that were run."""
        at, place = self._forward.hidden_at, self._place(i)
        return self._forward.hidden[layer][at[place] : at[place + 1]]

    def committed(self, i: int, layer: int) -> torch.Tensor:
        """States [n, H] before layer `layer` of the tokens that row i keeps from this round."""
        if (i, layer) not in self._committed:
            states, kept = self.hidden(i, layer), self.kept(i, self.accepted[i])
            is_chain = kept[-1] == len(kept) - 1
            self._committed[i, layer] = states[: len(kept)] if is_chain else states[list(kept)]
        return self._committed[i, layer]

    def only(self, indices: Sequence[int]) -> Round:
        """The round with only the rows at `indices`."""
        rows, trees, segments = ([of_rows[i] for i in indices] for of_rows in (self.rows, self.trees, self.segments))
        accepted, places = [self.accepted[i] for i in indices], [self._place(i) for i in indices]
        return Round(rows, trees, segments, self.verdict, accepted, places)  # type: ignore[arg-type]

    @property
    def is_whole(self) -> bool:
        """Whether the round has all rows of its forward."""
        return not self.places or len(self) == len(self._forward.logits_at) - 1

    def _place(self, i: int) -> int:
        return self.places[i] if self.places else i

    @property
    def _forward(self) -> Verdict:
        if self.verdict is None:
            raise MethodError("This round has no forward: a recording holds tokens, and the drafter asks for more.")
        return self.verdict


aliases(__name__)
