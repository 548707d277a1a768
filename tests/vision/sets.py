"""Small data sets and models for the tests of the vision evaluation."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from paceline.evals.vision.captions import VALUES
from paceline.evals.vision.dataset import read_data
from paceline.evals.vision.options import BuildOptions
from paceline.evals.vision.writer import build


@cache
def sample():
    """Four cases of each subset at 96 pixels: 120 pictures. Shared, so not to be changed."""
    folder = Path(mkdtemp(prefix="vision-"))
    build(BuildOptions(seed=5, size=96), dict.fromkeys(VALUES, 4), folder, workers=1)
    return folder


def data():
    """The sample, read."""
    return read_data(sample())
