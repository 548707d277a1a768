"""Where this repository and the optional data are."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
SOURCES = [REPOSITORY / "src" / "paceline", *sorted((REPOSITORY / "packages").glob("*/src/paceline"))]
"""The folders of `paceline`, one for each distribution."""
SHARED = Path(os.environ.get("PACELINE_SHARED", REPOSITORY.parent / "shared"))
"""Benchmark prompts, recorded answers and small public models; tests that want them are skipped without."""
DEVICE = os.environ.get("PACELINE_TEST_DEVICE", "cpu")
"""Where the losslessness tests run their models; `cuda` runs them on a GPU."""


def source(name: str) -> Path:
    """A file of `paceline`, by its path within."""
    return next(folder / name for folder in SOURCES if (folder / name).exists())
