"""rest: the heaviest nodes of the trie of all continuations, and nothing from beyond a document."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.methods.rest import Rest, RestConfig
from tests.asks import asked
from tests.draft.rows import row, target
from tests.draft.stores import corpus

DOCUMENTS = ["the cat sat", "the cat ran", "the cat sat", "a cat sat", "the dog"]


def bound(store, eos="", fingerprint=None, **options):
    drafter = Rest(RestConfig(str(store), **options))
    one = target(eos)
    one.tokenizer = SimpleNamespace(fingerprint=fingerprint) if fingerprint else None
    drafter.bind(one)
    return drafter


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("rest") / "store", DOCUMENTS)


def paths(tree):
    """Every path of a draft tree, as letters, in the order of the nodes."""
    found = [""]
    for token, above in zip(tree.tokens[1:].tolist(), tree.parent[1:].tolist(), strict=True):
        found.append(found[above] + chr(token))
    return found[1:]


def draft(drafter, text, room=100, **params):
    one = row(text, room, **params)
    drafter.start(one)
    (tree,) = drafter.propose(asked(one))
    assert tree.tokens[0] == one.last_token
    return paths(tree)


def test_the_longest_suffix_is_what_counts(store):
    assert draft(bound(store), "see the cat ")[0] == "s"
    assert draft(bound(store, length=3, nodes=3), "xe cat ") == ["s", "sa", "sat"]
    assert draft(bound(store, length=1), "xy ca") == ["t"]
    assert draft(bound(store, length=1, longest=1, shortest=1), "xyz ") == ["c", "s", "d", "r"]


def test_the_heaviest_nodes_in_order_of_weight(store):
    # Behind "cat ": "sat" three times, "ran" once.
    assert draft(bound(store, length=2), "cat ") == ["s", "sa", "r", "ra"]
    assert draft(bound(store, length=2, nodes=3), "cat ") == ["s", "sa", "r"]


def test_a_document_s_end_is_the_end(store):
    assert draft(bound(store), "the dog") == ["."]
    assert draft(bound(store), "the dog.") == []
    assert draft(bound(store), "sat.the") == draft(bound(store, longest=3), "sat.the"), "no match across the end"


def trie(documents, key, length):
    """Weight of every path of up to `length` tokens behind a place of `key`."""
    weights = Counter()
    for one in documents:
        for i in range(len(one)):
            if one[i : i + len(key)] == key:
                behind = one[i + len(key) :][:length]
                weights.update(tuple(behind[:n]) for n in range(1, len(behind) + 1))
    return weights


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 3), max_size=12), min_size=1, max_size=8),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 12),
    st.integers(1, 6),
)
def test_the_cut_is_a_sub_trie_of_the_heaviest(tmp_path_factory, documents, key, nodes, length):
    folder = tmp_path_factory.getbasetemp() / "random"
    drafter = bound(corpus(folder, ["".join(map(chr, one)) for one in documents], end="\0"), nodes=nodes)
    array = drafter._array
    lo, hi = array.find(key)
    found, parent, weights = array.heaviest(lo, hi, len(key), nodes, length, frozenset())
    expected = trie([[*one, 0] for one in documents], key, length)
    assert len(found) == min(nodes, len(expected))
    walked = [()]
    for token, above, weight in zip(found.tolist(), parent.tolist(), weights.tolist(), strict=True):
        walked.append((*walked[above], token))
        assert expected[walked[-1]] == weight
    assert len(set(walked)) == len(walked)
    assert weights.tolist() == sorted(expected.values(), reverse=True)[:nodes]


def test_ties_beyond_the_cut_do_not_matter(tmp_path):
    letters = [chr(n) for n in range(200, 400)]
    drafter = bound(corpus(tmp_path / "s", ["ab" + one * 12 for one in letters], dtype=np.int32))
    found = draft(drafter, "xab")
    assert len(found) == 64
    assert set(map(len, found)) == {1}, "of equal weights the nearer ones"


def test_an_even_spread_of_the_places_is_counted(tmp_path):
    documents = [f"ab{chr(1000 + i // 10)}" for i in range(1000)]
    drafter = bound(corpus(tmp_path / "s", documents), hits=100, nodes=1000, length=1)
    assert draft(drafter, "xab") == [chr(1000 + i) for i in range(100)]


def test_token_ids_above_16_bits(tmp_path):
    high = chr(70_000) + chr(70_001) + chr(100_000) + chr(70_002)
    drafter = bound(corpus(tmp_path / "s", [high], dtype=np.int32))
    assert draft(drafter, "x" + high[:2]) == [high[2], high[2:], high[2:] + "."]


def test_an_empty_corpus_drafts_nothing(tmp_path):
    assert draft(bound(corpus(tmp_path / "s", [])), "abab") == []
