"""The automata against brute force: the growing ones after every single token, the frozen one whole."""

from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draft.rows import tokens
from tests.draft.text_reading import occurrences, size, successors

from paceline.draft.text.automaton import STAMP_HOPS, Match, SuffixAutomaton
from paceline.draft.text.frozen import FRONT, FrozenAutomaton, build_part, from_parts
from paceline.draft.text.store import open_store, writing


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


def check(text: list[int]) -> None:
    """Match and size after every token of `text`."""
    brute, fast = BruteForce(), SuffixAutomaton(1)
    for n, token in enumerate(text, 1):
        expected = brute.append(token)
        fast.extend([token])
        match = fast.match()
        assert match.length == expected.length
        if match.length:
            assert match.first == expected.first
            assert text[match.recent - match.length : match.recent] == text[n - match.length : n]
            assert match.recent == expected.recent or len(set(text)) == 1
        assert len(fast) == n
        states, edges = size(fast)
        assert states <= max(2 * n - 1, 2)
        assert edges <= max(3 * n - 4, 3)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_equals_brute_force(text):
    check(text)


@settings(max_examples=60, deadline=None)
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
    assert automaton.match() == (n - 1, n - 1, n - 1)


def test_recent_stays_an_occurrence_where_the_walk_is_cut():
    deep = STAMP_HOPS + 50
    text = [1] * deep + [2] + [1] * deep + [3] + [1] * 10
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match = automaton.match()
    assert match.length == 10
    assert text[match.recent - 10 : match.recent] == [1] * 10


def longest_inside(text: list[int], query: list[int]) -> list[int]:
    """After every token of `query`: how many of its last tokens stand somewhere in `text`."""
    shared, lengths = np.zeros(len(text), np.int64), []
    for token in query:
        before = np.append(0, shared[:-1])
        shared = np.where(np.array(text) == token, before + 1, 0)
        lengths.append(int(shared.max(initial=0)))
    return lengths


def ends_of(text: list[int], what: list[int]) -> list[int]:
    """Where `what` ends in `text`, counted in tokens."""
    n = len(what)
    return [end for end in range(n, len(text) + 1) if text[end - n : end] == what]


def check_places(text: list[int], query: list[int]) -> None:
    """A cursor over `query` in every form, and all that the frozen form knows of each place it comes to."""
    growing, frozen = SuffixAutomaton(1), FrozenAutomaton.of(text)
    growing.extend(text)
    places = [(0, 0)] * 2
    for at, longest in enumerate(longest_inside(text, query), 1):
        new = query[at - 1 : at]
        places = [growing.transfer(*places[0], new), frozen.transfer(*places[1], new)]
        assert {length for _, length in places} == {longest}
        if longest == 0:
            continue
        state, ends = places[1][0], ends_of(text, query[at - longest : at])
        assert occurrences(frozen, state) == (ends[0], ends[-1], len(ends))
        assert growing.ends(places[0][0])[0] == ends[0]
        followed: dict[int, int] = {}
        for end in ends:
            if end < len(text):
                followed[text[end]] = followed.get(text[end], 0) + 1
        assert successors(frozen, state) == sorted(followed.items(), key=lambda one: (-one[1], one[0]))[:FRONT]
        assert frozen.chain(state, 9, recent=False).tolist() == text[ends[0] :][:9]
        assert frozen.chain(state, 9, recent=True).tolist() == text[ends[-1] :][:9]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_cursor_equals_brute_force(text):
    half = len(text) // 2
    check_places(text[:half], [*text[half - 20 : half + 120], 99_999, *text[-20:]])


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 12).flatmap(
        lambda k: st.tuples(*(st.lists(st.integers(0, k - 1), min_size=1, max_size=size) for size in (80, 40)))
    )
)
def test_a_cursor_equals_brute_force_on_any_text(both):
    check_places(*both)


def test_a_token_with_many_successors():
    """More than FRONT: some are kept by frequency, the others are found by bisection."""
    text = [token for other in [*range(1, 40), 7, 7, 9, 30, 30, 30] for token in (0, other)]
    frozen = FrozenAutomaton.of(text)
    state, _ = frozen.transfer(0, 0, [0])
    assert successors(frozen, state, 4) == [(30, 4), (7, 3), (9, 2), (1, 1)]
    assert all(frozen.transfer(state, 1, [other])[1] == 2 for other in range(1, 40))
    assert frozen.transfer(state, 1, [77]) == (0, 0)


def test_a_tree_holds_the_most_probable_continuations():
    text = tokens("abcxabcyabcxabdz.")
    frozen = FrozenAutomaton.of(text)
    state, _ = frozen.transfer(0, 0, tokens("ab"))
    found, parents, chances = frozen.tree(state, 6, width=8, depth=9, ends=[])
    assert "".join(map(chr, found)) == "cxabdy"
    assert parents.tolist() == [0, 1, 2, 3, 0, 1]
    assert chances == pytest.approx([3 / 4, 1 / 2, 1 / 2, 1 / 2, 1 / 4, 1 / 4])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=80),
    st.integers(1, 20),
    st.integers(1, 8),
    st.integers(0, 6),
    st.sets(st.integers(0, 3), max_size=2),
)
def test_every_tree_is_well_formed(text, size, width, depth, ends):
    frozen = FrozenAutomaton.of(text)
    state, length = frozen.transfer(0, 0, text[: len(text) // 2])
    found, parents, chances = frozen.tree(state, size, width=width, depth=depth, ends=ends)
    matched = text[len(text) // 2 - length : len(text) // 2]
    paths: list[list[int]] = [[]]
    for token, parent in zip(found.tolist(), parents.tolist(), strict=True):
        paths.append([*paths[parent], token])
    assert len(found) <= size
    assert (parents <= np.arange(len(found))).all()
    assert len({tuple(path) for path in paths}) == len(paths)
    levels = [len(path) for path in paths[1:]]
    assert all(levels.count(level) <= width and level <= depth for level in levels)
    assert (np.diff(chances) <= 1e-12).all()
    for path, chance in zip(paths[1:], chances, strict=True):
        assert not ends.intersection(path[:-1])
        share = 1.0
        for i, token in enumerate(path):
            share *= len(ends_of(text, [*matched, *path[:i], token])) / len(ends_of(text, [*matched, *path[:i]]))
        assert chance == pytest.approx(share)


@pytest.mark.parametrize("kind", [np.uint16, np.int32])
def test_a_saved_automaton_is_the_same(tmp_path, kind):
    text = np.array(copy_with_mutation(2000), kind)
    with writing(tmp_path / "corpus", kind="corpus", tokenizer="t") as store:
        store.add("text", text)
        for name, array in build_part(text, np.array([len(text)]), 12).items():
            store.add(name, array)
    saved, made = from_parts(open_store(tmp_path / "corpus", kind="corpus").array), FrozenAutomaton.of(text)
    for at in range(0, 1900, 50):
        query = text[at : at + 7].astype(np.int64)
        place = made.transfer(0, 0, query)
        assert saved.transfer(0, 0, query) == place
        for recent in (False, True):
            assert saved.chain(place[0], 20, recent=recent).tolist() == made.chain(place[0], 20, recent=recent).tolist()
        both = [form.tree(place[0], 20, width=4, depth=9, ends=[3]) for form in (saved, made)]
        assert all((one == other).all() for one, other in zip(*both, strict=True))


def test_progress_goes_up_to_1():
    told: list[float] = []
    FrozenAutomaton.of(uniform(20, 1000), told.append)
    assert told == sorted(told)
    assert told[-1] == 1
