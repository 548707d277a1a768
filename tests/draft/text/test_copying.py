"""The memory of finished requests that copying drafters share, and what stands after end tokens."""

import numpy as np
import pytest

from paceline.draft.base import up_to_ends
from paceline.draft.text.copying import TwoHalves
from paceline.errors import MethodError


class Texts:
    """Keeps all that it is told."""

    def __init__(self, tokens: int):
        self.tokens, self.held = tokens, list[int]()

    def __len__(self) -> int:
        return len(self.held)

    def learn(self, text: np.ndarray) -> None:
        self.held += text.tolist()
        assert len(self) <= self.tokens


def known(memory: TwoHalves[Texts]) -> list[int]:
    return [token for half in reversed(memory.halves) for token in half.held]


def test_the_oldest_requests_are_forgotten_and_half_of_the_memory_is_always_known() -> None:
    memory = TwoHalves(40, Texts)
    for first in range(0, 200, 5):
        memory.learn(np.arange(first, first + 5))
        assert len(known(memory)) <= 40
        assert known(memory)[-20:] == [*range(max(first - 15, 0), first + 5)]
    assert 150 not in known(memory)


def test_of_a_long_request_the_end_is_remembered() -> None:
    memory = TwoHalves(20, Texts)
    memory.learn(np.arange(100))
    assert known(memory) == [*range(90, 100)]


def test_more_than_there_is_memory_for_is_one_line() -> None:
    with pytest.raises(MethodError, match="there is no memory for that many tokens"):
        TwoHalves(1 << 62, lambda tokens: np.empty(tokens, np.int64))  # type: ignore[type-var, arg-type]


def test_a_tree_is_cut_after_end_tokens() -> None:
    # 1 -> (2 -> (4 -> 6, 5), 3 -> 4)
    drafted, parent = np.array([2, 3, 4, 5, 4, 6]), np.array([0, 0, 1, 1, 2, 3])
    for ends, left, above in [
        ({9}, [2, 3, 4, 5, 4, 6], [0, 0, 1, 1, 2, 3]),
        ({2}, [2, 3, 4], [0, 0, 2]),
        ({4}, [2, 3, 4, 5, 4], [0, 0, 1, 1, 2]),
        ({2, 3}, [2, 3], [0, 0]),
    ]:
        found = up_to_ends(drafted, parent, frozenset(ends))
        assert [one.tolist() for one in found] == [left, above]
