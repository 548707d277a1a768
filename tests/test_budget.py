"""Budget: what rounds cost and how far drafts stand is learnt; what pays is drafted, and no law changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.accept import Accepted
from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree
from paceline.draft.base import UNLIMITED, Ask, Drafter
from paceline.draft.cost import DraftTimes, Prices, Table
from paceline.draft.fallback import Fallback
from paceline.draft.methods.auto import Auto
from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.draft.survival import Survival
from paceline.engine.budget import LONGEST_WAIT, PROBE, SHARE, UNKNOWN, WAIT, Budget, PricedRound, Trials
from paceline.engine.engine import Engine
from paceline.logs.transcript import RecordedAnswer
from paceline.replay.walk import ReplayTally, Walk
from tests import drafters
from tests.asks import asked
from tests.fakes import Restless, TableTarget
from tests.held import held
from tests.pairs import paired

# What a round costs ---------------------------------------------------------------------------------------------------


def learnt(truth, rounds, sizes=(1, 4, 16), most=12):
    """Prices after noisy rounds, one in fifty of which another process held up."""
    rng, prices = np.random.default_rng(0), Prices()
    for _ in range(rounds):
        rows = int(rng.choice(sizes))
        nodes = int(rng.integers(0, most, rows).sum()) if rng.random() < 0.7 else 0
        shape = rows, nodes, rows * int(rng.integers(100, 4000))
        prices.note(*shape, truth(*shape) * rng.normal(1, 0.03) * (20 if rng.random() < 0.02 else 1))
    return prices


def round_of(rows, nodes, context):
    return 1e-3 * (5 + 0.1 * rows + 2 * (nodes > 0) + 0.15 * nodes + 0.1e-3 * context)


def test_prices_are_learnt_from_rounds():
    prices = learnt(round_of, 800)
    for shape in ((1, 0, 1000), (1, 9, 3000), (4, 20, 8000), (16, 0, 16000), (16, 90, 40000)):
        assert prices.seconds(*shape) == pytest.approx(round_of(*shape), rel=0.08)
    assert prices.terms["node"] == pytest.approx(0.15e-3, rel=0.2)


def test_the_first_round_of_a_shape_does_not_count():
    prices = Prices()
    for nodes in (0, 4):
        prices.note(1, nodes, 0, 30.0)  # it compiled
    for _ in range(8):
        for nodes in (0, 4):
            prices.note(1, nodes, 0, 1e-3 + 1e-4 * nodes)
    assert prices.seconds(1, 4) == pytest.approx(1.4e-3, rel=0.05)


def test_the_first_round_of_each_number_of_nodes_does_not_count():
    """A forward of so many nodes is recorded the first time it runs."""
    prices = Prices()
    for nodes in (0, 0, 0, 4, 4, 4, 5, 6, 7, 0, 0, 0):
        prices.note(1, nodes, 0, 1e-3 + 1e-4 * nodes + 15e-3 * (nodes > 4))
    prices.fit()
    assert prices.seconds(1, 4) == pytest.approx(1.4e-3, rel=0.05)
    assert prices.largest == 4


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_prices_follow_the_machine_also_where_nothing_is_drafted(factor):
    """The price of a node, of which plain rounds say nothing, stays what it was as a share of a round."""
    prices = learnt(lambda rows, nodes, context: 1e-3 * (5 + 0.5 * nodes), 400, sizes=(1,))
    for _ in range(600):
        prices.note(1, 0, 1000, factor * 5e-3)
    assert prices.seconds(1, 0, 1000) == pytest.approx(factor * 5e-3, rel=0.05)
    assert prices.terms["node"] == pytest.approx(factor * 0.5e-3, rel=0.35)


def test_rounds_that_never_drafted_guess_low_what_a_node_costs():
    prices = Prices()
    for _ in range(200):
        prices.note(8, 0, 0, 4e-3)
    assert prices.seconds(8, 0) == pytest.approx(4e-3, rel=0.02)
    assert 0 < prices.terms["node"] < 0.05 * 4e-3


def test_prices_that_are_given_stay():
    prices = Prices({"fixed": 1.0, "node": 0.1})
    for _ in range(40):
        prices.note(1, 3, 0, 9.0)
    assert (prices.is_fixed, prices.seconds(1, 3)) == (True, pytest.approx(1.3))


def test_a_call_that_another_process_held_up_is_soon_forgotten():
    times = DraftTimes()
    for seconds in (1.0, *[1e-3] * 20, 1.0, 1e-3, 1e-3):
        times.note(1, 1, seconds)
    assert 1e-3 < times.seconds(1) < 2e-3


# How far drafts stand -------------------------------------------------------------------------------------------------


def test_what_was_cut_is_not_rejected():
    rng, survival, step = np.random.default_rng(0), Survival(), 0.8
    for n in range(3000):
        stood, depth = int(rng.geometric(1 - step)) - 1, int(rng.integers(1, 9))
        survival.note(n, DraftTree.chain(1, [2] * depth), list(range(min(stood, depth) + 1)), 8)
    values = survival.of(DraftTree.chain(1, [2] * 8), -1)
    assert values == pytest.approx(step ** np.arange(1, 9), rel=0.15)
    assert (np.diff(values) <= 0).all()


@pytest.mark.parametrize("step", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("own", [False, True])
def test_a_row_like_all_others_has_their_survival(step, own):
    """However few drafts stand, and also where a drafter gives chances of its own."""
    rng, survival = np.random.default_rng(0), Survival()
    tree = DraftTree.chain(1, [2, 2, 2], chances=step ** np.arange(4.0) if own else None)
    strains = []
    for n in range(4000):
        stood = min(int(rng.geometric(1 - step)) - 1, 3)
        survival.note(n // 40, tree, list(range(stood + 1)), 3)
        strains += [survival.strain(n // 40)] if n % 40 == 39 and n > 1000 else []
    assert np.mean(strains) == pytest.approx(1, abs=0.06)
    assert survival.of(tree, -1)[0] == pytest.approx(step, rel=0.15)


@pytest.mark.parametrize("shares", [(), [1.0] * 24])
def test_the_first_rejection_where_every_draft_stood_is_learnt_from(shares):
    survival, tree = Survival(shares), DraftTree.chain(1, [2] * 24)
    for _ in range(400):
        survival.note(1, tree, list(range(25)), 24)
    before = survival.of(tree, 1)[20]
    for _ in range(40):  # its shares are reckoned anew now and then
        survival.note(1, tree, list(range(18)), 24)
    assert 0 < survival.of(tree, 1)[20] < before <= 1


def test_a_row_that_is_rejected_more_than_others_is_worth_less():
    survival, tree = Survival(), DraftTree.chain(1, [2, 3, 4])
    for _ in range(40):
        survival.note(1, tree, [0, 1, 2, 3], 3)
        survival.note(2, tree, [0], 3)
    good, other, bad = (survival.of(tree, row)[0] for row in (1, 3, 2))
    assert good > other > bad
    survival.drop(2)
    assert survival.of(tree, 2)[0] == pytest.approx(other)


@pytest.mark.parametrize("siblings", [1, 2, 5])
def test_siblings_share_the_chance_that_one_of_them_stands(siblings):
    survival, chain = Survival([0.8, 0.5]), DraftTree.chain(7, [1, 2, 3])
    tree = DraftTree.of(7, [1, *range(2, 2 + siblings), 9], [0, *[1] * siblings, 2])
    alone, stands = survival.of(chain, 0), survival.of(tree, 0)
    assert stands[0] == pytest.approx(alone[0])
    assert stands[1:-1].sum() == pytest.approx(alone[1])
    assert (np.diff(stands[1:-1]) < 0).all(), "a later one is less likely"


@pytest.mark.parametrize("own", [False, True])
def test_no_node_is_likelier_than_its_parent(own):
    survival, rng = Survival(), np.random.default_rng(0)
    tree = DraftTree.of(0, rng.integers(1, 9, 40).tolist(), [int(rng.integers(0, i + 1)) for i in range(40)])
    if own:
        tree.chances = rng.random(41)
    for path in ([0], [0, tree.children(0)[0]], [0, tree.children(0)[-1]]):
        for _ in range(20):
            survival.note(1, tree, path, tree.max_depth)
    values = np.append(1.0, survival.of(tree, 1))
    assert all(values[node] <= values[tree.parent[node]] for node in range(1, len(tree)))


# What pays ------------------------------------------------------------------------------------------------------------


class World:
    """Texts that go on counting to 8 with probability `share(place)`, on a clock by which a round takes
    `fixed + 0.1 * rows + first, if any row has a draft, + node * drafted nodes`, and drafters what they like."""

    def __init__(self, share, fixed, node, first=0.0):
        self.now, self.fixed, self.node, self.first = 0.0, fixed, node, first
        self.share = share if callable(share) else lambda place: share

    def text(self, seed, new):
        rng, text = np.random.default_rng(seed), [*range(1, 9)]
        for place in range(new):
            text.append(1 + text[-1] % 8 if rng.random() < self.share(place) else int(rng.integers(64)))
        return RecordedAnswer(np.array(text[:8]), np.array(text[8:]))

    def speed(self, draft, batch, new, budget=True, times=1):
        """Tokens a second. times: how many batches are answered, one after another."""
        drafter = create(draft) if isinstance(draft, str) else draft
        drafter.bind(Recording(None, (), 64))
        prices, began = Budget(now=lambda: self.now) if budget else UNLIMITED, self.now
        for first in range(0, batch * times, batch):
            self.answer(drafter, prices, [Walk(id, self.text(id, new)) for id in range(first, first + batch)])
        return batch * times * new / (self.now - began)

    def answer(self, drafter, prices, walks):
        for walk in walks:
            drafter.start(walk.row)
        while walks := [walk for walk in walks if not walk.is_over]:
            rows = [walk.row for walk in walks]
            drafter.begin_round(allowance := prices.open(rows))
            trees = allowance.cut(allowance.ask(drafter, asked(*rows)))
            nodes = sum(tree.num_drafted for tree in trees)
            seconds = self.fixed + 0.1 * len(rows) + self.first * (nodes > 0) + self.node * nodes
            self.now += seconds
            accepted = [walk.accept(tree, ReplayTally()) for walk, tree in zip(walks, trees, strict=True)]
            allowance.close(rows, trees, accepted, seconds)


COSTS = [(0.01, 0.0), (0.2, 0.0), (0.1, 0.5), (0.6, 0.0)]


@pytest.mark.parametrize(
    ("batch", "node", "first", "share"), paired([(batch, *cost) for batch in (1, 8) for cost in COSTS], [0.05, 0.9])
)
def test_no_drafter_is_slower_than_none(node, first, share, batch):
    world = World(share, 1.0, node, first)
    plain = world.speed("none", batch, 600)
    for draft in ("sam", "prompt-lookup", "auto:prompt-lookup|sam"):
        speed = world.speed(draft, batch, 600)
        assert speed > 0.94 * plain  # learning, in the first 600 rounds
        assert speed > 0.9 * world.speed(draft, batch, 600, budget=False)


def test_text_that_begins_to_repeat_is_noticed():
    """Though nothing could be copied of the 1,000 tokens before."""
    world = World(lambda length: 0.0 if length < 1000 else 0.97, 1.0, 0.2)
    before, speed = world.speed("none", 1, 1500), world.speed("sam", 1, 1500)
    assert speed > 1.15 * before  # 1.24 if it drafted from the 1,000th token on


class Useless(Drafter):
    """Drafts what is never right, at some cost; counts how often it is asked."""

    name = "useless"

    def __init__(self, world, seconds, steps):
        self.world, self.seconds, self.steps, self.asked = world, seconds, steps, 0

    def draft(self, row, most):
        self.asked += 1
        self.world.now += self.seconds
        return DraftTree.chain(row.last_token, [63] * min(8, most), calls=8 * self.steps)


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("seconds", [0.0001, 0.02, 1.0])
def test_what_is_worthless_is_tried_again_at_bounded_cost(seconds, steps):
    world = World(0.5, 1.0, 0.2)
    drafter, plain = Useless(world, seconds, steps), world.speed("none", 1, 3000)
    assert world.speed(drafter, 1, 3000) > 0.97 * plain
    assert 3 < drafter.asked < (3000 if seconds < 0.01 else 900 if seconds < 1 else 60)


class Reader(Useless):
    """Reads a row's text at its first call, for as long as 20 rounds take."""

    def __init__(self, world):
        super().__init__(world, 0.1, True)
        self.read = set()

    def draft(self, row, most):
        self.world.now += 20.0 * (row.id not in self.read)
        self.read.add(row.id)
        return super().draft(row, most)


