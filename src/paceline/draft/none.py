"""none: no drafts. The engine decodes plainly, the baseline of all other methods."""

from __future__ import annotations

from paceline.draft.base import Drafter


class NoDraft(Drafter):
    """Proposes nothing: plain decoding, one token a forward."""

    name = "none"
    lossless = "yes"
    paper = "-"
