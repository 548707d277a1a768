"""auto: whom it asks, the table that it is given, and what is refused. What pays: tests/test_budget.py."""

import json

import numpy as np
import pytest

from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree
from paceline.draft.base import Allowance, Drafter
from paceline.draft.cost import Prices
from paceline.draft.methods.auto import Auto
from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.engine.budget import Budget
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.logs.transcript import RecordedAnswer
from paceline.replay.walk import ReplayTally, replay, replayable
from tests.asks import asked
from tests.fakes import TableTarget


def write_table(path, fingerprint="", **terms):
    drafting = {"sam": {"step": 0, "row": 5}, "suffix": {"step": 0, "row": 10}}
    forward = {name: terms.get(name, 0.0) for name in Prices.NAMES}
    table = {"model": {"fingerprint": fingerprint}, "forward_ms": forward, "drafting_us": drafting, "acceptance": {}}
    path.write_text(json.dumps(table))
    return path


# Whom it asks --------------------------------------------------------------------------------------------------------


class Told(Allowance):
    """What drafters bring and drafts are worth, as the test says: by name, and by the first drafted token."""

    def __init__(self, gains, values):
        self.gains, self.values = gains, values

    def gain(self, drafter, ask):
        return self.gains[drafter.name]

    def value(self, tree, row):
        return self.values[int(tree.tokens[1])]


class Fixed(Drafter):
    """Drafts one token, or nothing."""

    def __init__(self, name, token, weight=0):
        self.name, self.token, self.weight_bytes, self.asked = name, token, weight, 0

    def draft(self, row, most):
        self.asked += 1
        return DraftTree.chain(row.last_token, [self.token] * (self.token > 0))


class FakeRow:
    id, max_draft, last_token = 0, 30, 7


@pytest.mark.parametrize(
    ("gains", "values", "times", "token"),
    [
        ((0.5, 0.4, 0.3), (0.6, 0.9, 0.9), (1, 0, 0), 1),  # the others bring less on average than the first one has
        ((0.4, 0.5, 0.3), (0.2, 0.7, 0.9), (1, 1, 0), 2),
        ((0.5, 0.4, 0.6), (0.55, 0.9, 0.5), (1, 0, 1), 1),  # the model was asked, and the copy is better
        ((0.5, 0.4, 0.6), (0.55, 0.9, 0.7), (1, 0, 1), 3),
        ((0.9, 0.2, 0.1), (0.0, 0.1, 0.2), (1, 1, 0), 2),  # the first has no draft
    ],
)
def test_a_row_gets_the_draft_that_pays_most(gains, values, times, token):
    parts = [Fixed("a", 1 if values[0] else 0), Fixed("b", 2), Fixed("model", 3, weight=1)]
    auto = Auto()
    auto.parts = tuple(parts)
    auto.budget = Told(dict(zip(("a", "b", "model"), gains, strict=True)), dict(enumerate(values, 1)))
    (tree,) = auto.propose(asked(FakeRow()))
    assert tuple(part.asked for part in parts) == times
    assert tree.tokens[1] == token


def test_without_prices_the_first_that_has_a_draft_is_taken():
    parts = [Fixed("a", 0), Fixed("b", 2), Fixed("c", 3)]
    auto = Auto()
    auto.parts = tuple(parts)
    assert auto.propose(asked(FakeRow()))[0].tokens[1] == 2
    assert [part.asked for part in parts] == [1, 1, 0]


# A table of paceline tune --------------------------------------------------------------------------------------------


REPEATING = [*range(1, 9)] * 3


def repeating():
    """A target that counts to 8 again and again, but for one token in five, which nothing foretells."""

    def logits(prefix):
        out = np.zeros(32)
        out[1 + prefix[-1] % 8] = 6.0
        if sum(prefix) % 5 == 0:
            out[9 + sum(prefix) % 20] = 9.0
        return out

    return TableTarget(32, order=3, logits=logits)


def drafted_per_round(draft, batch):
    engine = Engine(repeating(), draft, max_batch=batch)
    engine.budget = Budget(engine.drafter.price_table)
    out = engine.generate([[i + 9, *REPEATING] for i in range(batch)], SamplingParams(max_tokens=60))
    return sum(d.stats.draft_tokens for d in out) / sum(d.stats.rounds for d in out)


def test_under_load_the_engine_drafts_less(tmp_path):
    table = write_table(tmp_path / "t.json", fixed=2.0, node=0.2)
    sizes = {batch: drafted_per_round(f"auto:sam,table={table}", batch) for batch in (1, 8)}
    assert sizes[1] > sizes[8] > 0
    # A node costs what a round of one row costs: only what is as good as certain could pay.
    dear = write_table(tmp_path / "dear.json", fixed=0.1, node=1.0)
    assert drafted_per_round(f"auto:sam,table={dear}", 8) < 0.3 * sizes[8]


def test_the_same_table_and_seed_make_the_same_choices(tmp_path):
    table = write_table(tmp_path / "t.json", fixed=1.5, node=0.03)

    def run():
        engine = Engine(repeating(), f"auto:sam|suffix,table={table}", max_batch=3)
        engine.budget = Budget(engine.drafter.price_table)
        wish = SamplingParams(max_tokens=60, temperature=0.7, seed=5)
        out = engine.generate([[i + 9, *REPEATING] for i in range(3)], wish)
        return [(done.tokens, done.stats.accepted, done.stats.drafted) for done in out]

    assert run() == run()


def test_its_prices_hold_where_answers_are_replayed(tmp_path):
    text = np.array([9, *REPEATING, *REPEATING])
    drafted = []
    for node in (0.01, 5.0):
        table, tally = write_table(tmp_path / f"{node}.json", fixed=1.0, node=node), ReplayTally()
        drafter = replayable(f"auto:sam|suffix,table={table}", Recording(None, (), 32))
        replay(drafter, RecordedAnswer(text[:12], text[12:]), 0, tally)
        drafted.append(tally.draft_tokens)
    assert drafted[0] > drafted[1]


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("auto:sam|", "names nothing between"),
        ("auto:sam|sam", "twice"),
        ("auto:auto", "names auto itself"),
        ("auto:sam|sufix", "suffix"),
        ("auto,explore=0.1", "no option"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(spec, says):
    with pytest.raises(MethodError, match=says):
        create(spec)


def test_options_of_the_drafters_are_written_with_semicolons():
    auto = create("auto:sam;draft=7|suffix;shape=tree")
    assert auto.specs == ["sam,draft=7", "suffix,shape=tree"]
    assert auto.parts[0].config.draft == 7


def test_a_table_that_does_not_fit_is_refused(tmp_path):
    target = repeating()
    target.weights_fingerprint = "this"
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    other = write_table(tmp_path / "other.json", fingerprint="another", fixed=1.0)
    lacks = write_table(tmp_path / "lacks.json", fixed=1.0)
    for draft, says in (
        (f"auto,table={tmp_path / 'none.json'}", "cannot be read"),
        (f"auto,table={broken}", "not a table"),
        (f"auto,table={other}", "other weights"),
        (f"auto:prompt-lookup,table={lacks}", "no times of prompt-lookup"),
    ):
        with pytest.raises(MethodError, match=says):
            create(draft).bind(target)
