"""auto: what it chooses under which load, that its choices repeat, and what stays exact."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import Engine, SamplingParams
from paceline.core.accept import Accepted
from paceline.core.tree import DraftTree
from paceline.draft.acceptance import DEEPEST, FIRST, Acceptance, Lengths
from paceline.draft.base import Drafter
from paceline.draft.cost import RoundTimes
from paceline.draft.methods.auto import Auto, AutoConfig, Candidate
from paceline.draft.registry import create
from paceline.errors import MethodError
from tests.draft.test_cost import times_of
from tests.fakes import TableTarget
from tests.lossless_enumeration import Branches, BranchingRandom, largest_difference, outcomes
from tests.rounds import shown


def write_table(path: Path, fingerprint: str = "", **terms: float) -> Path:
    drafting = {"sam": {"step": 0, "row": 5}, "suffix": {"step": 0, "row": 10}}
    forward = {name: terms.get(name, 0.0) for name in RoundTimes().names}
    table = {"model": {"fingerprint": fingerprint}, "forward_ms": forward, "drafting_us": drafting, "acceptance": {}}
    path.write_text(json.dumps(table))
    return path


# Acceptance ---------------------------------------------------------------------------------------------------------


def test_chances_are_those_of_the_drafts_whatever_was_cut() -> None:
    """Cutting by depth says nothing of what lies deeper, and must not count as rejected."""
    rng, chances = np.random.default_rng(0), Acceptance()
    step = 0.8
    for n in range(3000):
        stood = int(rng.geometric(1 - step)) - 1
        depth = int(rng.integers(1, 9))
        tree = DraftTree.chain(1, [2] * depth)
        chances.note(n, tree, list(range(min(stood, depth) + 1)), 8, 0)
    values = chances.values(DraftTree.chain(1, [2] * 8), -1)
    assert values == pytest.approx(step ** np.arange(1, 9), rel=0.12)
    assert (np.diff(values) <= 0).all()


@pytest.mark.parametrize("step", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("own", [False, True])
def test_a_row_like_all_others_has_their_chances_however_few_drafts_stand(step: float, own: bool) -> None:
    rng, chances = np.random.default_rng(0), Acceptance()
    tree = DraftTree.chain(1, [2, 2, 2], chances=step ** np.arange(4.0) if own else None)
    multipliers = []
    for n in range(4000):
        stood = min(int(rng.geometric(1 - step)) - 1, 3)
        chances.note(n // 40, tree, list(range(stood + 1)), 3, 0)
        multipliers += [chances.multiplier(n // 40)] if n % 40 == 39 and n > 1000 else []
    assert np.mean(multipliers) == pytest.approx(1, abs=0.06)
    assert chances.values(tree, -1)[0] == pytest.approx(step, rel=0.15)


@pytest.mark.parametrize("seeded", [True, False])
def test_the_first_rejection_where_every_draft_stood_is_learnt_from(seeded: bool) -> None:
    chances, tree = Acceptance(), DraftTree.chain(1, [2] * 24)
    if seeded:
        chances.seed([1.0] * 24)
    for _ in range(32):
        chances.note(1, tree, list(range(25)), 24, 0)
    before = chances.values(tree, 1)[20]
    chances.note(1, tree, list(range(18)), 24, 24)
    assert 0 < chances.values(tree, 1)[20] <= before
    assert np.isfinite(chances.by_depth(1, 24)).all()


def test_a_row_that_is_rejected_more_than_others_has_lower_chances() -> None:
    chances, tree = Acceptance(), DraftTree.chain(1, [2, 3, 4])
    for _ in range(40):
        chances.note(1, tree, [0, 1, 2, 3], 3, 0)
        chances.note(2, tree, [0], 3, 0)
    good, other, bad = (chances.values(tree, row)[0] for row in (1, 3, 2))
    assert good > other > bad
    chances.drop(2)
    assert chances.values(tree, 2)[0] == pytest.approx(other)


def test_no_node_is_likelier_than_its_parent() -> None:
    chances, rng = Acceptance(), np.random.default_rng(0)
    tree = DraftTree.of(0, rng.integers(1, 9, 40).tolist(), [int(rng.integers(0, i + 1)) for i in range(40)])
    for path in ([0], [0, tree.children(0)[0]], [0, tree.children(0)[-1]]):
        for _ in range(20):
            chances.note(1, tree, path, tree.max_depth, 0)
    values = np.append(1.0, chances.values(tree, 1))
    assert all(values[node] <= values[tree.parent[node]] for node in range(1, len(tree)))


def test_a_drafters_own_chances_are_corrected_by_what_came() -> None:
    chances = Acceptance()
    tree = DraftTree.chain(0, [1, 2], chances=np.array([1.0, 0.9, 0.81]))
    assert chances.values(tree, 1) == pytest.approx([0.9, 0.81])
    for row in range(300):  # 6 of 10 stand, and 9 were promised
        chances.note(row, tree, [0, 1, 2] if row % 10 < 6 else [0], 2, 0)
    assert chances.values(tree, -1)[0] < 0.8


def test_lengths_of_drafts_that_were_limited() -> None:
    lengths = Lengths()
    for _ in range(200):
        lengths.note(2, 2)  # limited at 2
        lengths.note(4, DEEPEST)
    assert lengths.steps(4, 1)[-1] == pytest.approx(4, abs=0.3)
    assert lengths.steps(8, 1)[-1] < 5
    assert lengths.steps(8, 4)[-1] >= lengths.steps(8, 1)[-1]
    assert len(lengths.reach(2 * DEEPEST)) == 2 * DEEPEST


# The drafter ---------------------------------------------------------------------------------------------------------


REPEATING = [*range(1, 9)] * 3


def repeating() -> TableTarget:
    """A target that counts to 8 again and again, but for one token in five, which nothing foretells."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        out = np.zeros(32)
        out[1 + prefix[-1] % 8] = 6.0
        if sum(prefix) % 5 == 0:
            out[9 + sum(prefix) % 20] = 9.0
        return out

    return TableTarget(32, order=3, logits=logits)


