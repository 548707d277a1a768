"""Where this repository and the optional data are."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
SHARED = Path(os.environ.get("PACELINE_SHARED", REPOSITORY.parent / "shared"))
"""Benchmark prompts, recorded answers and small public models; tests that want them are skipped without."""
DEVICE = os.environ.get("PACELINE_TEST_DEVICE", "cpu")
"""Where the losslessness tests run their models; `cuda` runs them on a GPU."""
