"""Layout: what every node sees, where it lies and where it is written, against a recomputation node by node."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.segment import Segment
from paceline.target.layout import KEY_GRANULE, MIN_QUERIES, SHARED_QUERIES, padded_size, plan


@dataclass
class Case:
    segments: list[Segment]
    lengths: list[int]
    window: int | None = None
    shared: int = 1
    padding: int = 0

    def plan(self):
        return plan(self.segments, self.lengths, windows=(self.window,), shared=self.shared, padding=self.padding)

    def padded(self):
        """The same with the padding as nodes that somebody asked for."""
        segments = [*self.segments[:-1], self.segments[-1].longer(self.padding)]
        return Case(segments, self.lengths, self.window, self.shared)


@st.composite
def parents(draw, most):
    """A random tree, sometimes a chain, sometimes a star."""
    n = draw(st.integers(1, most))
    kind = draw(st.sampled_from(["any", "chain", "star", "deep"]))
    if kind == "chain":
        return np.arange(-1, n - 1)
    if kind == "star":
        return np.array([-1] + [0] * (n - 1))
    near = 3 if kind == "deep" else n
    return np.array([-1, *(draw(st.integers(max(0, i - near), i - 1)) for i in range(1, n))])


@st.composite
def segment(draw, slot):
    if draw(st.integers(0, 5)) == 0:  # a chunk of a prompt, perhaps too long to be padded with others
        n = draw(st.integers(1, SHARED_QUERIES + 30))
        return Segment.chunk(slot, np.arange(n) + 7, last=draw(st.booleans()))
    parent = draw(parents(12))
    n = len(parent)
    start = draw(st.integers(0, n - 1)) if draw(st.booleans()) else 0
    logits = draw(st.sampled_from([n - start, 0, 1, (n - start) // 2]))
    return Segment(slot, np.arange(n) * 3 + slot, parent, start=start, num_logits=logits)


@st.composite
def cases(draw):
    slots = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True))
    segments = [draw(segment(slot)) for slot in slots]
    lengths = [draw(st.integers(0, 20)) for _ in slots]
    window = draw(st.sampled_from([None, 1, 2, 3, 7, 16, 100]))
    padding = draw(st.sampled_from([0, 0, 1, 5]))
    return Case(segments, lengths, window, draw(st.sampled_from([1, 1, 2, 3])), padding)


def naive_nodes(case):
    """Every node that is run, one by one: position, place in the cache, and the places it sees."""
    nodes = []
    for s, (seg, length) in enumerate(zip(case.segments, case.lengths, strict=True)):
        line = [[0]]
        for above in seg.parent[1:]:
            line.append([*line[above], len(line)])
        for i in range(seg.start, len(seg.tokens)):
            here = length + len(line[i]) - 1
            seen = {p: p for p in range(length)}  # place in the cache -> position in the text
            seen |= {length + j: length + len(line[j]) - 1 for j in line[i]}
            window = case.window or 10**9
            nodes.append(
                {
                    "segment": s,
                    "slot": seg.slot,
                    "token": int(seg.tokens[i]),
                    "position": here,
                    "at": length + i,
                    "sees": {place for place, position in seen.items() if here - position < window},
                }
            )
    return nodes


def seen_in(group, shared):
    """What a group lets its nodes see, and in which slot."""
    slots = group.last - group.first
    if group.mask is None:  # the first chunk of a prompt: each node sees itself and what is before it
        assert (slots, group.queries, group.gather) == (1, group.keys, None)
        assert group.is_long
        return {node: (set(range(i + 1)), group.first) for i, node in enumerate(range(group.begin, group.end))}
    rows = 1 if group.is_long else shared
    used = group.queries * rows
    assert group.mask.shape == (slots, 1, max(used, MIN_QUERIES), group.keys)
    assert set(group.mask.unique().tolist()) <= {0.0, -np.inf}
    assert bool((group.mask == 0).any(3).all()), "a padded query that sees nothing turns into NaN"
    visible = (group.mask[:, 0, :used] == 0).numpy().reshape(slots * group.queries, rows, group.keys)
    assert (visible == visible[:, :1]).all(), "query heads of one node see different keys"
    assert group.keys % KEY_GRANULE == 0
    if group.gather is None:
        assert group.scatter is None
        assert group.packed is None
        assert group.end - group.begin == len(visible)
        places = {node: i for i, node in enumerate(range(group.begin, group.end))}
    else:
        assert len(group.gather) == len(visible)
        places = dict(zip(group.packed.tolist(), group.scatter.tolist(), strict=True))
        assert [group.gather[place] for place in places.values()] == list(places)
    return {
        node: (set(np.flatnonzero(visible[i, 0]).tolist()), group.first + i // group.queries)
        for node, i in places.items()
    }


def check(case, layout):
    assert layout.num_nodes == len(naive_nodes(case))
    case = case.padded()
    nodes = naive_nodes(case)
    assert layout.num_nodes + layout.padding == len(nodes)
    assert layout.tokens.tolist() == [n["token"] for n in nodes]
    assert layout.positions.tolist() == [n["position"] for n in nodes]
    assert layout.slots.tolist() == [n["slot"] for n in nodes]
    assert layout.at.tolist() == [n["at"] for n in nodes]
    for s, (begin, end) in enumerate(layout.spans):
        assert {n["segment"] for n in nodes[begin:end]} == {s}
    assert layout.reach == {
        seg.slot: length + len(seg.tokens) for seg, length in zip(case.segments, case.lengths, strict=True)
    }
    ends = [end for _, end in layout.spans]
    wanted = [i for seg, end in zip(case.segments, ends, strict=True) for i in range(end - seg.num_logits, end)]
    assert layout.num_wanted == sum(seg.num_logits for seg in case.segments)
    assert wanted == (list(range(layout.num_nodes)) if layout.wanted is None else layout.wanted.tolist())
    attended = {}
    for group in layout.groups:
        found = seen_in(group, case.shared)
        assert not attended.keys() & found.keys(), "a node attends in one group"
        attended |= found
    assert sorted(attended) == list(range(len(nodes)))
    for i, node in enumerate(nodes):
        sees, slot = attended[i]
        assert slot == node["slot"]
        assert sees == node["sees"], f"node {i}"


@given(cases())
def test_every_node_sees_its_past_its_ancestors_and_itself(case):
    check(case, case.plan())


@given(cases())
def test_layers_with_other_windows_have_masks_of_their_own(case):
    windows = (None, 3, case.window)
    both = plan(case.segments, case.lengths, windows=windows, shared=case.shared)
    for window in windows:
        alone = plan(case.segments, case.lengths, windows=(window,), shared=case.shared).groups
        for group, right in zip((both.groups[g] for g in both.calls(window)), alone, strict=True):
            assert (group.first, group.last, group.keys) == (right.first, right.last, right.keys)
            assert (group.mask is None) == (right.mask is None)
            assert group.mask is None or torch.equal(group.mask, right.mask)


def test_padded_sizes_are_few_and_near():
    every = {padded_size(n) for n in range(1, 97)}
    assert len(every) < 27
    assert {padded_size(n) for n in every} == every
    assert all(n <= padded_size(n) <= max(1.25 * n, n) for n in range(1, 5000))
    assert [padded_size(n) for n in (1, 2, 3, 4, 5, 17, 81, 250, 257, 513)] == [1, 2, 3, 4, 6, 20, 88, 256, 288, 576]


@pytest.mark.parametrize("window", [None, 5])
def test_a_long_chunk_does_not_pad_the_short_segments(window):
    long, short = SHARED_QUERIES + 6, 3
    segments = [
        Segment.chunk(4, np.arange(long), last=False),
        Segment.chunk(1, np.arange(short), last=True),
        Segment.chunk(0, np.arange(long), last=True),
    ]
    layout = plan(segments, [0, 9, 2], windows=(window,))
    check(Case(segments, [0, 9, 2], window), layout)
    assert sorted(g.queries for g in layout.groups) == [short, long, long]


@pytest.mark.parametrize(("length", "nodes"), [(0, 1), (63, 1), (64, 1), (58, 6), (58, 7), (7, 100)])
def test_attention_reads_whole_granules_and_a_few_queries_at_least(length, nodes):
    (group,) = plan([Segment.chunk(3, np.arange(nodes), last=True)], [length]).groups
    assert group.keys == -(-(length + nodes) // KEY_GRANULE) * KEY_GRANULE
    assert group.mask.shape[2] == max(nodes, MIN_QUERIES)
    assert (group.mask[0, 0, nodes - 1] == 0).nonzero().flatten().tolist() == list(range(length + nodes))


@pytest.mark.parametrize(("length", "nodes", "window", "free"), [(0, 100, None, True), (0, 100, 100, True),
                                                                 (0, 100, 99, False), (1, 100, None, False),
                                                                 (0, SHARED_QUERIES, None, False)])  # fmt: skip
def test_only_the_first_long_chunk_needs_no_mask(length, nodes, window, free):
    (group,) = plan([Segment.chunk(3, np.arange(nodes), last=True)], [length], windows=(window,), shared=3).groups
    assert (group.mask is None) == free


def test_equal_chains_on_neighbouring_slots_are_not_gathered():
    segments = [Segment.chunk(slot, np.arange(4), last=True) for slot in (2, 3, 4)]
    (group,) = plan(segments, [3, 9, 1]).groups
    assert group.gather is None
    (group,) = plan(segments[::-1], [3, 9, 1]).groups
    assert group.gather is not None


def test_the_mask_has_the_models_dtype():
    (group,) = plan([Segment.chunk(0, np.arange(4), last=True)], [3], dtype=torch.bfloat16).groups
    assert group.mask is not None
    assert group.mask.dtype == torch.bfloat16
