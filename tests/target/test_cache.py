"""The ragged cache against a list of rows: whatever is added, dropped, written and committed, in any order."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.core.segment import Segment
from paceline.target.cache import GRANULE, RaggedCache
from paceline.target.layout import plan

LAYERS, HEADS, DIM, CONTEXT = 3, 2, 4, 300


def make():
    return RaggedCache(LAYERS, HEADS, DIM, CONTEXT, torch.float32, "cpu")


def entry(ids, layer, which):
    """A key (which = 0) or value (1) that says whose it is: [n, HEADS, DIM] for the nodes `ids`."""
    base = torch.from_numpy(ids.astype(np.float32))[:, None, None] * (LAYERS * 2 * HEADS * DIM)
    return base + torch.arange(HEADS * DIM).view(HEADS, DIM) + (layer * 2 + which) * HEADS * DIM


@torch.inference_mode()
def write(cache, layout, ids, layers=range(LAYERS)):
    writer = cache.writer(layout)
    for layer in layers:
        writer.write(layer, entry(ids, layer, 0), entry(ids, layer, 1))


def layout_of(cache, segments):
    return plan(segments, [cache.length(s.slot) for s in segments])


def chain(slot, n, start=0):
    return Segment(slot, np.zeros(n, np.int64), np.arange(-1, n - 1), start=start)


def held(cache, slot, count):
    """The ids of the first `count` places of a row, as a forward of that row would read them."""
    layout = plan([chain(slot, count)], [0])
    writer = cache.writer(layout)
    ids = None
    for layer in range(LAYERS):
        for which, read in enumerate(writer.read(layer, 0)):
            read = read[0, :, :count].transpose(0, 1)  # [count, HEADS, DIM]
            found = (read[:, 0, 0] - (layer * 2 + which) * HEADS * DIM) / (LAYERS * 2 * HEADS * DIM)
            assert torch.equal(read, entry(found.numpy(), layer, which)), "heads or numbers of a token were torn apart"
            assert ids is None or np.array_equal(ids, found.numpy()), "layers hold different tokens"
            ids = found.numpy()
    assert ids is not None
    return ids.astype(np.int64)


@dataclass
class ModelRow:
    committed: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """The model: a list of ids for every row, and the ids written after it since its last commit."""

    def __init__(self):
        super().__init__()
        self.cache = make()
        self.rows = {}
        self.next_id = 1

    @initialize(n=st.integers(1, 3))
    def begin(self, n):
        for _ in range(n):
            self.add(10)

    @rule(expected=st.sampled_from([1, 20, GRANULE, GRANULE + 1, 150, 5000]))
    def add(self, expected):
        slot = self.cache.add_row(expected)
        assert slot not in self.rows
        assert slot == min(set(range(len(self.rows) + 1)) - self.rows.keys()), "the lowest free slot"
        assert self.cache.capacity >= min(expected, CONTEXT)
        self.rows[slot] = ModelRow()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def drop(self, data):
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.cache.drop_row(slot)
        del self.rows[slot]
        with pytest.raises(ValueError, match="no row"):
            self.cache.length(slot)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def forward(self, data):
        """Write a segment for some rows, in any order; go on after what was written before, or start again."""
        slots = data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=1, unique=True))
        segments, ids = [], []
        for slot in slots:
            row = self.rows[slot]
            start = data.draw(st.sampled_from([0, len(row.after)]))
            count = data.draw(st.integers(1, 9) | st.sampled_from([70, 140]))
            count = max(1, min(count, CONTEXT - len(row.committed) - start))
            segments.append(chain(slot, start + count, start))
            new = list(range(self.next_id, self.next_id + count))
            self.next_id += count
            row.after = row.after[:start] + new
            ids += new
        write(self.cache, layout_of(self.cache, segments), np.array(ids))

    @precondition(lambda self: any(row.after for row in self.rows.values()))
    @rule(data=st.data())
    def commit(self, data):
        slot = data.draw(st.sampled_from(sorted(s for s, row in self.rows.items() if row.after)))
        row = self.rows[slot]
        others = st.sets(st.integers(1, len(row.after) - 1)) if len(row.after) > 1 else st.just(set())
        path = [0, *sorted(data.draw(others))]
        if data.draw(st.booleans()):
            path = list(range(len(path)))
        self.cache.commit(slot, path)
        row.committed += [row.after[node] for node in path]
        row.after = []

    @invariant()
    def holds_what_the_model_holds(self):
        for slot, row in self.rows.items():
            assert self.cache.length(slot) == len(row.committed)
            every = row.committed + row.after
            if every:
                assert held(self.cache, slot, len(every)).tolist() == every
        assert self.cache.num_slots >= len(self.rows)
        assert self.cache.capacity % GRANULE == 0


CacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestCacheMachine = CacheMachine.TestCase


@given(st.lists(st.integers(0, 5), min_size=2, max_size=6, unique=True), st.integers(1, 5))
@torch.inference_mode()
def test_every_group_reads_the_rows_it_names(slots, nodes):
    cache = make()
    for _ in range(6):
        cache.add_row(10)
    for slot in slots:
        write(cache, layout_of(cache, [chain(slot, slot + 1)]), np.arange(slot + 1) + 100 * slot)
        cache.commit(slot, range(slot + 1))
    layout = layout_of(cache, [chain(slot, nodes) for slot in slots])
    ids = np.concatenate([1000 + 100 * slot + np.arange(nodes) for slot in slots])
    writer = cache.writer(layout)
    for layer in range(LAYERS):
        writer.write(layer, entry(ids, layer, 0), entry(ids, layer, 1))
        for which, read in enumerate(writer.read(layer, 0)):
            group = layout.groups[0]
            assert read.shape == (group.last - group.first, HEADS, group.keys, DIM)
            for slot in slots:
                every = np.concatenate([np.arange(slot + 1) + 100 * slot, 1000 + 100 * slot + np.arange(nodes)])
                got = read[slot - group.first].transpose(0, 1)[: len(every)]
                assert torch.equal(got, entry(every, layer, which))


@pytest.mark.parametrize("others", ["none", "shorter"])
def test_growing_keeps_what_is_written_after_a_row(others):
    """A self-drafter's nodes lie after its row while another row's prompt makes the cache grow."""
    cache = make()
    slot = cache.add_row(10)
    if others == "shorter":
        cache.add_row(10)
    write(cache, layout_of(cache, [chain(slot, 40)]), np.arange(40))
    cache.commit(slot, range(40))
    write(cache, layout_of(cache, [chain(slot, 20)]), np.arange(100, 120))
    before = cache.capacity
    cache.reserve(250)
    assert cache.capacity > before
    assert held(cache, slot, 60).tolist() == [*range(40), *range(100, 120)]
    for _ in range(5):
        cache.add_row(10)
    assert held(cache, slot, 60).tolist() == [*range(40), *range(100, 120)]


def test_capacity_and_slots_double_so_that_growing_stays_cheap():
    cache = RaggedCache(1, 1, 1, 100_000, torch.float32, "cpu")
    slot = cache.add_row(1)
    capacities = set()
    for n in range(1, 5000):
        cache.reserve(n)
        capacities.add(cache.capacity)
    assert len(capacities) <= 8
    counts = {cache.num_slots}
    for _ in range(200):
        cache.add_row(1)
        counts.add(cache.num_slots)
    assert len(counts) <= 9
    assert slot == 0


def test_the_cache_does_not_outgrow_the_context():
    cache = make()
    cache.add_row(10**9)
    cache.reserve(CONTEXT - 1)
    assert cache.capacity < CONTEXT + GRANULE
    assert cache.nbytes == 4 * 2 * LAYERS * HEADS * DIM * cache.num_slots * cache.capacity


def test_a_new_row_finds_nothing_of_an_earlier_one():
    """What a masked place holds is multiplied by zero, and zero times NaN is NaN."""
    cache = make()
    slot = cache.add_row(60)
    write(cache, layout_of(cache, [chain(slot, 20)]), np.arange(20))
    cache.commit(slot, range(20))
    for count in (30, 5):  # a long draft, then a shorter one
        write(cache, layout_of(cache, [chain(slot, count)]), np.full(count, np.nan))
    cache.drop_row(slot)
    assert cache.add_row(60) == slot
    assert not cache.copy(slot, cache.capacity).any()
    cache.paste(slot, torch.full_like(cache.copy(slot, 45), torch.nan))
    cache.drop_row(slot)
    assert not cache.copy(cache.add_row(60), cache.capacity).any()


def test_a_cache_goes_on_in_the_memory_of_one_without_rows():
    first, second, other = make(), make(), RaggedCache(1, HEADS, DIM, CONTEXT, torch.float32, "cpu")
    slot = first.add_row(60)
    write(first, layout_of(first, [chain(slot, 20)]), np.full(20, np.nan))
    second.take_memory(first)
    assert not second.num_slots, "a row is in it"
    first.drop_row(slot)
    other.take_memory(first)
    second.take_memory(first)
    assert not other.num_slots
    assert second.kv.data_ptr() == first.kv.data_ptr()
    assert not second.copy(second.add_row(60), second.capacity).any()


@pytest.mark.parametrize("slot", [-1, 1, 2, 7])
def test_an_unknown_slot_is_refused(slot):
    cache = make()
    for _ in range(2):
        cache.add_row(10)
    cache.drop_row(1)
    for act in (cache.drop_row, cache.length, lambda s: cache.commit(s, [0])):
        with pytest.raises(ValueError, match="holds no row"):
            act(slot)
