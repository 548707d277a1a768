"""none: no drafts. The engine decodes plainly, which is the baseline of all other methods."""

from paceline.draft.base import Drafter


class NoDraft(Drafter):
    """Proposes nothing: plain decoding, one token a forward."""

    name = "none"
    lossless = "yes"
    paper = "-"
