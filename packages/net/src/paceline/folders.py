"""The folder of things that can be made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of downloads, and of files made of models and sources: $XDG_CACHE_HOME/paceline, or
    ~/.cache/paceline."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
