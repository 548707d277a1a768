"""Counting the answers of a model that run into a loop, and the prompts for it."""

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from tests.fakes import TableTarget
from zoo.looping import MT_BENCH, count_loops, read_prompts, run, table


def test_loops_of_a_model_are_counted() -> None:
    """Order-1 tables: one that cycles through three tokens, one that ends its answers."""
    after = [1, 2, 3, 1, 5, 6, 7, 7]  # 1 2 3 1 2 3 ..., and 4 5 6 7, the end

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        return np.where(np.arange(8) == after[prefix[-1]], 50.0, -50.0)

    engine = Engine(TableTarget(8, logits=logits, order=1, eos=(7,)), max_batch=2)
    found = count_loops(engine, [[1], [4], [3], [1] * 5000], "x", temperature=0.0, tokens=80)
    assert (found.answers, found.looping, found.ended, found.too_long) == (3, 2, 1, 1)
    assert found.mean_tokens == pytest.approx((80 + 80 + 3) / 3)
    assert table([found]).splitlines()[-1] == "| x | 0 | 3 | 2 (66.7%) | 1 | 54 |"


def test_prompts_of_a_file(tmp_path: Path) -> None:
    lines = [
        {"turns": ["first", "second"], "category": "math"},
        {"turns": ["other"], "category": "rag"},
        {"prompt": "text"},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [m[-1]["content"] for m in read_prompts(path)] == ["first", "other", "text", "hi"]
    assert [m[-1]["content"] for m in read_prompts(path, MT_BENCH)] == ["first", "text", "hi"]
    path.write_text('{"question": "?"}')
    with pytest.raises(PacelineError, match="line 1: no response"):
        read_prompts(path)
    with pytest.raises(SystemExit):
        run(["no/such/model", "--prompts", str(tmp_path / "none.jsonl")])
