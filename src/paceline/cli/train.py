"""`paceline train`: drafters for a model of yours, and model families, with the recipes of `paceline.train`.

The same commands as `python -m paceline.train`, which is what a launcher of several processes takes:

    accelerate launch --multi_gpu --num_processes 2 -m paceline.train draft MODEL ...
"""

from paceline.train.__main__ import app as train

__all__ = ["train"]
