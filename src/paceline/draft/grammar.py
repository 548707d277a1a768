"""grammar: propose what the request's grammar forces, such as the names and punctuation of a JSON schema.

The draft is verified like any other, because the same text may be written in other tokens.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from paceline.draft.base import Drafter, DraftTree, Request


@runtime_checkable
class Forcing(Protocol):
    """A grammar that knows the tokens that must come next."""

    def forced(self, answer: list[int]) -> list[int]:
        """Tokens that must come after the answer's."""


class Forced(Drafter):
    """Proposes the tokens that the request's grammar forces."""

    name = "grammar"
    wants = "a grammar with the request"
    lossless = "yes"
    paper = "-"

    def draft(self, row: Request) -> DraftTree:
        grammar = row.params.grammar
        if not isinstance(grammar, Forcing):
            return DraftTree.root(row.last_token)
        tokens = grammar.forced(row.tokens[row.prompt_length :].tolist())
        return self.chain_after(row, np.array(tokens[: row.max_draft], np.int64))