def drafted_per_round(draft: str, batch: int) -> float:
    engine = Engine(repeating(), draft, max_batch=batch)
    out = engine.generate([[i + 9, *REPEATING] for i in range(batch)], SamplingParams(max_tokens=60))
    return sum(d.stats.draft_tokens for d in out) / sum(d.stats.rounds for d in out)


def test_under_load_the_engine_drafts_less(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.json", round=2.0, token_after_0=0.2)
    sizes = {batch: drafted_per_round(f"auto:sam,explore=0,table={table}", batch) for batch in (1, 8)}
    assert sizes[1] > sizes[8] > 0
    # A node costs what a round of one row costs: only what is as good as certain could pay.
    dear = write_table(tmp_path / "dear.json", token_after_0=1.0)
    assert drafted_per_round(f"auto:sam,explore=0,table={dear}", 8) < 0.3 * sizes[8]


def test_the_same_table_and_seed_make_the_same_choices(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.json", round=1.5, token_after_0=0.01, token_after_12=0.05)

    def run(seed: int) -> list[object]:
        engine = Engine(repeating(), f"auto:sam|suffix,table={table},explore=0.3,seed={seed}", max_batch=3)
        wish = SamplingParams(max_tokens=60, temperature=0.7, seed=5)
        out = engine.generate([[i + 9, *REPEATING] for i in range(3)], wish)
        return [(done.tokens, done.stats.accepted, done.stats.drafted) for done in out]

    assert run(3) == run(3)
    assert [done[0] for done in run(3)] == [done[0] for done in run(4)]  # type: ignore[index]


class Fixed(Drafter):
    """The same draft for every row; counts how often it is asked."""

    name = "fixed"

    def __init__(self, tree: DraftTree | None, weight: int = 0):
        self.tree, self.weight_bytes, self.limits = tree, weight, []

    def propose(self, rows):
        self.limits += [row.max_draft for row in rows]
        return [self.tree or DraftTree.root(row.last_token) for row in rows]


class FakeRow:
    """As much of a request as `propose` reads."""

    def __init__(self, id: int = 0, max_draft: int = 30):
        self.id, self.max_draft, self.last_token = id, max_draft, 7

    def __len__(self) -> int:
        return 5


def auto_of(*drafters: Drafter, **config: object) -> Auto:
    auto = Auto(AutoConfig("|".join(["sam", "suffix"][: len(drafters)]), **config))
    auto.candidates = [Candidate(f"d{i}", drafter) for i, drafter in enumerate(drafters)]
    for candidate in auto.candidates:
        candidate.drafts = 100
    auto._order = list(auto.candidates)
    auto.parts = drafters
    return auto


def test_a_drawn_draft_is_taken_whole_however_it_looks() -> None:
    """Its depth is settled before it is drawn; afterwards not a node may go, and no other draft may take its place."""
    probs = torch.full((7, 9), 1 / 9)
    drawn = DraftTree.chain(7, [1, 2, 3, 4, 5, 6], draft_probs=probs)
    copied = DraftTree.chain(7, [8, 8, 8])
    auto = auto_of(Fixed(copied), Fixed(drawn), explore=0.0)
    # Nodes are dear: nothing that may be cut is verified.
    auto.times = times_of(token_after_0=10.0)
    assert auto.propose([FakeRow()])[0] is drawn  # type: ignore[list-item]
    alone = auto_of(Fixed(copied), explore=0.0)
    alone.times = times_of(token_after_0=10.0)
    assert len(alone.propose([FakeRow()])[0]) == 1  # type: ignore[list-item]


class Stopping(Drafter):
    """Draws from q, and goes on after token 0 alone: how long its drafts are says what was drawn."""

    name = "stopping"
    q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    drawn = 0

    def __init__(self, weight: int):
        self.weight_bytes = weight

    def propose(self, rows):
        trees = []
        for row in rows:
            tokens: list[int] = []
            while len(tokens) < min(2, row.max_draft) and set(tokens) <= {0}:
                tokens.append(row.random.draft(self.q))
                Stopping.drawn += len(tokens) == 2
            probs = torch.stack([self.q] * len(tokens) + [0 * self.q])
            trees.append(DraftTree.chain(row.last_token, tokens, draft_probs=probs))
        return trees


class Unsure(Acceptance):
    """Takes drawn drafts of one token to be hopeless, and longer ones to be right; copied ones are between them."""

    def values(self, tree, row):
        return np.full(len(tree) - 1, 0.5 if tree.draft_probs is None else 0.01 if len(tree) == 2 else 0.99)


def answered(target: TableTarget, branches: Branches, drafter: Drafter) -> tuple[int, ...]:
    engine = Engine(target, drafter)
    row = engine.add([0, 1], SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(1,)))
    row.random = BranchingRandom(branches)
    while engine.has_work:
        engine.step()
    return tuple(row.new_tokens.tolist())


class Copied(Drafter):
    """Drafts token 0 behind every row."""

    def draft(self, row):
        return DraftTree.chain(row.last_token, [0])


def chosen(target: TableTarget, branches: Branches, parts: str, weight: int, known: bool) -> tuple[int, ...]:
    """Two rounds and more of auto, from the beginning, over c, which copies, and d, which draws.

    weight  bytes that d's model reads; 0: it runs elsewhere. known: whether the times of rounds are."""
    auto = auto_of(*(Copied() if part == "c" else Stopping(weight) for part in parts), explore=0.0)
    auto.times = times_of(round=1.0, token_after_0=0.2) if known else RoundTimes()
    auto.times.is_fixed = True
    auto.bind = lambda target: None  # type: ignore[method-assign]
    for candidate in auto.candidates:
        candidate.acceptance = Unsure()
        candidate.more.mean = 0.2  # a second draft seems to pay, once there are prices
    return answered(target, branches, auto)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("weight", [1, 0])
@pytest.mark.parametrize("parts", ["cd", "dc", "dd"])
def test_the_law_of_samples_is_the_targets(parts: str, weight: int, known: bool) -> None:
    """Every outcome of an engine's rounds, enumerated."""
    target = TableTarget(3, order=None, seed=7, eos=[2])
    alone = outcomes(lambda branches: answered(target, branches, Drafter()))
    Stopping.drawn = 0
    law = outcomes(lambda branches: chosen(target, branches, parts, weight, known))
    assert largest_difference(law, alone) < 1e-9
    assert Stopping.drawn > 0 or (weight and not known)  # a model is asked once it is known what it costs


def test_how_deep_a_model_drafts_is_settled_before_it_is_asked() -> None:
    deep = Fixed(DraftTree.chain(7, list(range(1, 31))), weight=1)
    limits = {}
    for name, node in (("cheap", 0.001), ("dear", 0.5)):
        deep.limits = []
        auto = auto_of(deep, explore=0.0)
        auto.times = times_of(round=1.0, token_after_0=node)
        auto._price = node  # of the round before, as a share of a token
        auto.candidates[0].times.row = 1e-5
        tree = auto.propose([FakeRow()])[0]  # type: ignore[list-item]
        limits[name] = deep.limits[0]
        assert tree.max_depth <= limits[name]
    assert limits["cheap"] > limits["dear"] >= 1


def test_prompt_tokens_of_the_round_make_nodes_dear_and_a_cut_draft_counts_as_long_as_it_was() -> None:
    auto = auto_of(Fixed(DraftTree.chain(7, [1, 2, 3, 4, 5, 6, 7, 8])), explore=0.0)
    auto.times = times_of(round=1.0, token_after_0=0.15, token_after_48=9.0)
    row, sizes = FakeRow(), []
    for prompt in (0, 0, 60):
        auto.begin_round(prompt)
        trees = auto.propose([row])  # type: ignore[list-item]
        sizes.append(trees[0].max_depth)
        auto.observe(shown([row], trees, [Accepted([*range(sizes[-1] + 1)], [5] * (sizes[-1] + 1))]))  # type: ignore[list-item]
    assert 0 < sizes[0] < 8
    assert sizes[2] == 0
    learnt = auto.candidates[0].acceptance
    whole, short = (learnt.values(DraftTree.chain(7, [1] * n), -1)[0] for n in (8, sizes[0]))
    assert whole > short == pytest.approx(FIRST)


def test_a_drafter_that_does_not_pay_is_left_alone_but_tried_again() -> None:
    useless = Fixed(None)
    auto = auto_of(useless, explore=0.0)
    auto.times = times_of(round=0.1)
    auto.candidates[0].times.row = 1e-5
    for _ in range(400):
        auto.propose([FakeRow()])  # type: ignore[list-item]
    asked = len(useless.limits)
    assert asked < 300
    auto.config = AutoConfig(explore=0.05)
    auto._credit = 1.0
    for _ in range(20):
        auto.propose([FakeRow()])  # type: ignore[list-item]
    assert len(useless.limits) > asked


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("auto:sam|", "names nothing between"),
        ("auto:sam|sam", "twice"),
        ("auto:auto", "names auto itself"),
        ("auto:sam|sufix", "suffix"),
        ("auto,explore=2", "0 to 0.5"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(spec: str, says: str) -> None:
    with pytest.raises(MethodError, match=says):
        create(spec)


def test_engines_of_a_target_share_what_rounds_take_and_other_targets_do_not() -> None:
    target, first, second, other = repeating(), create("auto:sam"), create("auto:sam"), create("auto:sam")
    Engine(target, first).generate([[1, 2, 3]], SamplingParams(max_tokens=20))
    second.bind(target)
    other.bind(repeating())
    assert first.times.known
    assert second.times is first.times
    assert not other.times.known


def test_options_of_the_drafters_are_written_with_semicolons() -> None:
    auto = create("auto:sam;draft=7|suffix;shape=tree,explore=0")
    assert [candidate.spec for candidate in auto.candidates] == ["sam,draft=7", "suffix,shape=tree"]
    assert auto.parts[0].config.draft == 7


def test_a_table_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    target = repeating()
    target.weights_fingerprint = "this"
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    other = write_table(tmp_path / "other.json", fingerprint="another", round=1.0)
    lacks = write_table(tmp_path / "lacks.json", round=1.0)
    for draft, says in (
        (f"auto,table={tmp_path / 'none.json'}", "cannot be read"),
        (f"auto,table={broken}", "not a table"),
        (f"auto,table={other}", "other weights"),
        (f"auto:prompt-lookup,table={lacks}", "no times of prompt-lookup"),
    ):
        with pytest.raises(MethodError, match=says):
            create(draft).bind(target)
