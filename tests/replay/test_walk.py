"""One answer against one drafter: what the engine would have accepted, counted."""

from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.accept import accept
from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree
from paceline.draft import registry
from paceline.draft.base import Drafter
from paceline.draft.cost import Prices, Table
from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.logs.transcript import RecordedAnswer
from paceline.replay import walk
from paceline.replay.walk import ReplayTally, replay, replayable, tokens_only
from paceline.target.base import Needs
from tests import drafters
from tests.fakes import TableTarget

EOS = 7


def turn(prompt, answer):
    return RecordedAnswer(np.array(prompt, np.int64), np.array(answer, np.int64))


class Fixed(Drafter):
    """Hangs the same tree on whatever the last token is, and keeps what it is told."""

    name = "fixed"

    def __init__(self, tokens, parent, probe=None):
        self.tokens, self.parent = list(tokens), list(parent)
        self.probe = None if probe is None else np.array([False, *probe])
        self.told = []

    def propose(self, asks):
        rows = [row for row, _ in asks]
        return [DraftTree.of(row.last_token, self.tokens, self.parent, probe=self.probe) for row in rows]

    def observe(self, round):
        self.told += round.accepted
        (row,), (accepted,) = round.rows, round.accepted
        assert row.tokens[-len(accepted.tokens) :].tolist() == accepted.tokens


def of(drafter, one):
    tally = ReplayTally()
    replay(drafter, one, 0, tally)
    return tally


def test_a_chain_is_kept_up_to_its_first_wrong_token():
    tally = of(Fixed([1, 2, 9], [0, 1, 2]), turn([5], [1, 2, 3, 1, 2, 3, EOS]))
    assert ((tally.rounds, tally.new_tokens, tally.answers), tally.accepted[:3].tolist()) == ((3, 7, 1), [1, 0, 2])
    assert (tally.mean_accepted_tokens, tally.verified_per_round, tally.verified_per_token) == (7 / 3, 4, 12 / 7)
    assert (tally.accepted_by_depth(), tally.sizes[4]) == ([2 / 3, 2 / 3, 0], 3)


def test_a_tree_is_walked_by_tokens_and_the_drafter_is_told_the_path():
    drafter = Fixed([9, 1, 2, 2, 3], [0, 0, 1, 2, 4])
    tally = of(drafter, turn([5], [1, 2, 3, 4, EOS]))
    assert [told.path for told in drafter.told] == [[0, 2, 4, 5], [0]]
    assert [told.tokens for told in drafter.told] == [[1, 2, 3, 4], [EOS]]
    assert (tally.accepted[[0, 3]].tolist(), tally.depths[3]) == ([1, 1], 2)


def test_probes_are_verified_and_never_accepted():
    tally = of(Fixed([1, 1], [0, 0], probe=[True, False]), turn([5], [1, 1, EOS]))
    assert (tally.accepted[:2].tolist(), tally.draft_tokens) == ([1, 1], 4)
    tally = of(Fixed([1], [0], probe=[True]), turn([5], [1, 1, EOS]))
    assert tally.rounds == 3


def test_an_accepted_end_token_is_not_followed_by_another():
    tally = of(Fixed([1, EOS, 4], [0, 1, 2]), turn([5], [1, EOS]))
    assert (tally.rounds, tally.new_tokens) == (1, 2)


def test_a_root_that_is_not_the_last_token_is_an_error():
    class Wrong(Drafter):
        name = "wrong"

        def propose(self, asks):
            return [DraftTree.root(99)]

    with pytest.raises(ValueError, match="wrong proposed a tree whose root"):
        of(Wrong(), turn([5], [1, EOS]))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_accepted_is_what_the_acceptance_rule_accepts(data):
    """Against `accept` with logits that say the recorded answer."""
    answer = [*data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=8)), EOS]
    size = data.draw(st.integers(0, 12))
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    parent = [data.draw(st.integers(0, i)) for i in range(size)]
    drafter = Fixed(tokens, parent)
    tally = of(drafter, turn([5], answer))

    row, expected = Row(1, [5], SamplingParams(max_tokens=99), max_context=999, eos_token_ids=(EOS,)), []
    while row.finish_reason is None:
        tree = DraftTree.of(row.last_token, tokens, parent)
        logits = torch.zeros(len(tree), EOS + 1)
        for node, depth in enumerate(tree.depth.tolist()):
            logits[node, ([*answer, 6] + [6] * 12)[row.num_new + depth]] = 1.0
        (done,) = accept([row], [tree], [logits])
        taken = row.extend(done.tokens)
        expected.append(done.tokens[:taken])
    assert [told.tokens[: len(tokens)] for told, tokens in zip(drafter.told, expected, strict=True)] == expected
    assert tally.rounds == len(expected)


