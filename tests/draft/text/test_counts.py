"""N-gram counts of a growing text against counting by hand."""

import numpy as np
import pytest
from tests.draft.text_reading import followers

from paceline.draft.text.counts import ContextCounts


def by_hand(text: list[int], context: tuple[int, ...]) -> dict[int, int]:
    found: dict[int, int] = {}
    for end in range(len(context), len(text)):
        if tuple(text[end - len(context) : end]) == context:
            found[text[end]] = found.get(text[end], 0) + 1
    return found


@pytest.mark.parametrize("alphabet", [1, 2, 5, 40_000])
@pytest.mark.parametrize("longest", [1, 3, 6])
def test_counts_equal_counting_by_hand(alphabet: int, longest: int) -> None:
    rng = np.random.default_rng(alphabet)
    text = rng.integers(0, alphabet, 150).tolist()
    counts, at = ContextCounts(longest, 1), 0
    while at < len(text):  # in pieces of any size, so that contexts reach across them
        step = int(rng.integers(1, 9))
        counts.extend(text[at : at + step])
        at += step
    assert len(counts) == len(text)
    for end in range(longest, len(text), 7):
        for length in range(1, longest + 1):
            context = tuple(text[end - length : end])
            assert followers(counts, context) == by_hand(text, context)
    assert followers(counts, [alphabet]) == {}


def test_nothing_follows_across_a_cut() -> None:
    counts = ContextCounts(2)
    counts.learn(np.array([1, 2]))
    counts.learn(np.array([3, 4]))
    assert followers(counts, [2]) == {}
    assert followers(counts, [3]) == {4: 1}
    assert len(counts) == 4
