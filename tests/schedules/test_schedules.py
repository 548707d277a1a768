"""Equal and grouped on a transformers target: exact, whatever the batch; and the invariants of realigned rows."""

from collections import deque
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests import drafters, models, native
from tests.pairs import paired
from tests.plain import texts
from tests.schedules import world
from tests.schedules.world import NEW, SAMPLED

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Equal, Grouped, create_schedule
from paceline.errors import ModelError, PacelineError
from paceline.target.base import Needs
from paceline.target.rectangles import RectangularCache, RectangularTarget, rectangular

SCHEDULES = ("equal", "grouped")
GREEDY = SamplingParams(max_tokens=NEW)


@pytest.fixture(scope="module")
def llama():
    return world.of()


# The promise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "name", "batches"),
    paired(
        SCHEDULES,
        [
            ("none", (3,)),
            ("oracle tree", (1, 3, 8)),
            ("oracle chain", (8,)),
            ("random tree", (3,)),
            ("random chain", (8,)),
            ("probes", (3,)),
        ],
    ),
)
def test_greedy_answers_are_plain_ones_in_the_order_of_the_prompts(llama, schedule, name, batches):
    for batch in batches:
        chunk = 16 if batch == 3 else 512
        engine = Engine(llama.target, llama.drafter(name), max_batch=batch, schedule=schedule, prefill_chunk=chunk)
        out = engine.generate(llama.prompts, GREEDY)
        assert texts(llama.prompts, out) == list(llama.answers.values())
        assert name == "none" or sum(done.stats.draft_tokens for done in out) > 0
        assert isinstance(engine.target, RectangularTarget)
        assert not engine.target.cache._rows, "no row is left in the cache"


