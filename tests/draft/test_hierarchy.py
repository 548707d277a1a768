"""hierarchy: what each store says, in which order they are asked, and the tree that is made of it."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.sampling import SamplingParams
from paceline.draft.methods.hierarchy import Hierarchy, HierarchyConfig
from paceline.draft.registry import create
from paceline.draft.text import ngrams, suffix_array
from paceline.draft.text.suffix_array import SuffixArray
from paceline.engine.engine import Engine
from paceline.errors import StoreError
from tests.asks import asked
from tests.draft.rows import letters, row, target, tokens
from tests.draft.stores import corpus, corpus_of, locked
from tests.draft.tables import counting


def spoken(folder, *documents):
    return corpus(folder, documents, dtype=np.int32, parts=(ngrams, suffix_array))


def bound(**options):
    drafter = Hierarchy(HierarchyConfig(**options))
    drafter.bind(SimpleNamespace(eos_token_ids=(), tokenizer=None))
    return drafter


def sequences(drafter, text):
    """What the stores say behind `text`."""
    one = row(text)
    drafter.start(one)
    found = drafter.collect(one)
    drafter.drop(one)
    return ["".join(map(chr, line)) for line in found]


def paths(tree):
    """Root-to-leaf paths, without the root."""
    found = []
    for leaf in sorted(set(range(1, len(tree))) - set(tree.parent.tolist())):
        path, node = "", leaf
        while node > 0:
            path, node = chr(tree.tokens[node]) + path, int(tree.parent[node])
        found.append(path)
    return sorted(found)


class Raising:
    """A corpus that must not be asked."""

    def find(self, key):
        raise AssertionError("L was asked")


# The stores, and the order they are asked in -------------------------------------------------------------------------


def test_the_model_s_most_frequent_follow_the_context(tmp_path):
    model = spoken(tmp_path / "m", *(f"a{letter}xyz" for letter in "ABCDEFGHI" for _ in range(ord(letter) - 64)))
    text = "a1234a2345a3456a"
    context = ["3456", "2345", "1234"]
    assert sequences(bound(model=model), text) == [*context, "Ixyz", "Hxyz", "Gxyz", "Fxyz"]
    assert sequences(bound(model=model, order="S"), text) == [f"{letter}xyz" for letter in "IHGFEDC"]
    assert sequences(bound(model=model, order="SW", k=9), text) == [f"{letter}xyz" for letter in "IHGFEDCBA"]
    assert sequences(bound(model=model, order="SW", k=11), text)[-2:] == context[:2]


def test_what_one_store_repeats_of_another_is_not_counted(tmp_path):
    model = spoken(tmp_path / "m", "a1234", "a1234", "aAbcd")
    assert sequences(bound(model=model, k=3), "a1234a5678a") == ["5678", "1234", "Abcd"]


@pytest.mark.parametrize("order", ["WSL", "SWL", "WS", "SW"])
def test_the_corpus_is_not_asked_when_the_others_have_enough(tmp_path, order):
    model = spoken(tmp_path / "m", "aAbcd", "aBcde")
    drafter = bound(model=model, order=order, k=4)
    drafter._array = Raising()
    assert len(sequences(drafter, "a1234a5678a")) == 4
    with pytest.raises(AssertionError, match="L was asked") if "L" in order else nullcontext():
        sequences(drafter, "a1234a")


@pytest.mark.parametrize("order", ["LSW", "L", "WL"])
def test_the_corpus_is_asked_where_the_order_says_so(tmp_path, order):
    own, large = spoken(tmp_path / "own", "aAbcd"), spoken(tmp_path / "large", "aLIES", "xaLATE", "xaLATE")
    said = {"L": ["LATE", "LIES"], "S": ["Abcd"], "W": ["1234"]}
    found = sequences(bound(model=own, corpus=large, order=order), "a1234xa")
    assert found == [sequence for letter in order for sequence in said[letter]]


def test_the_longer_key_goes_first(tmp_path):
    large = spoken(tmp_path / "large", "yaBEST", "yaBEST", "zaGOOD", "xaRARE")
    assert sequences(bound(corpus=large, order="L"), "xa") == ["RARE", "BEST", "GOOD"]
    assert sequences(bound(corpus=large, order="L"), "a") == ["BEST", "GOOD", "RARE"]


def test_one_store_can_be_both_model_and_corpus(tmp_path):
    both = spoken(tmp_path / "both", "aAbcd", "aAbcd", "aB")
    assert sequences(bound(corpus=both, order="S"), "a") == ["Abcd"]
    assert sequences(bound(corpus=both, order="SL"), "a") == ["Abcd", "B."]  # no further than its document
    assert sequences(bound(order="SL"), "aAbcda") == []


# The corpus ----------------------------------------------------------------------------------------------------------


def scan(documents, key, length, most):
    """The `most` most frequent beginnings of what follows `key`, with their counts; none but the key's own document."""
    counts = Counter()
    for document in documents:
        for at in range(len(document) - len(key) + 1):
            if document[at : at + len(key)] == key:
                behind = document[at + len(key) :][:length]
                counts.update(tuple(behind[: n + 1]) for n in range(len(behind)))
    # Equal counts in the order of a suffix array, a prefix before what it begins.
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most])


