"""The round in thirty lines of docs/architecture.md does what the engine does."""

import re

import numpy as np
import pytest
import torch

from paceline.core.noise import Noise
from paceline.core.sampling import SamplingParams
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from tests.fakes import TableTarget
from tests.paths import REPOSITORY

PROMPT, NEW, LENGTH = [0, 1], 20, 2


@pytest.fixture(scope="module")
def page():
    """What the page's code defines."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(compile(code, "docs/architecture.md", "exec"), names)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 30
    return names


class ByNoise(Drafter):
    """Chains of the row's noise and a draft model; the best ones for greedy rows."""

    name = "by-noise"

    def __init__(self, model):
        self.model = model

    def draft(self, row, most):
        drafted = []
        while len(drafted) < min(LENGTH, most):
            q = self.model.probabilities_after([*row.tokens.tolist(), *drafted], row.params)
            drafted.append(int(row.noise.guess(q, row.num_new + len(drafted))[0][0]))
        return self.chain_after(row, np.array(drafted, np.int64))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_the_engines(page, seed, temperature):
    """The same tokens, and as many of them in every round; the engine's first token comes from the prompt's forward."""
    target, draft = TableTarget(5, order=2, seed=seed), TableTarget(5, order=1, seed=seed)
    params = SamplingParams(max_tokens=NEW, seed=seed, temperature=temperature)
    models = [lambda tokens, of=of: of.probabilities_after(tokens, params).tolist() for of in (target, draft)]
    rates = Noise(seed)

    def noise(position, token):
        """What the engine's race compares: e to the power of a token's time where its rate is 1."""
        alone = torch.zeros(token + 1, dtype=torch.float64)
        alone[token] = 1.0
        return float(np.exp(-rates.guess(alone, position)[1][0]))

    deltas = list(Engine(target, ByNoise(draft), budget=False).stream([PROMPT], params))
    (first,) = page["generate"](models[0], models[1], PROMPT, 1, LENGTH, noise)
    assert deltas[0].tokens == first
    answer, rounds = [*first], []
    while len(answer) < NEW:
        length = min(LENGTH, NEW - len(answer) - 1)
        rounds.append(page["speculate"](*models, PROMPT, answer, length, noise))
        answer += rounds[-1]
    assert [delta.tokens for delta in deltas[1:]] == rounds
    assert max(map(len, rounds)) > 1
    plain = page["generate"](models[0], models[0], PROMPT, NEW, 0, noise)
    assert [token for of in plain for token in of] == answer
