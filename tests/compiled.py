"""Compiles what the tests need compiled: python -m tests.compiled

Numba keeps it beside the sources, and pytest the bytecode of the tests, whose asserts it rewrites. In a fresh clone
every process of pytest would begin by making the same; `make test` runs this beside mypy, which leaves a core idle.
"""

from contextlib import redirect_stdout
from importlib import import_module
from os import devnull
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from paceline.compiled import cosines_and_sines
from paceline.core.noise import Noise
from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.kernels import rows
from paceline.replay.walk import tokens_only
from tests.draft.rows import target
from tests.draft.stores import ALL, corpus

KERNELS = ("attention", "delta", "program", "steps", "tiles")
"""Modules whose import compiles them."""
READERS = {
    "uint16": ("rest:{}", "suffix,corpus={}", "hierarchy,corpus={}", "sam,corpus={}"),
    "int32": ("rest:{}", "hierarchy,corpus={}", "sam,corpus={}"),
}
"""Drafters that read a corpus, by its type of tokens."""


def compile_all() -> None:
    """The target's kernels; what reads a row of logits; and bind every drafter that needs no checkpoint, which compiles
    what it has, and those that read a corpus."""
    for name in KERNELS:
        import_module(f"paceline.kernels.{name}")
    cosines_and_sines(np.zeros((1, 1), np.float32))
    logits = torch.zeros(1, 4)
    for read in (rows.best_token, rows.certainty_of_row):
        read(logits, 0)
    rows.top_tokens(logits, 2)
    rows.log_total(logits)
    probs = rows.softmax(logits)[0]
    rows.keep_best(probs, 2, 0.9, 0.1)
    noise = Noise(0)
    noise.choose(probs, 0)
    noise.happens(0.5, 0)
    tokens_only(Recording(None, (2,), 320))
    reader = target(".")
    reader.tokenizer = None
    with TemporaryDirectory() as folder:
        for dtype, specs in READERS.items():
            store = corpus(Path(folder) / str(dtype), ["abcde", "abxyz"], dtype=dtype, parts=ALL)
            for spec in specs:
                create(spec.format(store)).bind(reader)


def import_all() -> None:
    """Collect every test and run none. What is wrong with one pytest itself will say."""
    with open(devnull, "w") as nowhere, redirect_stdout(nowhere):
        pytest.main(["--collect-only", "-q", "-n0", "-p", "no:cacheprovider"])


if __name__ == "__main__":
    compile_all()
    import_all()