def expected(documents, text, k, length):
    found = []
    for key in (text[-2:], text[-1:])[2 - min(len(text), 2) :]:
        counts = scan(documents, key, length, k * length)
        for path in counts:
            if len(found) < k and not any(other[: len(path)] == path and other != path for other in counts):
                line = list(path)
                begun = [i for i, other in enumerate(found) if other == line[: len(other)]]
                if begun:
                    found[begun[0]] = line
                elif not any(other[: len(line)] == line for other in found):
                    found.append(line)
    return found


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 2, 70_000]), min_size=1, max_size=14), min_size=1, max_size=8),
    st.lists(st.sampled_from([0, 1, 2, 70_000]), min_size=1, max_size=4),
    st.integers(1, 7),
    st.integers(2, 5),
)
def test_the_corpus_says_what_a_scan_of_it_says(documents, text, k, n):
    documents = [[*document, 3] for document in documents]
    whole = np.array([token for document in documents for token in document], np.int32)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    positions = suffix_array.build_part(whole, ends, 70_001)["suffix_positions"]
    drafter = Hierarchy(HierarchyConfig(order="L", k=k, n=n))
    drafter._array = SuffixArray(*locked(whole, ends, positions))
    one = row("".join(map(chr, text)))
    drafter.start(one)
    assert [list(line) for line in drafter.collect(one)] == expected(documents, text, k, n - 1)


# The tree ------------------------------------------------------------------------------------------------------------


def test_options_that_bound_the_tree():
    text = "a1234a5678a9876a"
    one = row(text)

    def drafted(drafter, room=100, eos="", **params):
        one = row(text, room, eos=eos, **params)
        drafter.bind(target(eos))
        drafter.start(one)
        (tree,) = drafter.propose(asked(one))
        assert tree.source == ("hierarchy" if tree.num_drafted else "")
        return paths(tree)

    assert drafted(Hierarchy()) == ["1234", "5678", "9876"]
    assert drafted(Hierarchy(HierarchyConfig(nodes=5))) == ["1", "56", "98"]
    assert drafted(Hierarchy(HierarchyConfig(nodes=1))) == ["9"]
    assert drafted(Hierarchy(HierarchyConfig(k=1))) == ["9876"]
    assert drafted(Hierarchy(), room=3) == ["12", "56", "98"]
    assert drafted(Hierarchy(), room=1) == []
    assert drafted(Hierarchy(), eos="78") == ["1234", "567", "98"]
    assert drafted(Hierarchy(), eos="78", ignore_eos=True, stop_token_ids=tokens("1")) == ["1", "5678", "9876"]
    assert letters(one.tokens) == text


# In the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["W", "S", "L", "WS", "SL", "WSL", "LSW"])
def test_a_round_in_which_all_matches_gives_n_tokens(tmp_path, order):
    store = corpus_of(tmp_path / "c", [list(range(10)) * 2], 9)
    engine = Engine(counting(10), create(f"hierarchy,order={order},corpus={store}"))
    (done,) = engine.generate([[*range(10), 0]], SamplingParams(max_tokens=31))
    assert done.tokens == [i % 10 for i in range(1, 32)]
    # 1 token from the prompt's own round, then 4 drafted and 1 of the target's in each.
    assert done.rounds == 7
    assert done.stats.accepted == [1, 0, 0, 0, 6]


# What can go wrong ---------------------------------------------------------------------------------------------------


def test_stores_that_do_not_fit(tmp_path):
    only_ngrams = corpus(tmp_path / "n", ["abcde"], parts=(ngrams,))
    only_array = corpus(tmp_path / "a", ["abcde"])
    other = SimpleNamespace(eos_token_ids=(), tokenizer=SimpleNamespace(fingerprint="words"))
    for options, met, says in [
        ({"corpus": only_ngrams}, None, "has no suffix_positions"),
        ({"corpus": only_array}, None, "has no ngrams_starts"),
        ({"model": only_ngrams, "order": "S"}, other, "was built with another tokenizer"),
        ({"corpus": only_array, "order": "L"}, other, "was built with another tokenizer"),
        ({"model": str(tmp_path / "nowhere")}, None, "there is no store"),
    ]:
        with pytest.raises(StoreError, match=says):
            Hierarchy(HierarchyConfig(**options)).bind(met or SimpleNamespace(eos_token_ids=(), tokenizer=None))
    bound(corpus=only_ngrams, order="WS")
    bound(model=only_ngrams, corpus=only_array)
    bound(model=str(tmp_path / "nowhere"), order="WL")