def test_trials_count_the_time_that_reading_a_prompt_takes():
    world = World(0.5, 1.0, 0.2)
    drafter, plain = Reader(world), world.speed("none", 1, 64, times=200)
    assert world.speed(drafter, 1, 64, times=200) > 0.97 * plain
    assert 2 < len(drafter.read) < 20


def test_before_prices_are_known_few_nodes_are_drafted_and_every_other_round_is_plain():
    budget, drafter, (row,) = Budget(now=lambda: 0.0), Deep(side_by_side=4), many(1)
    nodes = []
    while not budget.prices.known:
        allowance = budget.open([row])
        trees = allowance.cut(allowance.ask(drafter, [Ask(row, 8)]))
        nodes.append(trees[0].num_drafted)
        allowance.close([row], trees, [whole(trees[0])], 1.0 + 0.3 * nodes[-1])
    assert nodes == [UNKNOWN, 0, UNKNOWN, 0]
    assert budget.prices.seconds(1, UNKNOWN) == pytest.approx(1.0 + 0.3 * UNKNOWN, rel=0.1)


def test_trials_become_rare_until_they_take_their_share():
    for share in (0.001, 0.05, 0.5, 30.0):
        trials = Trials()
        due = [round for round in range(20_000) if trials.due(round, share)]
        gaps = np.diff(due)
        assert (np.diff(gaps) >= 0).all()
        assert gaps[-1] == min(max(int(share / SHARE), WAIT), LONGEST_WAIT)


