"""hierarchy: what each store says, in which order they are asked, and the tree that is made of it."""

from collections import Counter, defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.hierarchy import Hierarchy, HierarchyConfig, _tree
from paceline.draft.registry import create
from paceline.draft.text import ngrams, suffix_array
from paceline.draft.text.store import writing
from paceline.draft.text.suffix_array import SuffixArray
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from paceline.engine.tree import DraftTree
from paceline.errors import MethodError, StoreError
from tests.draft.rows import letters, row, target, tokens
from tests.fakes import TableTarget
from tests.lossless_statistics import fit


def corpus(folder: Path, documents: list[list[int]], *, parts=(ngrams, suffix_array), dtype: type = np.int32) -> str:
    """A corpus store of `documents`, which end with the end token, of the tokenizer "letters"."""
    text = np.array([token for document in documents for token in document], dtype)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    with writing(folder, kind="corpus", tokenizer="letters", tokenizer_name="letters") as store:
        store.add("text", text)
        store.add("ends", ends)
        for part in parts:
            for name, array in part.build_part(text, ends, int(text.max(initial=0)) + 1).items():
                store.add(name, array)
    return str(folder)


def spoken(folder: Path, *documents: str) -> str:
    return corpus(folder, [tokens(document + ".") for document in documents])


def bound(**options: object) -> Hierarchy:
    drafter = Hierarchy(HierarchyConfig(**options))  # type: ignore[arg-type]
    drafter.bind(SimpleNamespace(eos_token_ids=(), tokenizer=None))  # type: ignore[arg-type]
    return drafter


def sequences(drafter: Hierarchy, text: str) -> list[str]:
    """What the stores say behind `text`."""
    one = row(text)
    drafter.start(one)
    found = drafter.collect(one)
    drafter.drop(one)
    return ["".join(chr(token) for token in line if token >= 0) for line in found.tolist()]


def paths(tree: DraftTree) -> list[str]:
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

    def find(self, key: object) -> None:
        raise AssertionError("L was asked")


# The stores, and the order they are asked in -------------------------------------------------------------------------


def test_the_context_alone_says_what_followed_newest_first():
    assert sequences(bound(), "a1234a5678a") == ["5678", "1234"]
    assert sequences(bound(k=1), "a1234a5678a") == ["5678"]
    assert sequences(bound(n=3), "a1234a5678a") == ["56", "12"]


@pytest.mark.parametrize("text", ["a", "ab", "abcd", "abcde"])
def test_nothing_to_say(text):
    one = row(text)
    drafter = bound()
    drafter.start(one)
    (tree,) = drafter.propose([one])
    assert tree.num_drafted == 0


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
    drafter._array = Raising()  # type: ignore[assignment]
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


def scan(documents: list[list[int]], key: list[int], length: int, most: int) -> dict[tuple[int, ...], int]:
    """The `most` most frequent beginnings of what follows `key`, with their counts; none but the key's own document."""
    counts: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        for at in range(len(document) - len(key) + 1):
            if document[at : at + len(key)] == key:
                behind = document[at + len(key) :][:length]
                counts.update(tuple(behind[: n + 1]) for n in range(len(behind)))
    # Equal counts in the order of a suffix array, a prefix before what it begins.
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most])


def expected(documents: list[list[int]], text: list[int], k: int, length: int) -> list[list[int]]:
    found: list[list[int]] = []
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


@settings(max_examples=60, deadline=None)
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
    drafter._array = SuffixArray(whole, ends, positions)
    one = row("".join(map(chr, text)))
    drafter.start(one)
    found = [[token for token in line if token >= 0] for line in drafter.collect(one).tolist()]
    assert found == expected(documents, text, k, n - 1)


def test_a_frequent_key_is_sampled_over_all_its_places(tmp_path):
    documents = [f"a{letter}xyz" for letter in "ABCD" for _ in range(100 * (ord(letter) - 64))]
    drafter = bound(corpus=spoken(tmp_path / "c", *documents), order="L")
    assert sequences(drafter, "a") == ["Dxyz", "Cxyz", "Bxyz", "Axyz"]


# The tree ------------------------------------------------------------------------------------------------------------

LINES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=7)


def padded(lines: list[list[int]]) -> np.ndarray:
    return np.array([line + [-1] * (4 - len(line)) for line in lines], np.int32)


def tree_of(lines: list[list[int]], ends: tuple[int, ...] = (), deep: int = 4, most: int = 28) -> DraftTree:
    return DraftTree(*_tree(9, padded(lines), np.array(ends, np.int64), deep, most))


