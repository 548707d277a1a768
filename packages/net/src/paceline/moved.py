"""Names that lie in another module now. Their old module still has them, for one version, and warns.

A module that names have left calls `aliases` at its end."""

import sys
import warnings
from importlib import import_module
from typing import Any

MOVED: dict[str, dict[str, tuple[str, ...]]] = {
    "paceline.certify.command": {"paceline.certify.server": ("certify_server", "write")},
    "paceline.certify.conditional": {"paceline.certify.exact": ("read",)},
    "paceline.certify.greedy": {"paceline.certify.acceptance": ("acceptance", "measured")},
    "paceline.certify.oracles": {"paceline.certify.exact": ("Exact", "Prompts")},
    "paceline.certify.sampled": {"paceline.certify.exact": ("distribution_of",)},
    "paceline.core.noise": {"paceline.core.noise_rows": ("tokens_of_rows",)},
    "paceline.core.round": {"paceline.core.accept": ("score_prompts",)},
    "paceline.core.sampling": {
        "paceline.core.params": ("Grammar", "WARPING", "token_id"),
        "paceline.core.rules": ("RULES",),
    },
    "paceline.draft.options": {"paceline.core.options": ("option", "Options", "check_range", "quoted")},
    "paceline.peers.reference": {"paceline.runs.chance": ("is_tie",)},
    "paceline.target.load": {"paceline.formats.tokenizer_files": ("TOKENIZER_FILES",)},
}
"""By old module and new module: the names."""


def aliases(module: str) -> None:
    """Let a module give the names that left it, each with a DeprecationWarning that says where it is."""
    places = {name: place for place, names in MOVED[module].items() for name in names}

    def moved(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is {places[name]}.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(import_module(places[name]), name)

    # Written into the module as a function, it would keep mypy from seeing misspelt imports.
    vars(sys.modules[module])["__getattr__"] = moved
