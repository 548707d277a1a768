"""The suffix array against sorting and searching by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draft.stores import locked
from tests.draft.text_reading import count

from paceline.draft.text import suffix_array
from paceline.draft.text.suffix_array import SuffixArray, build_part
from paceline.draft.text.suffix_tree import SuffixTree
from paceline.errors import StoreError

END = 0
TOKENS = st.integers(1, 5).flatmap(lambda k: st.lists(st.integers(0, k), max_size=14))
"""Few kinds of tokens, so that runs come back; an end token may stand inside a document too."""
DOCUMENTS = st.lists(TOKENS, min_size=1, max_size=6)


def array_of(documents, dtype=np.uint16, shift=0):
    """The array of `documents`, each closed with the end token; `shift` is added to all other tokens."""
    closed = [[token + shift * (token != END) for token in one] + [END] for one in documents]
    text = np.concatenate([np.array(one, dtype) for one in closed])
    return made(text, np.cumsum([len(one) for one in closed])), closed


def made(text, ends):
    return SuffixArray(*locked(text, ends, build_part(text, ends, 10)["suffix_positions"]))


def suffixes(closed):
    """(tokens to the end of the document, place in the text) of every suffix."""
    begins = np.cumsum([0, *(len(one) for one in closed)])
    return [(one[i:], int(begins[d]) + i) for d, one in enumerate(closed) for i in range(len(one))]


@settings(max_examples=100)
@given(DOCUMENTS)
def test_order_is_that_of_sorting_by_hand(documents):
    array, closed = array_of(documents)
    assert array.positions.dtype == np.int32
    assert array.positions.tolist() == [place for _, place in sorted(suffixes(closed))]


@settings(max_examples=100)
@given(DOCUMENTS, TOKENS, st.sampled_from([(np.int32, 0), (np.uint16, 0), (np.uint16, 60_000), (np.int32, 70_000)]))
def test_find_finds_every_place_and_no_other(documents, key, kind):
    dtype, shift = kind
    array, closed = array_of(documents, dtype, shift)
    key = [token + shift * (token != END) for token in key]
    lo, hi = array.find(key)
    places = [place for tokens, place in suffixes(closed) if tokens[: len(key)] == key]
    assert sorted(array.positions[lo:hi].tolist()) == places


@settings(max_examples=100)
@given(DOCUMENTS, TOKENS, st.integers(1, 6), st.integers(1, 4))
def test_longest_suffix_that_occurs(documents, context, most, least):
    array, closed = array_of(documents)
    known = [tokens for tokens, _ in suffixes(closed)]
    expected = (0, 0, 0)
    for length in range(min(most, len(context)), least - 1, -1):
        if any(tokens[:length] == context[len(context) - length :] for tokens in known):
            expected = (length, *array.find(context[len(context) - length :]))
            break
    assert array.longest(context, most, least) == expected


@settings(max_examples=100)
@given(DOCUMENTS, TOKENS, st.integers(1, 5), st.integers(1, 4))
def test_continuations_end_with_their_document(documents, key, most, length):
    array, closed = array_of(documents)
    lo, hi = array.find(key)
    behind = sorted(tokens for tokens, _ in suffixes(closed) if tokens[: len(key)] == key)
    padded = [(tokens[len(key) :] + [-1] * length)[:length] for tokens in behind]
    found = array.continuations(lo, hi, most, length, len(key))
    assert found.dtype == np.int32
    assert found.shape == (min(most, hi - lo), length)
    rows = found.tolist()
    assert array.continuations(lo, hi, hi - lo, length, len(key)).tolist() == padded
    assert all(row in padded for row in rows)


def test_of_many_places_an_even_spread_is_taken():
    array, _ = array_of([[1, 2 + i] for i in range(100)])
    lo, hi = array.find([1])
    assert array.continuations(lo, hi, 4, 1, 1)[:, 0].tolist() == [2, 27, 52, 77]


@pytest.mark.parametrize("repeat", [[1], [1, 2], [3, 1, 2, 2]])
def test_a_text_that_only_repeats_itself(repeat):
    array, closed = array_of([repeat * 500])
    assert array.positions.tolist() == [place for _, place in sorted(suffixes(closed))]


def test_an_empty_corpus_has_nothing():
    array = made(np.empty(0, np.uint16), np.empty(0, np.int64))
    assert array.find([1]) == (0, 0)
    assert array.longest([1, 2]) == (0, 0, 0)
    assert array.continuations(0, 0, 5, 4, 1).shape == (0, 4)
    assert array.end_token == -1


def test_a_corpus_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(suffix_array, "MOST_TOKENS", 10)
    with pytest.raises(StoreError, match="holds 10 tokens, and the corpus has 10; split it"):
        build_part(np.zeros(10, np.int32), np.array([10]), 1)


def test_progress_grows_to_one():
    seen = []
    build_part(np.random.default_rng(0).integers(0, 5, 1000), np.array([1000]), 5, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) > 3


@settings(max_examples=100)
@given(
    DOCUMENTS, TOKENS, st.integers(1, 8), st.sampled_from([(1.0, 0.0), (2.0, 1.0)]), st.floats(0.01, 0.6), st.booleans()
)
def test_it_speculates_as_a_tree_of_the_same_documents_does(documents, context, most, size, min_prob, branch):
    documents = [[token for token in one if token != END] for one in documents]
    context = [token for token in context if token != END]
    array, closed = array_of(documents)
    tree = SuffixTree(40)
    for one in closed:
        tree.append(one)
        tree.close()
    found, expected = (source.speculate(context, most, *size, min_prob, branch) for source in (array, tree))
    if branch:  # on a path, equal counts go on with another token each
        assert found.probs.tolist() == pytest.approx(expected.probs.tolist())
        assert found.match == expected.match
    paths = [()]
    for token, above in zip(found.tokens.tolist(), found.parent.tolist(), strict=True):
        paths.append((*paths[above], token))
    suffix = tuple(context[len(context) - found.match :])
    for path, prob in zip(paths[1:], found.probs.tolist(), strict=True):
        assert count(tree, suffix + path) / count(tree, suffix) == pytest.approx(prob)
        assert prob >= min_prob
    assert found.score == pytest.approx(sum(found.probs))


def test_a_token_is_never_likelier_than_the_one_before_it_however_shares_are_rounded():
    """(1 / 5) * 3 / 3 is above 1 / 5 in floating point."""
    array, _ = array_of([[1, 10 + i, 20 + i] for i in range(5) for _ in range(3)])
    found = array.speculate([1], 20, 20, 0, 0.1, True)
    paths = [()]
    for token, above in zip(found.tokens.tolist(), found.parent.tolist(), strict=True):
        paths.append((*paths[above], token))
    assert set(paths[1:]) == {path for i in range(10, 15) for path in ((i,), (i, i + 10), (i, i + 10, END))}


def test_nothing_is_speculated_behind_the_end_of_a_document():
    array, _ = array_of([[1, 2], [3, 4]])
    assert array.speculate([1], 5, 5).tokens.tolist() == [2, END]
    assert array.speculate([2, END], 5, 5).tokens.tolist() == []
