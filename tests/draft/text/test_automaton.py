"""The automaton against brute force, after every single token."""

from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draft.text_reading import size

from paceline.draft.text.automaton import STAMP_HOPS, Match, SuffixAutomaton


class BruteForce:
    """shared[e]: how many tokens before end e equal those before the end of the text."""

    def __init__(self):
        self.text = []
        self.shared = np.zeros(1, np.int64)

    def append(self, token):
        before = np.array(self.text, np.int64)
        self.text.append(token)
        self.shared = np.append(0, np.where(before == token, self.shared[: len(before)] + 1, 0))
        length = int(self.shared.max())
        ends = np.flatnonzero(self.shared == length) if length else np.zeros(1, np.int64)
        return Match(length, int(ends[-1]))


def fibonacci(n):
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


def copy_with_mutation(n):
    random = np.random.default_rng(1)
    text = random.integers(0, 12, 50)
    while len(text) < n:
        copied = text[random.integers(0, len(text) - 20) :][: random.integers(5, 60)].copy()
        copied[random.integers(0, len(copied))] = random.integers(0, 12)
        text = np.concatenate([text, copied])
    return text[:n].tolist()


def uniform(alphabet, n):
    return np.random.default_rng(alphabet).integers(0, alphabet, n).tolist()


TEXTS = {
    "fibonacci": fibonacci(600),
    "period 1": [5] * 200,
    "period 3": [0, 7, 2] * 60,
    "copies": copy_with_mutation(600),
    "alphabet 2": uniform(2, 600),
    "alphabet 20": uniform(20, 600),
    "all new": list(range(100)),
    "token 0": [0, 0, 1, 0, 0, 1, 0, 0],
}


def check(text):
    """Match and size after every token of `text`."""
    brute, fast = BruteForce(), SuffixAutomaton(1)
    for n, token in enumerate(text, 1):
        expected = brute.append(token)
        fast.extend([token])
        match = fast.match()
        assert match.length == expected.length
        if match.length:
            assert text[match.recent - match.length : match.recent] == text[n - match.length : n]
            assert match.recent == expected.recent or len(set(text)) == 1
        assert len(fast) == n
        states, edges = size(fast)
        assert states <= max(2 * n - 1, 2)
        assert edges <= max(3 * n - 4, 3)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_equals_brute_force(text):
    check(text)


@settings(max_examples=60)
@given(st.integers(1, 20).flatmap(lambda k: st.lists(st.integers(0, k - 1), min_size=1, max_size=120)))
def test_equals_brute_force_on_any_text(text):
    check(text)


@pytest.mark.parametrize("step", [1, 3, 64, 1000])
def test_growth_and_batches_change_nothing(step):
    text = copy_with_mutation(3000)
    whole, parts = SuffixAutomaton(10_000), SuffixAutomaton(1)
    for at in range(0, len(text), step):
        parts.extend(np.array(text[at : at + step]))
        whole.extend(text[at : at + step])
        assert parts.match() == whole.match()
    assert size(parts) == size(whole)


def test_repetition_stays_linear():
    """Stamping every suffix of "aaaa" would take n hops a token: 1.8e9 here."""
    n = 60_000
    automaton = SuffixAutomaton(n)
    automaton.extend([1])
    began = perf_counter()
    automaton.extend([1] * (n - 1))
    assert perf_counter() - began < 1
    assert automaton.match() == (n - 1, n - 1)


def test_recent_stays_an_occurrence_where_the_walk_is_cut():
    deep = STAMP_HOPS + 50
    text = [1] * deep + [2] + [1] * deep + [3] + [1] * 10
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match = automaton.match()
    assert match.length == 10
    assert text[match.recent - 10 : match.recent] == [1] * 10


def longest_inside(text, query):
    """After every token of `query`: how many of its last tokens stand somewhere in `text`."""
    shared, lengths = np.zeros(len(text), np.int64), []
    for token in query:
        before = np.append(0, shared[:-1])
        shared = np.where(np.array(text) == token, before + 1, 0)
        lengths.append(int(shared.max(initial=0)))
    return lengths


def ends_of(text, what):
    """Where `what` ends in `text`, counted in tokens."""
    n = len(what)
    return [end for end in range(n, len(text) + 1) if text[end - n : end] == what]


def check_places(text, query):
    """The longest match after every token of `query`, and where the text has it."""
    growing = SuffixAutomaton(1)
    growing.extend(text)
    for at, longest in enumerate(longest_inside(text, query), 1):
        length, place = growing.after(query[:at])
        assert length == longest
        if longest:
            assert place in ends_of(text, query[at - longest : at])


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_another_text_is_matched_as_by_brute_force(text):
    half = len(text) // 2
    check_places(text[:half], [*text[half - 20 : half + 120], 99_999, *text[-20:]])


@settings(max_examples=100)
@given(
    st.integers(1, 12).flatmap(
        lambda k: st.tuples(*(st.lists(st.integers(0, k - 1), min_size=1, max_size=size) for size in (80, 40)))
    )
)
def test_any_other_text_is_matched_as_by_brute_force(both):
    check_places(*both)