def test_a_drafter_that_fits_the_row_is_asked_and_the_other_is_not():
    """Half of the rows repeat themselves; auto finds out which, and loses little to asking."""
    world = World(0.9, 1.0, 0.2)
    useless = Useless(world, 0.05, False)
    auto = create("auto:sam|suffix")
    auto.parts = (useless, create("sam"))
    assert world.speed(auto, 1, 600) > 0.93 * world.speed("sam", 1, 600)
    assert useless.asked < 120


def test_reading_a_rows_prompt_is_no_price_of_its_drafts():
    """The first call for a row may take long; those after it are what drafts cost."""
    clock = [0.0]

    class Reading(Drafter):
        asked: list[int] = []

        def draft(self, row, most):
            clock[0] += 0.01 if row.id in self.asked else 50.0
            self.asked.append(row.id)
            return DraftTree.chain(row.last_token, [1, 2, 3], calls=3)

    drafter, budget = Reading(), Budget(Table(Prices({"fixed": 1.0, "node": 0.01}), {}), now=lambda: clock[0])
    for round in range(120):
        row = Row()
        row.id, row.params = round // 4, SamplingParams()
        allowance = budget.open([row])
        trees = allowance.cut(allowance.ask(drafter, asked(row)))
        allowance.close([row], trees, [Accepted(list(range(len(trees[0]))), [1] * len(trees[0]))], 1.0)
    assert len(drafter.asked) > 100


