"""What tests of recipes share: accelerate's state, and answers that can be learnt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def own_precision() -> Iterator[None]:
    """accelerate settles a process's precision once, and recipes and their commands use different ones."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def following_answers(file: Path) -> Path:
    """Answers in which every token but the first follows from the one before."""
    rng = np.random.default_rng(0)
    after = rng.permutation(np.arange(4, 40))
    with file.open("w") as lines:
        for n in range(60):
            text = [int(rng.integers(4, 40))]
            for _ in range(20):
                text.append(int(after[text[-1] - 4]))
            row = {"id": f"answer {n}", "source": "made", "prompt_tokens": text[:5], "tokens": text[5:]}
            lines.write(json.dumps(row) + "\n")
    return file
