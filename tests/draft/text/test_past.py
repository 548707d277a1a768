"""The memory of finished requests that copying drafters share."""

from types import SimpleNamespace

import numpy as np
import pytest

from paceline.draft.text.copying import SALTS, BySalt, TwoHalves
from paceline.errors import MethodError


class Texts:
    """Keeps all that it is told."""

    def __init__(self, tokens):
        self.tokens, self.held = tokens, list[int]()

    def __len__(self):
        return len(self.held)

    def learn(self, text):
        self.held += text.tolist()
        assert len(self) <= self.tokens


def row(first, end, is_complete=True):
    return SimpleNamespace(tokens=np.arange(first, end), is_complete=is_complete)


def known(memory):
    return [token for half in reversed(memory.halves) for token in half.held]


def test_the_oldest_requests_are_forgotten_and_half_of_the_memory_is_always_known():
    memory = TwoHalves(40, Texts)
    for first in range(0, 200, 5):
        memory.learn(row(first, first + 5))
        assert len(known(memory)) <= 40
        assert known(memory)[-20:] == [*range(max(first - 15, 0), first + 5)]
    assert 150 not in known(memory)


def test_of_a_long_request_the_end_is_remembered():
    memory = TwoHalves(20, Texts)
    memory.learn(row(0, 100))
    assert known(memory) == [*range(90, 100)]


def test_more_than_there_is_memory_for_is_one_line():
    with pytest.raises(MethodError, match="there is no memory for that many tokens"):
        TwoHalves(1 << 62, lambda tokens: np.empty(tokens, np.int64))


def test_what_follows_a_request_is_remembered_and_a_request_given_up_is_not():
    memory = TwoHalves(20, Texts)
    memory.learn(row(0, 3), 7)
    memory.learn(row(3, 6, is_complete=False))
    assert known(memory) == [0, 1, 2, 7]
    nothing = TwoHalves(1, Texts)
    nothing.learn(row(0, 3))
    assert nothing.halves == []


def test_what_is_kept_for_clients_is_bounded_and_the_one_that_was_used_longest_ago_is_forgotten():
    memories = BySalt(lambda: TwoHalves(20, Texts))
    for client in range(SALTS):
        memories.of(str(client)).learn(row(client, client + 1))
    memories.of("0")
    for client in range(SALTS, 2 * SALTS - 1):
        memories.of(str(client))
    assert len(memories._kept) == SALTS
    assert known(memories.of("0")) == [0]
    assert known(memories.of("1")) == []