def test_auto_finds_the_drafter_that_suits():
    world = World(0.9, 1.0, 0.2)
    sam, best, auto = (world.speed(draft, 1, 1200) for draft in ("sam", "prompt-lookup", "auto:sam|prompt-lookup"))
    assert best > 1.15 * sam
    assert auto > 0.95 * best


def test_parts_are_asked_each_at_its_own_price():
    world = World(0.9, 1.0, 0.2)
    useless = Useless(world, 0.5, True)
    assert world.speed(Fallback([create("sam"), useless]), 1, 600) > 0.93 * world.speed("sam", 1, 600)


# A round -------------------------------------------------------------------------------------------------------------


class Deep(Drafter):
    """Drafts chains side by side, as deep as it may.

    steps  whether it runs a model step by step. most: what it was asked for last, by row."""

    def __init__(self, side_by_side=1, steps=False):
        self.side_by_side, self.steps, self.most = side_by_side, steps, dict[int, int]()

    def propose(self, asks):
        self.most = {row.id: most for row, most in asks}
        return [self.draft(*ask) for ask in asks]

    def draft(self, row, most):
        tokens, many = np.arange(most * self.side_by_side), self.side_by_side
        above = np.where(tokens < many, 0, tokens + 1 - many)
        return DraftTree.of(row.last_token, tokens.tolist(), above.tolist(), calls=self.steps * most)


def priced(**terms):
    """A budget with these prices, and no time passes."""
    return Budget(Table(Prices({"fixed": 1.0, **terms}), {}), now=lambda: 0.0)


def many(count):
    rows = [Row() for _ in range(count)]
    for id, row in enumerate(rows):
        row.id, row.params = id, SamplingParams()
    return rows


def whole(tree):
    """All of a chain."""
    return Accepted(list(range(len(tree))), [1] * len(tree))


def test_rows_share_the_nodes_that_prices_are_known_for():
    budget, drafter, rows = priced(node=1e-4), Deep(steps=True), many(4)
    budget.known(drafter).steps = True
    allowance = budget.open(rows)
    allowance.room = 8
    allowance.ask(drafter, asked(*rows))
    assert drafter.most == dict.fromkeys(range(4), 2)


