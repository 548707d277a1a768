"""grammar: propose what the request's grammar forces, such as the names and punctuation of a JSON schema.

The draft is verified like any other, because the same text may be written in other tokens."""

import numpy as np

from paceline.draft.base import Drafter, DraftTree, Request


class Forced(Drafter):
    """Proposes the tokens that the request's grammar forces."""

    name = "grammar"
    wants = "a grammar with the request"
    lossless = "yes"
    paper = "-"

    def draft(self, row: Request, most: int) -> DraftTree:
        forced = getattr(row.params.grammar, "forced", None)  # Some grammars lack it.
        tokens = [] if forced is None else forced(row.tokens[row.prompt_length :].tolist())
        return self.chain_after(row, np.array(tokens[:most], np.int64))
