"""Trees against the definitions, computed the slow way: by walking up the parents."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.tree import DraftTree, ancestors, depths, merge

Path = tuple[int, ...]


@st.composite
def trees(draw, max_nodes=12, tokens=4, chains=True):
    """Any tree, siblings with equal tokens included; every fourth is a chain."""
    n = draw(st.integers(0, max_nodes))
    drafted = [draw(st.integers(0, tokens - 1)) for _ in range(n)]
    chain = chains and draw(st.integers(0, 3)) == 0
    parent = [i if chain else draw(st.integers(0, i)) for i in range(n)]
    return DraftTree.of(9, drafted, parent)


def way_up(parent, node):
    """`node` and its ancestors, the root last."""
    way = [node]
    while parent[way[-1]] >= 0:
        way.append(int(parent[way[-1]]))
    return way


def path(tree, node):
    """Tokens from the root to `node`."""
    return tuple(int(tree.tokens[i]) for i in reversed(way_up(tree.parent, node)))


def paths(tree):
    return [path(tree, node) for node in range(len(tree))]


@given(trees())
def test_depths_and_ancestors(tree):
    ways = [way_up(tree.parent, node) for node in range(len(tree))]
    assert tree.depth.tolist() == depths(tree.parent).tolist() == [len(way) - 1 for way in ways]
    assert ancestors(tree.parent).tolist() == [[j in way for j in range(len(tree))] for way in ways]
    assert tree.num_drafted == len(tree) - 1
    assert tree.is_chain == all(way == list(range(node, -1, -1)) for node, way in enumerate(ways))


@given(trees(), st.data())
def test_children(tree, data):
    probe = data.draw(st.none() | st.lists(st.booleans(), min_size=len(tree), max_size=len(tree)))
    tree.probe = None if probe is None else np.array(probe)
    for node in range(len(tree)):
        expected = [i for i in range(len(tree)) if tree.parent[i] == node and not (probe and probe[i])]
        assert tree.children(node) == expected


@settings(max_examples=200)
@given(trees(), st.integers(-1, 6), st.booleans())
def test_clipping_keeps_all_that_is_not_too_deep(tree, most, probes):
    n = len(tree)
    tree.chances, tree.source = np.arange(n) / n, "drafter"
    tree.probe = np.arange(n) % 2 == 1 if probes else None
    clipped = tree.clipped(most)
    kept = [node for node in range(n) if len(path(tree, node)) - 1 <= max(most, 0)]
    assert paths(clipped) == [path(tree, node) for node in kept]
    assert clipped.chances.tolist() == tree.chances[kept].tolist()
    assert (clipped.probe is None) == (not probes)
    assert not probes or clipped.probe.tolist() == tree.probe[kept].tolist()
    assert clipped.source == "drafter"
    assert clipped.depth.tolist() == [len(path(tree, node)) - 1 for node in kept]
    assert (clipped is tree) == (len(kept) == n)


@given(trees(), st.lists(st.sets(st.integers(1, 12), max_size=3), max_size=3))
def test_a_tree_that_was_cut_knows_its_nodes_numbers_before(tree, cuts):
    """However often: by the budget, and to the length that the row has left."""
    cut = tree
    for gone in cuts:
        cut = cut.keeping(np.array([n for n in range(len(cut)) if gone.isdisjoint(way_up(cut.parent, n)[:-1])]))
    cut = cut.clipped(2)
    before = cut.proposed(range(len(cut)))
    assert len(set(before)) == len(cut)
    assert [path(cut, node) for node in range(len(cut))] == [path(tree, node) for node in before]


def test_a_self_drafters_states_are_clipped_with_their_nodes():
    """Its nodes are in the cache already: what is left must be the first of them."""
    chain = DraftTree.chain(1, [2, 3, 4], hidden=torch.arange(4))
    assert chain.clipped(1).hidden.tolist() == [0, 1]
    tree = DraftTree.of(1, [2, 3, 4], [0, 1, 0], hidden=torch.arange(4))
    with pytest.raises(ValueError, match="max_draft"):
        tree.clipped(1)


@settings(max_examples=200)
@given(st.lists(trees(max_nodes=8, tokens=3), min_size=1, max_size=4))
def test_merging_keeps_every_path_once(several):
    for i, tree in enumerate(several):
        tree.source = f"drafter {i % 3}"
    merged = merge(several)
    assert (merged.parent[1:] < np.arange(1, len(merged))).all()
    counted = Counter(paths(merged))
    assert set(counted) == {way for tree in several for way in paths(tree)}
    assert set(counted.values()) == {1}
    # The first tree's paths come first and in their order.
    assert paths(merged)[: len(set(paths(several[0])))] == list(dict.fromkeys(paths(several[0])))
    assert merged.source.split("+") == (list(dict.fromkeys(t.source for t in several if t.num_drafted)) or [""])


def test_what_cannot_be_merged():
    with pytest.raises(ValueError, match="different roots"):
        merge([DraftTree.root(1), DraftTree.root(2)])
    for kw in ({"probe": np.array([False, True])}, {"hidden": torch.ones(2, 3)}):
        with pytest.raises(ValueError, match="probes or states"):
            merge([DraftTree.root(1), DraftTree.chain(1, [2], **kw)])


@pytest.mark.parametrize("parent", [[1], [0, 2], [-1], [0, -1, 1]], ids=str)
def test_parents_come_first(parent):
    with pytest.raises(ValueError, match="before it"):
        DraftTree.of(1, [2] * len(parent), parent)


def test_making_trees():
    chain = DraftTree.chain(7, [1, 2, 3])
    assert chain.tokens.tolist() == [7, 1, 2, 3]
    assert chain.parent.tolist() == [-1, 0, 1, 2]
    assert DraftTree.of(7, [1, 2, 3], [0, 1, 2]).is_chain
    root = DraftTree.root(7)
    assert (len(root), root.num_drafted, root.is_chain, root.children(0)) == (1, 0, True, [])
    for tree in (chain, root, DraftTree.of(7, [1], [0])):
        assert tree.tokens.dtype == tree.parent.dtype == tree.depth.dtype == np.int64


@given(trees())
def test_trees_can_be_members_of_lists_and_sets(tree):
    """Equality is identity: comparing arrays would raise."""
    assert tree in [DraftTree.root(9), tree]
    assert len({tree, tree}) == 1
    assert tree != DraftTree.of(9, tree.tokens[1:], tree.parent[1:])


def test_the_trunk_follows_first_children_and_no_probes():
    assert DraftTree.root(7).trunk().tolist() == []
    assert DraftTree.chain(7, [1, 2]).trunk().tolist() == [1, 2]
    assert DraftTree.of(7, [1, 9, 3, 4], [0, 0, 1, 3]).trunk().tolist() == [1, 3, 4]
    probes = np.array([False, True, False, False, False])
    assert DraftTree.of(7, [1, 9, 3, 4], [0, 0, 2, 3], probe=probes).trunk().tolist() == [9, 3, 4]
