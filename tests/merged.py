"""Run a command that looks for `paceline` in one folder, such as import-linter: its distributions, linked together.

    python -m tests.merged lint-imports --no-cache"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.paths import REPOSITORY, SOURCES


def merge(folder: Path) -> None:
    """Link every module to one folder `paceline`."""
    for source in SOURCES:
        for file in source.rglob("*.py"):
            link = folder / "paceline" / file.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)


if __name__ == "__main__":
    with TemporaryDirectory() as found:
        merge(Path(found))
        sys.exit(subprocess.call(sys.argv[1:], cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": found}))