@settings(max_examples=100, deadline=None)
@given(LINES, st.integers(1, 4), st.integers(1, 28))
def test_the_tree_has_every_beginning_once_and_keeps_to_its_budget(lines, deep, most):
    tree = tree_of(lines, deep=deep, most=most)
    DraftTree.of(9, tree.tokens[1:].tolist(), tree.parent[1:].tolist())  # parents before children, one root
    beginnings = {tuple(line[:n]) for line in lines for n in range(1, min(len(line), deep) + 1)}
    held = []
    for node in range(1, len(tree)):
        path = []
        while node:
            path, node = [int(tree.tokens[node]), *path], int(tree.parent[node])
        held.append(tuple(path))
    assert len(set(held)) == len(held) == min(len(beginnings), most) <= sum(map(len, lines))
    assert set(held) <= beginnings
    cut = max(map(len, held))
    assert all(path in held for path in beginnings if len(path) < cut)  # whole levels, the nearest first


def test_a_path_ends_with_an_end_token():
    assert paths(tree_of([[1, 2, 0, 1], [1, 0, 2, 2], [0, 1]], ends=(0,))) == ["\0", "\1\0", "\1\2\0"]


Law = dict[tuple[int, ...], float]


def probabilities(seed: int, path: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([seed, len(path), *path]).dirichlet(np.ones(3))


def side_by_side(seed: int, lines: list[list[int]]) -> Law:
    """The law of a round's tokens when `lines` are verified next to each other, each token tried in turn and struck
    out of p when it is rejected (the authors' rule, with the residual)."""
    law: Law = defaultdict(float)

    def visit(path: tuple[int, ...], alive: list[list[int]], chance: float) -> None:
        p = probabilities(seed, path)
        for line in alive:
            if len(path) < len(line) and p[token := line[len(path)]] > 0:
                visit((*path, token), [a for a in alive if a[: len(path) + 1] == [*path, token]], chance * p[token])
                chance *= 1 - p[token]
                p[token] = 0
                p = p / p.sum() if p.sum() > 0 else p
        for token in np.flatnonzero(p):
            law[(*path, int(token))] += chance * p[token]

    visit((), lines, 1.0)
    return law


def along_the_tree(seed: int, tree: DraftTree) -> Law:
    """The law of a round's tokens when one is drawn at each node and its child, if there is one, gone to."""
    law: Law = defaultdict(float)

    def visit(node: int, path: tuple[int, ...], chance: float) -> None:
        children = {int(tree.tokens[child]): child for child in tree.children(node)}
        for token, p in enumerate(probabilities(seed, path)):
            if token in children:
                visit(children[token], (*path, token), chance * p)
            else:
                law[(*path, token)] += chance * p

    visit(0, (), 1.0)
    return law


@settings(max_examples=60, deadline=None)
@given(LINES, st.integers(0, 1000))
def test_the_tree_has_the_law_of_sequences_side_by_side(lines, seed):
    one, other = side_by_side(seed, lines), along_the_tree(seed, tree_of(lines))
    outcomes = {*one, *other}
    assert all(one[outcome] == pytest.approx(other[outcome], abs=1e-12) for outcome in outcomes)
    assert sum(other.values()) == pytest.approx(1)


def test_options_that_bound_the_tree():
    text = "a1234a5678a9876a"
    one = row(text)

    def drafted(drafter: Hierarchy, room: int = 100, eos: str = "", **params: object) -> list[str]:
        one = row(text, room, **params)
        drafter.bind(target(eos))  # type: ignore[arg-type]
        drafter.start(one)
        (tree,) = drafter.propose([one])
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


def cycle(prefix: tuple[int, ...]) -> np.ndarray:
    """A target that counts 0 to 9, over and over."""
    logits = np.zeros(10)
    logits[(prefix[-1] + 1) % 10] = 50
    return logits


@pytest.mark.parametrize("order", ["W", "S", "L", "WS", "SL", "WSL", "LSW"])
def test_a_round_in_which_all_matches_gives_n_tokens(tmp_path, order):
    store = corpus(tmp_path / "c", [list(range(10)) * 2])
    engine = Engine(TableTarget(10, logits=cycle, order=1), create(f"hierarchy,order={order},corpus={store}"))
    (done,) = engine.generate([[*range(10), 0]], SamplingParams(max_tokens=31))
    assert done.tokens == [i % 10 for i in range(1, 32)]
    # 1 token from the prompt's own round, then 4 drafted and 1 of the target's in each.
    assert done.rounds == 7
    assert done.stats.accepted == [1, 0, 0, 0, 6]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_stores_the_answers_are_plain_decoding_s(tmp_path, temperature):
    random = np.random.default_rng(0)
    store = corpus(tmp_path / "c", [[*random.integers(0, 5, 40).tolist(), 5] for _ in range(5)])
    made = TableTarget(6, order=2, seed=3, eos=(5,), scale=1.0)
    prompts = [random.integers(0, 5, n).tolist() for n in (1, 2, 3, 9, 30)]
    params = [SamplingParams(max_tokens=60, temperature=temperature, seed=seed) for seed in range(5)]
    expected = [made.plain(p, wish).new_tokens.tolist() for p, wish in zip(prompts, params, strict=True)]
    for spec in (f"model={store},corpus={store}", f"corpus={store},order=LSW,k=2", f"corpus={store},past=100,nodes=3"):
        for batch in (1, 8):
            engine = Engine(made, f"hierarchy,{spec}", max_batch=batch)
            for _ in range(2):
                done = engine.generate(prompts, params)
                assert [one.tokens for one in done] == expected
            assert sum(sum(one.stats.accepted[1:]) for one in done) > 0


def test_the_first_three_tokens_have_the_target_s_law():
    """A draft stands behind the prompt from the first round on that follows it."""
    made = TableTarget(3, order=1, seed=7, scale=1.0)
    prompt = [0, 1, 2, 0, 2, 1, 0, 0, 1, 1, 2, 2, 0, 1]
    counts, law = np.zeros((3, 3, 3)), np.zeros((3, 3, 3))
    params = [SamplingParams(max_tokens=4, temperature=1.0, seed=seed) for seed in range(2000)]
    engine = Engine(made, "hierarchy,n=3,k=2", max_batch=50)
    done = engine.generate([prompt] * len(params), params)
    assert sum(one.stats.draft_rounds for one in done) > len(done)
    for one in done:
        counts[tuple(one.tokens[:3])] += 1

    def p(*context: int) -> np.ndarray:
        return made.probabilities_after([*prompt, *context], params[0]).numpy()

    for a in range(3):
        for b in range(3):
            law[a, b] = p()[a] * p(a)[b] * p(a, b)
    assert fit(counts.ravel(), law.ravel()) > 1e-3


# Requests ------------------------------------------------------------------------------------------------------------


def test_a_request_does_not_see_another_s_context():
    drafter = bound()
    first, second = row("a1234a", id=0), row("xxa", id=1)
    drafter.start(first)
    drafter.start(second)
    trees = drafter.propose([first, second])
    assert [tree.num_drafted for tree in trees] == [4, 0]
    drafter.drop(first)
    assert drafter.propose([second])[0].num_drafted == 0
    drafter.drop(second)
    drafter.drop(second)
    assert not drafter._contexts


def test_finished_requests_are_learned_from():
    drafter = bound(past=100)
    done = row("xa1234", id=0)
    drafter.start(done)
    done.extend(tokens("b567"))
    done.finish_reason = "stop"
    drafter.drop(done)
    assert sequences(drafter, "za") == ["1234"]
    assert sequences(drafter, "z4") == ["b567"]
    assert sequences(drafter, "aWXYZa") == ["WXYZ", "1234"]
    assert sequences(bound(past=100, order="W"), "za") == []


def test_given_up_requests_are_not_learned_from_and_nothing_is_by_default():
    for drafter, reason in ((bound(past=100), "abort"), (bound(), "stop")):
        done = row("xa1234")
        drafter.start(done)
        done.finish_reason = reason  # type: ignore[assignment]
        drafter.drop(done)
        assert not any(map(len, drafter._past.halves))
        assert sequences(drafter, "za") == []


def test_a_request_asked_late_is_caught_up():
    asked, late = bound(), bound()
    one = row("abcdab")
    for drafter in (asked, late):
        drafter.start(one)
    for gained in ["cd", "a", "xcdab", "c"]:
        asked.propose([one])
        one.extend(tokens(gained))
    assert asked.collect(one).tolist() == late.collect(one).tolist()
    assert len(late.collect(one)) == 2


def test_the_same_again_gives_the_same_drafts(tmp_path):
    random = np.random.default_rng(1)
    store = corpus(tmp_path / "c", [[*random.integers(0, 5, 60).tolist(), 5] for _ in range(9)])
    rows = [row("".join(map(chr, random.integers(0, 5, 30))), id=i) for i in range(20)]
    first, second = bound(corpus=store), bound(corpus=store)
    for drafter in (first, second):
        for one in rows:
            drafter.start(one)
    for one, other in zip(first.propose(rows), second.propose(rows), strict=True):
        assert one.num_drafted > 0
        assert (one.tokens.tolist(), one.parent.tolist()) == (other.tokens.tolist(), other.parent.tolist())


# What can go wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"order": ""}, "order is ''; it must be one or more of W, S and L, each once"),
        ({"order": "WX"}, "order is 'WX'"),
        ({"order": "WW"}, "order is 'WW'"),
        ({"k": 0}, "k is 0"),
        ({"n": 1}, "n is 1; it must be 2 or more"),
        ({"nodes": 0}, "nodes is 0"),
        ({"past": -1}, "past is -1"),
    ],
)
def test_impossible_options(options, says):
    with pytest.raises(MethodError, match=f"(HierarchyConfig|hierarchy): {says}"):
        HierarchyConfig(**options)


def test_stores_that_do_not_fit(tmp_path):
    only_ngrams = corpus(tmp_path / "n", [[1, 2, 3, 4, 5]], parts=(ngrams,))
    only_array = corpus(tmp_path / "a", [[1, 2, 3, 4, 5]], parts=(suffix_array,))
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
