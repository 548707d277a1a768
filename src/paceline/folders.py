"""Where Paceline keeps what can be made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Of downloads and of what is made of models and sources: $XDG_CACHE_HOME/paceline, or ~/.cache/paceline."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
