"""The definition of looping, at its edges."""

import numpy as np
import pytest

from paceline.bench.record import is_looping

LOOP = [3, 4] * 40
LINE = list(range(40))


@pytest.mark.parametrize(("tokens", "loops"), [
    *(([1, 2, 3, *list(range(100, 100 + period)) * 64], True) for period in (1, 2, 5, 16)),
    (list(range(17)) * 8, False),
    (([7, 8, 9] * 40)[1:], True),
    (([7, 8, 9] * 40)[2:], True),
    *(([*LOOP[:place], 99, *LOOP[len(LOOP) + place + 1 :]], place == -65) for place in (-1, -30, -64, -65)),
    ([5] * 63, False),
    ([5] * 64, True),
    ([], False),
    (LINE + LINE, False),  # text that quotes itself once
    (np.array([1, 2] * 50), True),
    (np.arange(100), False),
])
def test_what_loops(tokens, loops):
    assert is_looping(tokens) == loops
