"""n-gram stores against their definitions in plain Python."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.text.ngrams import FrequentNgrams, PastNgrams, RecentNgrams, build_part

TEXT = st.lists(st.integers(0, 3), max_size=40)
DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8)


def after(store, token):
    return [list(gram) for gram in store.after(token)]


def frequent(documents, vocab_size=8, **how):
    text = np.array([token for document in documents for token in document], np.int32)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    arrays = build_part(text, ends, vocab_size, **how)
    return FrequentNgrams(arrays["ngrams_starts"], arrays["ngrams_values"])


def ngrams(text, n):
    return [tuple(text[at : at + n]) for at in range(len(text) - n + 1)]


def newest(text, token, n, ways):
    """Distinct n-grams that begin with `token`, the latest first."""
    of_token = [gram for gram in reversed(ngrams(text, n)) if gram[0] == token]
    return [list(gram[1:]) for gram in dict.fromkeys(of_token)][:ways]


# The context ---------------------------------------------------------------------------------------------------------


def test_an_ngram_seen_again_is_the_newest_and_the_one_longest_unseen_goes():
    store = RecentNgrams(2, 7)
    text = [0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7]
    store.update(np.array(text))
    assert after(store, 0) == [[7], [6], [5], [4], [3], [2], [1]]
    store.update(np.array([*text, 0, 3]))
    assert after(store, 0) == [[3], [7], [6], [5], [4], [2], [1]]
    store.update(np.array([*text, 0, 3, 0, 8]))
    assert after(store, 0) == [[8], [3], [7], [6], [5], [4], [2]]


@settings(max_examples=100)
@given(TEXT, st.lists(st.integers(0, 9), max_size=6), st.integers(2, 6), st.integers(1, 8))
def test_the_context_is_its_definition(text, rounds, n, ways):
    store, end = RecentNgrams(n, ways), 0
    whole = np.array(text, np.int64)
    for gained in [*rounds, len(text)]:
        end = min(end + gained, len(text))
        store.update(whole[:end])
        for token in range(5):
            assert after(store, token) == newest(text[:end], token, n, ways)


# The model -----------------------------------------------------------------------------------------------------------


def definition(documents, n, most):
    """The most frequent n-grams by document, by first token."""
    counts = Counter()
    for document in documents:
        counts.update([*dict.fromkeys(ngrams(document, n))])  # Counter keeps the first seen first
    of_token = {token: [] for token in range(8)}
    for gram, _ in counts.most_common(most):
        of_token[gram[0]].append(list(gram[1:]))
    return of_token


def test_documents_are_counted_not_places():
    store = frequent([[0, 1, 0, 1, 0, 1, 0, 1], [0, 2], [0, 2]], n=2)
    assert after(store, 0) == [[2], [1]]


@settings(max_examples=80)
@given(DOCUMENTS, st.integers(2, 5), st.sampled_from([3, 100]))
def test_the_model_s_ngrams_are_their_definition(documents, n, most):
    store = frequent(documents, n=n, most=most)
    expected = definition(documents, n, most)
    assert {token: after(store, token) for token in range(8)} == expected
    assert len(store._values) == sum(map(len, expected.values())) <= most
    assert after(store, 8) == after(store, 10**9) == []  # a token the corpus's tokenizer does not have


def test_a_part_says_how_far_it_is():
    text, ends, told = np.array([0, 1, 2, 0, 1, 0, 1, 1], np.uint16), np.array([3, 5, 5, 8]), []
    arrays = build_part(text, ends, 5, told.append, n=2)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert arrays["ngrams_starts"].tolist() == [0, 1, 3, 3, 3, 3]
    assert arrays["ngrams_values"].tolist() == [[1], [2], [1]]


@pytest.mark.parametrize("documents", [[], [[]], [[1, 2, 3, 4]]])
def test_a_corpus_without_ngrams(documents):
    store = frequent(documents)
    assert len(store._values) == 0
    assert after(store, 1) == []


# Finished requests ---------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(DOCUMENTS, st.integers(2, 4), st.integers(1, 4))
def test_what_most_requests_had_comes_first_the_latest_among_equals(documents, n, ways):
    store = PastNgrams(n, ways)
    counts = Counter()
    latest = {}
    clock = 0
    for document in documents:
        store.learn(np.array(document, np.int64))
        for gram in dict.fromkeys(ngrams(document, n)):
            counts[gram] += 1
            latest[gram] = clock = clock + 1
        for token in range(4):
            best = sorted((g for g in counts if g[0] == token), key=lambda g: (-counts[g], -latest[g]))
            assert after(store, token) == [list(gram[1:]) for gram in best[:ways]]
