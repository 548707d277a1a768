"""The automaton against brute force, after every single token."""

from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.automaton import STAMP_HOPS, DictAutomaton, Match, SuffixAutomaton
from tests.draft.rows import tokens


class BruteForce:
    """shared[e]: how many tokens before end e equal those before the end of the text."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.shared = np.zeros(1, np.int64)

    def append(self, token: int) -> Match:
        before = np.array(self.text, np.int64)
        self.text.append(token)
        self.shared = np.append(0, np.where(before == token, self.shared[: len(before)] + 1, 0))
        length = int(self.shared.max())
        ends = np.flatnonzero(self.shared == length) if length else np.zeros(1, np.int64)
        return Match(length, int(ends[0]), int(ends[-1]))


def fibonacci(n: int) -> list[int]:
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


def copy_with_mutation(n: int) -> list[int]:
    random = np.random.default_rng(1)
    text = random.integers(0, 12, 50)
    while len(text) < n:
        copied = text[random.integers(0, len(text) - 20) :][: random.integers(5, 60)].copy()
        copied[random.integers(0, len(copied))] = random.integers(0, 12)
        text = np.concatenate([text, copied])
    return text[:n].tolist()


def uniform(alphabet: int, n: int) -> list[int]:
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


def walk_links(automaton: DictAutomaton) -> int:
    """Longest way to the root, checking on the way what every automaton keeps to."""
    longest = 0
    for state in range(1, len(automaton.next)):
        hops = 0
        assert automaton.first[state] >= automaton.length[state]
        while state:
            above = automaton.link[state]
            assert automaton.length[above] < automaton.length[state]
            state, hops = above, hops + 1
        longest = max(longest, hops)
    return longest


def check(text: list[int]) -> None:
    """Match, size and shape of both forms after every token of `text`."""
    brute, reference, fast = BruteForce(), DictAutomaton(), SuffixAutomaton(1)
    for n, token in enumerate(text, 1):
        expected = brute.append(token)
        reference.extend([token])
        fast.extend([token])
        match = fast.match()
        if expected.length == 0:
            assert reference.match().length == match.length == 0
        else:
            assert reference.match() == expected
            assert match[:2] == expected[:2]
            assert text[match.recent - match.length : match.recent] == text[n - match.length : n]
            assert match.recent == expected.recent or len(set(text)) == 1
        assert len(fast) == len(reference) == n
        num_edges = sum(map(len, reference.next))
        assert fast.num_states == len(reference.next) <= max(2 * n - 1, 2)
        if n == len(text) or n % 97 == 0:
            assert fast.num_edges == num_edges <= max(3 * n - 4, 3)
    walk_links(reference)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_equals_brute_force(text):
    check(text)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20).flatmap(lambda k: st.lists(st.integers(0, k - 1), min_size=1, max_size=120)))
def test_equals_brute_force_on_any_text(text):
    check(text)


@pytest.mark.parametrize(
    ("text", "states", "edges", "match"),
    [
        ("abcab", 6, 7, (2, 2)),
        ("abcabc", 7, 8, (3, 3)),
        ("abcbc", 8, 9, (2, 3)),
        ("aaaaaa", 7, 6, (5, 5)),
        ("abcabcabc", 10, 11, (6, 6)),
        ("abcde", 6, 9, (0, 0)),
    ],
)
def test_worked_examples(text, states, edges, match):
    automaton = SuffixAutomaton()
    automaton.extend(tokens(text))
    assert (automaton.num_states, automaton.num_edges) == (states, edges)
    assert automaton.match()[:2] == match


def test_empty():
    assert SuffixAutomaton().match() == DictAutomaton().match() == Match(0, 0, 0)


def test_match_length_is_that_of_the_published_cursor():
    """The official code moves a cursor with every token before appending it; ours is read off the last link."""
    text, automaton = copy_with_mutation(400), DictAutomaton()
    state = length = 0
    for token in text:
        while state and token not in automaton.next[state]:
            state = automaton.link[state]
            length = automaton.length[state]
        if token in automaton.next[state]:
            state, length = automaton.next[state][token], length + 1
        else:
            state = length = 0
        automaton.extend([token])
        assert automaton.match().length == length


@pytest.mark.parametrize("step", [1, 3, 64, 1000])
def test_growth_and_batches_change_nothing(step):
    text = copy_with_mutation(3000)
    whole, parts = SuffixAutomaton(10_000), SuffixAutomaton(1)
    for at in range(0, len(text), step):
        parts.extend(np.array(text[at : at + step]))
        whole.extend(text[at : at + step])
        assert parts.match() == whole.match()
    assert (parts.num_states, parts.num_edges) == (whole.num_states, whole.num_edges)


def test_a_read_only_array_may_be_appended():
    text = np.array([1, 2, 1, 2])
    text.flags.writeable = False
    automaton = SuffixAutomaton()
    automaton.extend(text[::1])
    assert automaton.match() == (2, 2, 2)


def test_repetition_stays_linear():
    """Stamping every suffix of "aaaa" would take n hops a token: 1.8e9 here."""
    n = 60_000
    automaton = SuffixAutomaton(n)
    automaton.extend([1])
    began = perf_counter()
    automaton.extend([1] * (n - 1))
    assert perf_counter() - began < 1
    assert automaton.match() == (n - 1, n - 1, n - 1)


def test_recent_stays_an_occurrence_where_the_walk_is_cut():
    deep = STAMP_HOPS + 50
    text = [1] * deep + [2] + [1] * deep + [3] + [1] * 10
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match = automaton.match()
    assert match.length == 10
    assert text[match.recent - 10 : match.recent] == [1] * 10