@pytest.mark.parametrize(("schedule", "family"), paired(SCHEDULES, ["gpt2", "gpt-neox"]))
def test_other_architectures(family, schedule):
    of = world.of(family)
    out = Engine(of.target, of.drafter("oracle tree"), max_batch=3, schedule=schedule).generate(of.prompts, GREEDY)
    assert texts(of.prompts, out) == list(of.answers.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sampled_answers_are_plain_ones_seed_for_seed(llama, schedule):
    engine = Engine(llama.target, llama.drafter("random tree"), max_batch=8, schedule=schedule)
    assert texts(llama.prompts, engine.generate(llama.prompts, SAMPLED)) == list(llama.samples.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_draft_model(llama, schedule, tmp_path_factory):
    folder = models.make("llama3", tmp_path_factory.mktemp("draft"))  # the target's own weights: most drafts stand
    engine = Engine(llama.target, f"model:{folder}", max_batch=3, schedule=schedule)
    out = engine.generate(llama.prompts, GREEDY)
    assert texts(llama.prompts, out) == list(llama.answers.values())
    assert sum(sum(done.stats.accepted[1:]) for done in out) > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drawn_drafts_are_the_rows_own(llama, schedule):
    table = torch.randn(llama.target.vocab_size, llama.target.vocab_size, generator=torch.manual_seed(0))

    def answer(batch):
        drafter = drafters.Coupled(table, (2, 1))
        engine = Engine(llama.target, drafter, max_batch=batch, schedule=schedule)
        return [done.tokens for done in engine.generate(llama.prompts, SAMPLED)]

    assert answer(8) == answer(1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_row_does_not_depend_on_the_rows_beside_it(llama, schedule):
    rng = np.random.default_rng(2)
    for _ in range(4):
        order = rng.permutation(len(llama.prompts))[: int(rng.integers(2, 9))]
        prompts = [llama.prompts[i] for i in order]
        drafter = llama.drafter("oracle tree")
        engine = Engine(llama.target, drafter, max_batch=int(rng.integers(1, 9)), schedule=schedule)
        params = [SamplingParams(max_tokens=int(n)) for n in rng.integers(1, NEW + 1, len(prompts))]
        for prompt, wish, done in zip(prompts, params, engine.generate(prompts, params), strict=True):
            whole = llama.answers[tuple(prompt)][len(prompt) :]
            assert done.tokens == whole[: wish.max_tokens]  # a budget of its own, exactly


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_row_that_is_given_up_or_fails_leaves_the_others_alone(llama, schedule):
    engine = Engine(llama.target, llama.drafter("oracle chain"), max_batch=4, schedule=schedule)
    rows = [engine.add(prompt, GREEDY) for prompt in llama.prompts]
    for _ in range(3):
        engine.step()
    engine.abort(rows[0])
    engine.finish(rows[1:])
    assert [row.tokens.tolist() for row in rows[1:]] == list(llama.answers.values())[1:]


def test_a_self_drafter_is_refused_and_so_is_the_native_decoder(llama):
    with pytest.raises(ModelError, match="cannot be entered or left in the middle"):
        rectangular(llama.target).check(Needs(resume_layer=1))
    with pytest.raises(ModelError, match="native=False"):
        Engine(native.of(llama.model), "none", schedule="equal")


# What the method promises ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_draft_that_stands_whole_brings_one_token_more_and_moves_nothing(llama, depth):
    """The bonus token is kept; rows that commit equally many tokens stay in line, however unequal they are."""
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    prompts = llama.prompts[:3]
    free = Engine(llama.target, "none").generate(prompts, params)
    answers = {tuple(p): [*p, *done.tokens] for p, done in zip(prompts, free, strict=True)}
    engine = Engine(llama.target, drafters.Right(answers, deep=depth), max_batch=3, schedule="equal")
    out = engine.generate(prompts, params)
    assert texts(prompts, out) == list(answers.values())
    assert {done.rounds for done in out} == {1 + -(-(NEW - 1) // (depth + 1))}
    assert isinstance(engine.target, RectangularTarget)
    assert engine.target.cache.moved_bytes == engine.target.cache.realigned == 0


@pytest.fixture
def watched(monkeypatch):
    """Every arrangement, checked against the invariants and poisoned where no row has a token."""
    seen = []
    arrange = RectangularCache.arrange

    def checked(self, slots, counts):
        block = arrange(self, slots, counts)
        lengths = [self.length(slot) for slot in slots]
        assert [pad + length for pad, length in zip(block.pads, lengths, strict=True)] == [block.end] * len(slots)
        assert block.width == max(counts)
        for i, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            row = self._rows[slot]
            assert (row.block, row.index) == (block, i)
            assert row.runs in ([(block.pads[i], block.end)], [])
            assert row.new + count == block.end + block.width
            block.kv[:, :, i, :, : block.pads[i]] = 1e4 * (-1) ** i
        block.kv[..., block.end :, :] = -1e4
        seen.append(block)
        return block

    monkeypatch.setattr(RectangularCache, "arrange", checked)
    return seen


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_are_rectangular_and_padding_is_never_read(llama, schedule, watched):
    inner = drafters.Oracle(llama.answers, error=0.3, branches=1)
    listening = drafters.Listening(inner, Needs())  # n - 1 entries of n tokens, after every round
    engine = Engine(llama.target, listening, max_batch=3, schedule=schedule)
    assert texts(llama.prompts, engine.generate(llama.prompts, GREEDY)) == list(llama.answers.values())
    assert any(len(set(block.pads)) > 1 for block in watched)


def test_realigned_keys_and_values_are_those_of_a_fresh_forward(llama):
    target = rectangular(llama.target)
    engine = Engine(target, drafters.Oracle(llama.answers, error=0.4, branches=1), max_batch=3, schedule="equal")
    rows = [engine.add(prompt, SamplingParams(max_tokens=60, ignore_eos=True)) for prompt in llama.prompts[:3]]
    for _ in range(5):
        engine.step()
    assert target.cache.realigned > 0
    block = target.cache.arrange([row.slot for row in rows], [1] * 3)
    for i, row in enumerate(rows):
        fresh = rectangular(llama.target)
        slot = fresh.add_row(0)
        fresh.verify([Segment.chunk(slot, row.tokens[:-1], last=True)])
        mine = block.kv[:, :, i, :, block.pads[i] : block.end]
        again = fresh.cache._rows[slot].block
        assert again is not None
        torch.testing.assert_close(mine, again.kv[:, :, 0, :, : len(row) - 1], rtol=1e-4, atol=1e-5)


# Who runs --------------------------------------------------------------------------------------------------------


def rows_of(lengths):
    """Rows that are decoding, with so many tokens."""
    made = [Row(i, [5] * (n - 1), SamplingParams(max_tokens=50), max_context=100) for i, n in enumerate(lengths)]
    for row in made:
        row.extend([6])
        row.cached = len(row) - 1
    return made


def chosen(schedule, lengths):
    return [turn.row.id for turn in schedule.select(rows_of(lengths))]


def test_grouped_takes_the_first_group_that_is_full_else_the_front():
    schedule = Grouped(2, 512, window=6)
    assert chosen(schedule, [7, 9, 8, 9, 8]) == [1, 3]
    assert chosen(schedule, [7, 9, 8]) == [0, 1]
    assert chosen(schedule, [7]) == [0]
    assert chosen(schedule, [7, 9, 9, 8, 8]) == [1, 2], "row 0 starves while others match"


def test_equal_begins_a_batch_when_the_last_has_ended():
    schedule, waiting = Equal(2, 512), deque(rows_of([3, 4, 5]))
    first = schedule.admit(waiting, [])
    assert [row.id for row in first] == [0, 1]
    assert schedule.admit(waiting, first[:1]) == []
    assert [row.id for row in schedule.admit(waiting, [])] == [2]


def test_prompts_run_before_drafts_in_pieces():
    schedule, decoding = Grouped(2, 4, window=8), rows_of([7])
    fresh = [Row(10 + n, [5] * n, SamplingParams(), max_context=100) for n in (3, 6, 2)]
    turns = schedule.select([*decoding, *fresh])
    assert [(turn.row.id, turn.chunk) for turn in turns] == [(13, 3), (16, 4)]


def test_finished_rows_leave_the_batch(llama):
    engine = Engine(llama.target, "none", max_batch=8, schedule="equal")
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in range(1, 9)]
    sizes = []
    rows = [engine.add(prompt, wish) for prompt, wish in zip(llama.prompts, params, strict=True)]
    while engine.has_work:
        sizes.append(len(engine.step()))
    assert sizes == list(range(8, 0, -1))
    assert all(len(later) != len(earlier) for earlier, later in pairwise([row.new_tokens for row in rows]))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("equl", "there is no schedule 'equl'; there are ragged, equal, grouped. Did you mean 'equal'?"),
        ("equal:3", "only grouped takes a number"),
        ("grouped:x", "only grouped takes a number"),
        ("grouped:8", "a window is larger than the batch, which is 8"),
    ],
)
def test_a_wrong_schedule_is_named(spec, told):
    with pytest.raises(PacelineError) as raised:
        create_schedule(spec, 8, 512)
    assert told in str(raised.value)
