"""The definition of looping, at its edges."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.fakes import TableTarget

from paceline.bench.looping import MT_BENCH, count_loops, is_looping, read_prompts, run, table
from paceline.engine.engine import Engine
from paceline.errors import PromptError


@pytest.mark.parametrize("period", [1, 2, 5, 16])
def test_repeats_of_an_ngram_loop(period: int) -> None:
    ngram = list(range(100, 100 + period))
    assert is_looping([1, 2, 3, *ngram * 64])


def test_an_ngram_of_17_tokens_is_no_loop_unless_asked_for() -> None:
    tokens = list(range(17)) * 8
    assert not is_looping(tokens)
    assert is_looping(tokens, max_ngram=17)


def test_the_loop_may_begin_in_the_middle_of_the_ngram() -> None:
    tokens = [7, 8, 9] * 40
    assert is_looping(tokens[1:])
    assert is_looping(tokens[2:])


def test_one_other_token_in_the_window_breaks_the_loop_and_one_before_it_does_not() -> None:
    loop = [3, 4] * 40
    for place in (-1, -30, -64):
        broken = list(loop)
        broken[place] = 99
        assert not is_looping(broken)
    broken = list(loop)
    broken[-65] = 99
    assert is_looping(broken)


def test_short_outputs_do_not_loop() -> None:
    assert not is_looping([5] * 63)
    assert is_looping([5] * 64)
    assert not is_looping([])


def test_text_that_quotes_itself_once_is_no_loop() -> None:
    line = list(range(40))
    assert not is_looping(line + line)


def test_arrays_do() -> None:
    assert is_looping(np.array([1, 2] * 50))
    assert not is_looping(np.arange(100))


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
    path.write_text('{"text": "a story"}')
    with pytest.raises(PromptError, match='line 1: a line is an object with "messages", "prompt" or "turns"'):
        read_prompts(path)
    with pytest.raises(SystemExit):
        run(["no/such/model", "--prompts", str(tmp_path / "none.jsonl")])
