"""What tests of recipes share: accelerate's state, and answers that can be learnt."""

import json

import numpy as np
import pytest
from accelerate.state import AcceleratorState

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from tests import models


@pytest.fixture(autouse=True)
def own_precision():
    """accelerate settles a process's precision once, and recipes and their commands use different ones."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def following_answers(file):
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


@pytest.fixture(scope="session")
def lesson(tmp_path_factory):
    """A target whose next token hangs on the last one, and texts of its own making."""
    root = tmp_path_factory.mktemp("lesson")
    models.make_repetitive(root / "target", tie_word_embeddings=False)
    prompts = np.random.default_rng(0).integers(4, 288, (96, 4)).tolist()
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    done = Engine(root / "target", "none", dtype="float32").generate(prompts, params)
    rows = [{"source": "own", "prompt_tokens": p, "tokens": one.tokens} for p, one in zip(prompts, done, strict=True)]
    (root / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root / "target", root / "answers.jsonl"


def rounds(target, spec):
    """Rounds of a drafter with the lesson's target, on prompts of its own."""
    prompts = np.random.default_rng(5).integers(4, 288, (12, 4)).tolist()
    engine = Engine(target, f"{spec},tree=0,draft=3", dtype="float32")
    return sum(one.rounds for one in engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True)))
