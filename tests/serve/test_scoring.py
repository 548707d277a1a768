"""Likelihoods as lm-eval asks for them: several prompts with echo, log-probabilities, and one new token."""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from paceline.serve.scoring import prompt_logprobs
from tests import models, native
from tests.serve.live import engine, serving


def test_likelihoods_are_the_engines(tmp_path: Path) -> None:
    folder = models.make("qwen3", tmp_path / "tiny", **native.TINY)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, models.VOCAB_SIZE, n).tolist() for n in (1, 2, 9, 40)]
    made = engine(folder, max_batch=4)
    with serving(made) as address:
        body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        reply = httpx.post(f"{address}/v1/completions", json={"model": "tiny", **body}, timeout=60).json()
    alone = engine(folder)
    for i, (prompt, choice) in enumerate(zip(prompts, reply["choices"], strict=True)):
        assert choice["index"] == i
        columns = choice["logprobs"]
        assert len(columns["token_logprobs"]) == len(columns["top_logprobs"]) == len(prompt) + 1
        expected = prompt_logprobs(alone.target, np.array(prompt), 1)
        assert columns["token_logprobs"][0] is expected[0] is None
        own = [(one.logprob, one.top[0][1]) for one in expected[1:] if one is not None]
        assert columns["token_logprobs"][1:-1] == pytest.approx([logprob for logprob, _ in own], abs=1e-4)
        assert [max(top.values()) for top in columns["top_logprobs"][1:-1]] == pytest.approx(
            [best for _, best in own], abs=1e-4
        )
        # The new token is the most probable one, and told as such: lm-eval compares the two numbers.
        assert columns["token_logprobs"][-1] == max(columns["top_logprobs"][-1].values())
    assert not made.target.cache.held
