"""The definition of looping, at its edges."""

import numpy as np
import pytest

from paceline.bench.looping import is_looping


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