def test_a_trial_of_what_runs_a_model_is_one_rows():
    budget, drafter, rows, tried = priced(node=9.0), Deep(steps=True), many(3), []
    budget.known(drafter).steps = True
    for _ in range(40):
        drafter.most = {}
        budget.open(rows).ask(drafter, asked(*rows))
        tried += [drafter.most] * bool(drafter.most)
    assert len(tried) > 2
    assert all(one == {0: PROBE} for one in tried)


@pytest.mark.parametrize("side_by_side", [1, 3])
def test_the_price_of_a_level_is_that_of_its_nodes(side_by_side):
    budget, drafter, rows = priced(node=0.01), Deep(side_by_side), many(1)
    for _ in range(60):
        budget.open(rows).ask(drafter, asked(*rows))
    assert budget.known(drafter).width == pytest.approx(side_by_side, rel=0.01)


def test_nobody_learns_from_anothers_draft():
    budget, left, taken, (row,) = priced(node=0.01), Deep(steps=True), Deep(steps=True), many(1)
    before = budget.known(left).survival.of(DraftTree.chain(7, [1, 2, 3]), 0)
    for _ in range(40):
        allowance = budget.open([row])
        trees = [allowance.ask(drafter, [Ask(row, 3)]) for drafter in (left, taken)][1]
        trees = allowance.cut(trees)
        allowance.close([row], trees, [whole(trees[0])], 1.0)
    assert budget.known(left).worth < 0.1 < budget.known(taken).worth
    assert budget.known(left).survival.of(DraftTree.chain(7, [1, 2, 3]), 0) == pytest.approx(before)
    assert (budget.known(taken).survival.of(DraftTree.chain(7, [1, 2, 3]), 0) > before).all()


@pytest.mark.parametrize("failed", [0, 1])
def test_a_round_of_which_a_row_failed_says_nothing_of_prices(failed):
    budget = Budget(now=lambda: 0.0)
    for n in range(200):
        rows = many(2 + n % 3)
        allowance = budget.open(rows)
        left = rows[failed:]
        allowance.close(left, [DraftTree.root(7) for _ in left], [Accepted([0], [1]) for _ in left], 1.0)
    assert budget.prices.known == (not failed)


def test_where_nothing_is_drafted_anyhow_no_round_is_kept_without_drafts():
    budget, rows = Budget(now=lambda: 0.0), many(1)
    for _ in range(100):
        allowance = budget.open(rows)
        assert not allowance._is_plain
        allowance.close(rows, [DraftTree.root(7)], [Accepted([0], [1])], 1.0)


def test_the_rate_counts_the_time_that_drafting_takes():
    """Four tokens in the time of two plain rounds."""
    budget, clock, (row,) = priced(), [0.0], many(1)
    budget.now = lambda: clock[0]

    class Slow(Deep):
        def propose(self, asks):
            clock[0] += 1.0
            return super().propose(asks)

    drafter = Slow(steps=True)
    for _ in range(400):
        allowance = budget.open([row])
        trees = allowance.ask(drafter, [Ask(row, 3)])
        allowance.close([row], trees, [whole(tree) for tree in trees], 1.0)
    assert len(drafter.most) == 1
    assert budget.tokens / budget.time == pytest.approx(2.0, rel=0.01)


def test_of_a_draft_that_was_cut_only_what_is_left_stands_or_falls():
    budget, drafter, (row,) = priced(), Deep(steps=True), many(1)
    before = budget.known(drafter).survival.asked(0, 4)[0]
    for _ in range(40):
        allowance = budget.open([row])
        (tree,) = (one.clipped(1) for one in allowance.ask(drafter, [Ask(row, 4)]))
        allowance.close([row], [tree], [whole(tree)], 1.0)
    after = budget.known(drafter).survival.asked(0, 4)[0]
    assert len(after) == 4
    assert (after > before - 1e-9).all()


def test_without_prices_nothing_is_gained():
    (row,) = many(1)
    assert Budget().open([row]).gain(Deep(), Ask(row, 9)) == 0


# What may not change --------------------------------------------------------------------------------------------------


