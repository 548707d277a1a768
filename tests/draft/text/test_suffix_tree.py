"""The suffix tree against counting by hand, and what it speculates against the rule on plain dicts."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draft.text_reading import count, num_nodes

from paceline.draft.text.suffix_tree import BEST, COUNT, FIRST, LENGTH, NEXT, PARENT, ROOT, START, SuffixTree

WORK = st.integers(1, 4).flatmap(
    lambda k: st.lists(st.one_of(st.lists(st.integers(0, k), max_size=12), st.just("close")), max_size=14)
)
"""Tokens to append, and sequences to close."""


def counted(sequences, depth):
    """How often each run of up to `depth` tokens stands in `sequences`."""
    return Counter(
        tuple(one[i:j])
        for one in sequences
        for i in range(len(one))
        for j in range(i + 1, min(i + depth, len(one)) + 1)
    )


def held(tree):
    """Every run of tokens the tree holds with its count, by going through all its nodes."""
    found, waiting = {}, [(ROOT, ())]
    while waiting:
        node, path = waiting.pop()
        child = tree._nodes[node, FIRST]
        children = []
        while child >= 0:
            assert tree._nodes[child, PARENT] == node
            children.append(child)
            child = tree._nodes[child, NEXT]
        below = sum(tree._nodes[child, COUNT] for child in children)
        assert below <= tree._nodes[node, COUNT]
        if node != ROOT:
            # A node is there because it branches or because a path ends there.
            assert len(children) > 1 or below < tree._nodes[node, COUNT]
            most = max((tree._nodes[child, COUNT] for child in children), default=0)
            best = tree._nodes[node, BEST]
            assert (tree._nodes[best, COUNT] if children else 0) == most
        for child in children:
            start, length = tree._nodes[child, START], tree._nodes[child, LENGTH]
            edge = tuple(tree._text[start : start + length].tolist())
            for end in range(1, length + 1):
                found[path + edge[:end]] = int(tree._nodes[child, COUNT])
            waiting.append((child, path + edge))
    return found


def worked(tree, work):
    """`tree` after `work`, and the sequences that it must hold then."""
    sequences = [[]]
    for step in work:
        if step == "close":
            tree.close()
            sequences.append([])
        else:
            tree.append(step)
            sequences[-1] += step
    return sequences


@settings(max_examples=150)
@given(WORK, st.integers(1, 8))
def test_counts_are_those_by_hand(work, depth):
    tree = SuffixTree(depth, 1)
    sequences = worked(tree, work)
    expected = counted(sequences, depth)
    assert held(tree) == expected
    assert len(tree) == sum(map(len, sequences)) == tree._nodes[ROOT, COUNT]
    assert num_nodes(tree) <= 2 * len(tree) + 1
    for run in [*expected, (9,), (0, 9)]:
        assert count(tree, run) == expected[run]


def seen(sequences, counts, suffix):
    """How often `suffix` stands where something follows or a sequence was closed; at least 1."""
    return max(counts[suffix] - (tuple(sequences[-1][-len(suffix) :]) == suffix), 1)


def latest(sequences, run):
    """Where `run` ends the last time, over all sequences."""
    text = [token for one in sequences for token in (*one, -1)]
    return max(end for end in range(len(run), len(text) + 1) if tuple(text[end - len(run) : end]) == run)


def by_hand(sequences, depth, context, most, factor, offset, min_prob, branch):
    """The probabilities of the draft of the highest score, by the rule on a Counter."""
    counts = counted(sequences, depth)
    alphabet = {token for one in sequences for token in one}
    best = []
    for length in range(1, min(len(context), depth - 1) + 1):
        suffix = tuple(context[len(context) - length :])
        if not counts[suffix]:
            break
        probs, waiting = [], [(counts[suffix] / seen(sequences, counts, suffix), suffix)]
        while waiting and len(probs) <= min(most, int(factor * length + offset)):
            prob, path = waiting.pop(0)
            probs.append(prob)
            after = [(prob * counts[*path, token] / counts[path], (*path, token)) for token in alphabet]
            after = [one for one in after if one[0] >= min_prob]
            after.sort(key=lambda one: (-one[0], -latest(sequences, one[1])))
            waiting = sorted(waiting + after[: None if branch else 1], key=lambda one: -one[0])
        if sum(probs[1:]) >= sum(best):
            best = probs[1:]
    return best


@settings(max_examples=150)
@given(
    WORK,
    st.integers(1, 8),
    st.lists(st.integers(0, 4), max_size=6),
    st.integers(1, 6),
    st.sampled_from([(1.0, 0.0), (2.0, 0.0), (0.5, 1.0), (0.0, 4.0)]),
    st.sampled_from([0.1, 0.3, 0.6]),
    st.booleans(),
)
def test_speculation_is_the_rule_s(work, depth, context, most, size, min_prob, branch):
    tree = SuffixTree(depth, 1)
    sequences = worked(tree, work)
    found = tree.speculate(context, most, *size, min_prob, branch)
    probs = by_hand(sequences, depth, context, most, *size, min_prob, branch)
    assert found.score == pytest.approx(sum(found.probs))
    assert found.score == pytest.approx(sum(probs))
    assert sorted(found.probs) == pytest.approx(sorted(probs))
    counts = counted(sequences, depth)
    if len(found.tokens):
        assert len(found.tokens) <= min(most, int(size[0] * found.match + size[1]))
        suffix = tuple(context[len(context) - found.match :])
        paths = [suffix]
        for token, above, prob in zip(found.tokens.tolist(), found.parent.tolist(), found.probs.tolist(), strict=True):
            paths.append((*paths[above], token))
            assert prob == pytest.approx(counts[paths[-1]] / seen(sequences, counts, suffix))
        assert len(set(paths)) == len(paths), "siblings are different tokens"


def test_the_heaviest_continuation_of_equals_the_latest():
    tree = SuffixTree(8)
    tree.append([1, 2, 1, 3, 1, 2, 1, 3, 1, 4, 1])
    assert tree.speculate([9, 1], 1).tokens.tolist() == [3]
    tree.append([2, 1])
    assert tree.speculate([9, 1], 1).tokens.tolist() == [2]


def test_an_empty_tree_speculates_nothing():
    tree = SuffixTree(8)
    for context in ([], [1]):
        found = tree.speculate(context, 5)
        assert (len(found.tokens), found.score, found.match) == (0, 0, 0)
    assert count(tree, [1]) == 0
    assert num_nodes(tree) == 1
