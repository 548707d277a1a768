"""none: no drafts. With it the engine decodes plainly, token by token: the baseline of all other methods."""

from __future__ import annotations

from paceline.draft.base import Drafter


class NoDraft(Drafter):
    """Proposes nothing: plain decoding, one token a forward."""

    name = "none"
    lossless = "yes"
    paper = "-"