class Fickle(Budget):
    """Prices that are unknown, or differ from round to round; drafts of one token seem hopeless, others sure."""

    def __init__(self, kind):
        super().__init__(Table(Prices({"fixed": 1.0, "node": 0.3}), {}) if kind != "unknown" else None)
        self.kind = kind

    def open(self, rows):
        if self.kind == "changing":
            self.prices = Prices({"fixed": 1.0, "node": (0.01, 0.6, 5.0)[sum(map(len, rows)) % 3]})
        self.rounds += 1
        return FickleRound(self, rows)

    def known(self, drafter):
        known = super().known(drafter)
        known.survival.of = lambda tree, row: np.full(len(tree) - 1, chance(tree))
        return known


class FickleRound(PricedRound):
    def value(self, tree, row):
        return chance(tree)

    def gain(self, drafter, ask):
        return 0.6


def chance(tree):
    return 0.01 if len(tree) == 2 else 0.99


TARGET = TableTarget(3, order=None, seed=7, eos=[2])


@pytest.mark.parametrize("kind", ["known", "unknown", "changing"])
@pytest.mark.parametrize("parts", ["n", "n+c", "c+n", "c|n", "n|c", "n|n"])
def test_a_seed_gives_the_tokens_of_plain_decoding_whatever_is_cut(parts, kind):
    """c copies, n reads the row's noise; + and | as in specs."""
    target = TableTarget(12, order=1, seed=3, scale=2.0)
    table = torch.stack([target.logits_after([token]) for token in range(12)])
    made = [drafters.Coupled(table) if part == "n" else create("sam") for part in parts[::2]]
    drafter = Fallback(made)
    if "|" in parts:
        drafter = Auto()
        drafter.parts = tuple(made)
    wishes = [SamplingParams(temperature=0.9, max_tokens=60, seed=seed) for seed in range(4)]
    for budget in (Fickle(kind), Budget(now=Restless()), UNLIMITED):
        engine = Engine(target, drafter, max_batch=2)
        engine.budget = budget
        out = engine.generate([[i, 1, 2] for i in range(4)], wishes)
        assert [done.tokens for done in out] == [
            target.plain([i, 1, 2], wish).new_tokens.tolist() for i, wish in enumerate(wishes)
        ]
        assert sum(done.stats.accepted_tokens for done in out) > 20 or kind == "changing" or budget is not UNLIMITED


class Row:
    """As much of a request as budgets read."""

    id, max_draft, last_token = 0, 30, 7

    def __len__(self):
        return 5


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tree", [False, True])
def test_tokens_are_plain_ones_however_prices_change(tree, temperature):
    target = TableTarget(12, order=2, seed=3)
    prompts = [[i, 1, 2] for i in range(6)]
    params = [SamplingParams(temperature=temperature, max_tokens=60, seed=seed) for seed in range(6)]
    plain = [target.plain(prompt, of).new_tokens.tolist() for prompt, of in zip(prompts, params, strict=True)]
    answers = {tuple(p): [*p, *text] for p, text in zip(prompts, plain, strict=True)}
    oracle = drafters.Oracle(answers, error=0.3, branches=2 * tree)
    engine = Engine(target, Fallback([drafters.Idle(answers, error=0.2), oracle]), max_batch=3)
    engine.budget = Budget(now=Restless())
    out = engine.generate(prompts, params)
    assert [done.tokens for done in out] == plain
    assert sum(done.stats.draft_rounds for done in out) > 10


def test_an_engine_that_drafts_has_a_budget_unless_it_is_told_not_to(monkeypatch):
    monkeypatch.setattr("paceline.engine.engine.Budget", Budget)
    assert isinstance(Engine(TARGET, "sam").budget, Budget)
    assert Engine(TARGET, "sam", budget=False).budget is UNLIMITED
    assert Engine(TARGET).budget is UNLIMITED, "plain decoding pays nothing for what drafts are worth"


def test_a_drafter_that_its_combinator_forgot_is_not_kept():
    budget, gone = Budget(), create("sam")
    budget.known(gone)
    assert len(budget.drafts) == 1
    del gone
    assert not budget.drafts


@pytest.mark.parametrize("draft", ["sam", "coupled"])
def test_rows_that_have_left_leave_nothing_behind(draft):
    drafter = drafters.Coupled(torch.zeros(12, 12, dtype=torch.float64)) if draft == "coupled" else create(draft)
    engine = Engine(TableTarget(12, order=2, seed=3), Fallback([drafter]), max_batch=3)
    budget = engine.budget = Budget(now=Restless())
    during = 0
    for _ in engine.stream([[i, 1, 2] for i in range(6)], SamplingParams(temperature=0.9, max_tokens=30)):
        during = max(during, held(budget))
    assert held(budget) == 0
    assert during > 0, "the test sees what is held of a row"
