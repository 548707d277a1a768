"""Everyday things drawn by code, so that no picture has an owner or a licence to ask about.

    kind = KINDS["fish"]
    kind.draw(colour)        # a Drawing

Each family of kinds is a module; importing them registers what they draw.
"""

from paceline.evals.vision.objects import animals, food, household, nature, traffic
from paceline.evals.vision.objects.kinds import HELD_OUT, KINDS, Kind

__all__ = ["HELD_OUT", "KINDS", "Kind", "animals", "food", "household", "nature", "traffic"]
