"""jacobi: its shape, its slots, what it copies, and that its text is the target's own; the released loop's is not."""

import json

import numpy as np
import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree, ancestors
from paceline.draft.methods.jacobi import Jacobi, JacobiConfig, after_match, slots
from paceline.draft.registry import create
from paceline.draft.shapes import best_paths, chain, published
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from tests.asks import asked
from tests.draft.rows import row
from tests.fakes import TableTarget


def bound(target=None, **options):
    drafter = Jacobi(JacobiConfig(**options))
    drafter.bind(target or TableTarget(vocab_size=200))
    return drafter


def drafted(drafter, one):
    (tree,) = drafter.propose(asked(one))
    return tree


class Watched(Jacobi):
    """Keeps the rounds it saw."""

    def __init__(self, config=JacobiConfig()):
        super().__init__(config)
        self.rounds = []

    def observe(self, round):
        super().observe(round)
        self.rounds.append(round)


# The shape -----------------------------------------------------------------------------------------------------------


def test_the_published_tree_with_the_copied_chain(monkeypatch):
    drafter, one = bound(TableTarget(1000)), row("abcdef")
    drafter.start(one)
    # All tokens different, so that nothing is joined: 97 + d * 20 + rank are the candidates of slot d.
    drafter._tables[one.id] = [[200 + slot * 20 + rank for rank in range(10)] for slot in range(5)]
    monkeypatch.setattr("paceline.draft.methods.jacobi.after_match", lambda *_: np.arange(1, 6))
    tree = drafted(drafter, one)
    assert len(tree) == 69
    assert (ancestors(tree.parent).sum(1) == tree.depth + 1).all()
    leaves = sorted(set(range(69)) - set(tree.parent.tolist()))
    assert len(leaves) == 43
    assert tree.tokens[1:6].tolist() == [1, 2, 3, 4, 5] == tree.trunk().tolist()
    assert tree.parent[1:6].tolist() == [0, 1, 2, 3, 4]
    assert leaves[0] == 5
    assert [int(tree.depth[leaf]) + 1 for leaf in leaves].count(6) == 1
    assert np.bincount([len(path) for path in published()]).tolist() == [0, 10, 28, 23, 2]


def test_shapes_of_other_sizes_take_the_most_likely_paths():
    table = [[0.5, 0.3], [0.4, 0.1]]
    assert best_paths(table, 3) == [(0,), (1,), (0, 0)]
    assert best_paths(table, 99) == [(0,), (1,), (0, 0), (1, 0), (0, 1), (1, 1)]
    assert chain(3) == [(0,), (0, 0), (0, 0, 0)]
    for count in (1, 8, 16, 40):
        assert len(Jacobi(JacobiConfig(tree=count)).paths) == count


def test_measured_accuracies_make_the_tree(tmp_path):
    (tmp_path / "slots.json").write_text(json.dumps({"accuracies": [[0.9, 0.01], [0.8, 0.01], [0.7, 0.01]]}))
    assert create(f"jacobi:{tmp_path},tree=3").paths == chain(3)
    (tmp_path / "slots.json").write_text('{"accuracies": [[1.5]]}')
    with pytest.raises(MethodError, match=r"slots.json is broken: it must have shares from 0 to 1"):
        create(f"jacobi:{tmp_path}")
    with pytest.raises(MethodError, match=r"cannot be read .*paceline train jacobi"):
        create(f"jacobi:{tmp_path}/nowhere")


# The slots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parent", "last", "way"),
    [
        ([-1], 0, []),
        ([-1, 0, 1, 2], 0, [1, 2, 3]),
        ([-1, 0, 1, 2], 2, [3]),
        ([-1, 0, 1, 2], 3, []),
        ([-1, 0, 0, 1, 2], 0, [1, 3]),  # the first of two
        ([-1, 0, 0, 2], 0, [2, 3]),  # the longest
        ([-1, 0, 0, 2, 3], 1, []),
    ],
)
def test_slots_are_the_longest_way_down(parent, last, way):
    assert slots(DraftTree(np.zeros(len(parent), np.int64), np.array(parent)), last) == way


def test_the_table_is_what_the_target_says_in_the_slots():
    target, drafter = TableTarget(50, order=3, seed=2), Watched()
    engine = Engine(target, drafter)
    one = engine.add([1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=40))
    while engine.has_work:
        engine.step()
        if one.finish_reason is not None or drafter.rounds[-1].is_prompt(0):
            continue
        round, before = drafter.rounds[-1], one.tokens[: -len(drafter.rounds[-1].accepted[0].tokens) - 1].tolist()
        tree, path = round.trees[0], round.accepted[0].path
        texts = [[*before, one.tokens[len(before)]]]
        for node in range(1, len(tree)):
            texts.append([*texts[tree.parent[node]], int(tree.tokens[node])])
        way = slots(tree, path[-1])
        expected = [torch.topk(target.logits_after(texts[node]), 10).indices.tolist() for node in way]
        assert drafter._tables[one.id] == expected
        assert len(way) == int(tree.depth.max()) - len(path) + 1 or path[-1]


def test_linear_jacobi_keeps_the_guesses_that_survive():
    drafter, one = bound(tree=0, window=4, retrieve="none"), row("abcdef")
    drafter.start(one)
    first = drafted(drafter, one)
    assert first.is_chain
    assert first.num_drafted == 4
    drafter._tables[one.id] = [[7], [8]]
    assert drafted(drafter, one).tokens[1:3].tolist() == [7, 8]
    assert set(drafted(drafter, one).tokens[3:].tolist()) <= {ord(letter) for letter in "abcde"}


# What is copied ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ngram", "earliest", "recent"),
    [
        ("xabc1--abc2--zbc3--bc4 abc", 3, "1--ab", "2--zb"),  # three before two
        ("bc3-----xbc4 abc", 3, "3----", "4 abc"),  # two where there are no three
        ("c1--c2--zc", 3, "1--c2", "2--zc"),
        ("abc1abc2abc", 1, "1abc2", "2abc2"),
        ("abcd", 3, "", ""),  # the last token is new
        ("a", 3, "", ""),
        ("ababab", 3, "ababa", "ababa"),  # the match overlaps the end, and the copy goes on
        ("xyzzyxyzzy", 3, "xyzzy", "xyzzy"),
    ],
)
def test_copies_follow_the_longest_match(text, ngram, earliest, recent):
    tokens = np.array([ord(letter) for letter in text])
    for choice, follows in ((False, earliest), (True, recent)):
        assert "".join(map(chr, after_match(tokens, ngram, 5, choice))) == follows


def test_nothing_is_copied_if_not_asked_for():
    one = row("the cat sat. the cat")
    nothing = bound(retrieve="none", tree=0, window=2)
    nothing.start(one)
    assert drafted(nothing, one).num_drafted == 2
