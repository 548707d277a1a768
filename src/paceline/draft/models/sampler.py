"""The next token of a draft, drawn from what its model says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from paceline.core.request import Request
from paceline.core.sampling import best_of_rows, probabilities, warp
from paceline.core.tree import IntArray
from paceline.draft.models.drafts import Draft
from paceline.errors import PacelineError


class TokenSampler:
    """Draws tokens from logits over some columns, warped as each row wants it.

    vocab_size  number of tokens. columns: tokens int64 [K] of the logits' columns; None: all.
    takes_best  take the most probable token, at a temperature too."""

    def __init__(self, vocab_size: int, columns: torch.Tensor | None, takes_best: bool = False):
        self.vocab_size, self.columns, self.takes_best = vocab_size, columns, takes_best

    def draw(self, drafts: Sequence[Draft], logits: torch.Tensor) -> list[bool]:
        """Add a token to every draft, drawn from its row of logits [R, K]; False where they are no distribution."""
        best = best_of_rows(logits) if any(self._is_best(draft.row) for draft in drafts) else []
        drew = []
        for r, draft in enumerate(drafts):
            token = self._token(best[r]) if self._is_best(draft.row) else self._warped(draft, logits[r : r + 1])
            if token is not None:
                draft.add(token)
            drew.append(token is not None)
        return drew

    def distribution(self, draft: Draft, logits: torch.Tensor) -> torch.Tensor:
        """The distribution [V] of the draft's next token by logits [1, K]. PacelineError if they are none."""
        if draft.row.params.shifts_logits:  # penalties are the tokens' own, whatever column they have
            return probabilities(self._spread(logits, -torch.inf), draft.row.params, [draft.context])[0]
        return self._spread(probabilities(logits, draft.row.params, [])[0], 0.0)

    def _is_best(self, row: Request) -> bool:
        """Whether a row's token is the best one as the logits come."""
        return not row.params.shifts_logits and (row.params.is_greedy or self.takes_best)

    def _warped(self, draft: Draft, logits: torch.Tensor) -> int | None:
        """A token from logits [1, K], warped as the row wants it; None where none can be drawn."""
        params, shifts = draft.row.params, draft.row.params.shifts_logits
        try:
            if params.is_greedy or self.takes_best:
                (best,) = best_of_rows(warp(self._spread(logits, -torch.inf), params, [draft.context]))
                return best
            if shifts:
                q = self.distribution(draft, logits)
                drawn = draft.row.random.draft(q)
            else:
                few = probabilities(logits, params, [])[0]
                drawn = self._token(draft.row.random.draft(few))
                q = self._spread(few, 0.0)
        except PacelineError:  # no numbers, or all that has a column is banned: the target will say what follows
            return None
        draft.probs.append(q)
        return drawn

    def _token(self, column: int | None) -> int | None:
        """The token of a column of the logits."""
        return column if column is None or self.columns is None else int(self._tokens[column])

    @cached_property
    def _tokens(self) -> IntArray:
        """`columns` on the CPU, where looking one up waits for nothing."""
        assert self.columns is not None
        return self.columns.cpu().numpy()

    def _spread(self, values: torch.Tensor, nothing: float) -> torch.Tensor:
        """Values [..., K] over the columns as values [..., V] over all tokens, `nothing` for those without a column."""
        if self.columns is None:
            return values
        out = values.new_full((*values.shape[:-1], self.vocab_size), nothing)
        out[..., self.columns] = values
        return out