@pytest.mark.parametrize("spec", [name for name in drafters.TOKENS_ONLY if name != "auto"])
def test_the_engine_accepts_what_a_replay_of_its_answer_accepts(spec):
    """The engine runs a prompt in a round of its own, so its first token counts as prompt here. What `auto` drafts
    depends on what rounds cost."""
    target = TableTarget(vocab_size=EOS + 1, order=2, seed=3, eos=(EOS,))
    engine = Engine(target, spec)
    prompts = [[1, 2, 3, a, b] for a in range(4) for b in range(4)]
    answers = engine.generate(prompts, SamplingParams(max_tokens=60))
    drafter = replayable(spec, Recording(None, (EOS,), EOS + 1))
    compared = 0
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if answer.finish_reason != "stop" or len(answer.tokens) < 2:
            continue
        tally = ReplayTally()
        replay(drafter, turn([*prompt, answer.tokens[0]], answer.tokens[1:]), i, tally)
        kept = answer.stats.accepted
        assert tally.accepted[: len(kept)].tolist() == [kept[0] - 1, *kept[1:]]
        assert (tally.draft_tokens, tally.rounds) == (answer.stats.draft_tokens, answer.rounds - 1)
        compared += 1
    assert compared > 3


def test_a_drafter_is_started_and_dropped_as_by_an_engine():
    events = []

    class Watching(Drafter):
        def start(self, row):
            events.append(("start", row.tokens.tolist()))

        def drop(self, row):
            events.append(("drop", (row.tokens.tolist(), row.finish_reason)))

    of(Watching(), turn([5], [1, EOS]))
    assert events == [("start", [5]), ("drop", ([5, 1, EOS], "stop"))]


class Wanting(Drafter):
    """Asks for logits."""

    name = "wanting"
    lossless = paper = "-"
    needs = Needs(top_k=3, hidden_layers=(1,))


class Reading(Drafter):
    """Reads logits that it has not asked for."""

    name = "reading"
    lossless = paper = "-"

    def observe(self, round):
        round.logits(0).sum()


def test_drafters_that_need_a_model_are_refused(monkeypatch):
    here = [EntryPoint(kind.name, f"{__name__}:{kind.__name__}", registry.GROUP) for kind in (Wanting, Reading)]
    monkeypatch.setattr(registry, "added", lambda: here)
    recording = Recording(None, (EOS,), 8)
    with pytest.raises(MethodError, match="wanting asks the target for hidden states and its best logits") as raised:
        replayable("sam+wanting", recording)
    assert "these can be replayed: none, prompt-lookup, sam" in str(raised.value)
    assert "reading" not in tokens_only(recording)
    with pytest.raises(MethodError, match="a recording holds tokens"):
        of(create("reading"), turn([5], [1, EOS]))


def test_any_tree_at_all():
    """Random trees, deeper than anything sensible, of every shape."""
    drafter = drafters.Random(seed=1, deep=30)
    drafter.vocab_size = 3
    tally = of(drafter, turn([1, 2], [*np.random.default_rng(0).integers(0, 3, 300).tolist(), EOS]))
    assert tally.new_tokens == 301
    assert tally.accepted.sum() == tally.depths.sum() == tally.sizes.sum() == tally.rounds
    assert (tally.accepted * np.arange(len(tally.accepted))).sum() + tally.rounds >= tally.new_tokens
    assert (tally.sizes * np.arange(len(tally.sizes))).sum() == tally.draft_tokens + tally.rounds


# What a drafter sees of a recorded row --------------------------------------------------------------------------------


class Wrong(Drafter):
    """Drafts what is never right; at known prices, if it has any."""

    name, eos_token_ids = "wrong", (7,)

    def __init__(self, prices=None):
        self.price_table, self.ends = prices, set[frozenset[int]]()

    def draft(self, row, most):
        self.ends.add(row.ends)
        return DraftTree.chain(row.last_token, [9] * min(8, most))


def test_a_recorded_row_ends_where_its_model_ends_answers():
    drafter = Wrong()
    replay(drafter, RecordedAnswer(np.arange(3), np.arange(5)), 0, ReplayTally())
    assert drafter.ends == {frozenset({7})}


def test_a_replay_at_known_prices_learns_what_stands_and_forgets_the_row():
    drafter, tally = Wrong(Table(Prices({"fixed": 1.0, "node": 0.05}), {})), ReplayTally()
    replay(drafter, RecordedAnswer(np.zeros(3, np.int64), np.zeros(300, np.int64)), 0, tally)
    assert 0 < tally.draft_tokens < 300 < tally.rounds * 8
    (known,) = walk._budget(drafter).drafts.values()
    assert not known.begun
