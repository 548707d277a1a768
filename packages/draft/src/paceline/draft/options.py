"""Empty: `paceline.core.options` has what was here."""

from paceline.moved import aliases

aliases(__name__)
