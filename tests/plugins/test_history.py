"""Drafters in a host that verifies chains: what they see of rows, and what they are told."""

import numpy as np
import pytest

from paceline.core.tree import DraftTree
from paceline.draft import registry
from paceline.draft.base import Drafter
from paceline.draft.recording import Recording
from paceline.errors import PacelineError
from paceline.plugins.history import History, HostRow, OneAtATime
from paceline.replay.walk import tokens_only
from tests.drafters import TOKENS_ONLY

VOCAB = 40
FACTS = Recording(None, (2,), VOCAB)
TEXT = [7, 8, 9, 10, 7, 8, 9, 11] * 4


def follow(history, text, prompt, most=5):
    """Verify drafts against a text that is known, as a host does; the number of rounds."""
    row, rounds = history.start(text[:prompt], len(text)), 0
    while len(row) < len(text):
        [chain] = history.draft([row])
        assert len(chain) <= most
        new = []
        for guess in [*chain.tolist(), -1]:
            new.append(text[len(row) + len(new)])
            if new[-1] != guess or len(row) + len(new) == len(text):
                break
        history.advance([row], [new])
        rounds += 1
    assert row.tokens.tolist() == text
    history.drop(row)
    return rounds


def test_what_reads_tokens_alone():
    assert tuple(tokens_only(FACTS)) == TOKENS_ONLY


@pytest.mark.parametrize("name", [*TOKENS_ONLY, "sam+prompt-lookup"])
@pytest.mark.parametrize("paced", [True, False])
def test_every_drafter_that_reads_tokens_can_be_hosted(name, paced):
    history = History(name, FACTS, 5, paced)
    rounds = [follow(history, TEXT, 10) for _ in range(2)]
    if name in ("sam", "suffix", "prompt-lookup", "hierarchy", "sam+prompt-lookup"):
        assert rounds[0] < len(TEXT) - 10


def test_a_drafter_learns_from_requests_that_ended():
    history, text = History("sam,past=1000", FACTS, paced=False), np.random.default_rng(0).permutation(VOCAB).tolist()
    first = follow(history, text, 5, 40)
    assert follow(history, text, 5, 40) < first


def test_a_drafter_learns_nothing_from_requests_that_were_given_up():
    history, text = History("past-answer", FACTS, paced=False), list(range(20))
    for complete in (False, True):
        row = history.start(text[:5], 40)
        assert not len(history.draft([row])[0])
        history.advance([row], [text[5:]])
        history.drop(row, complete)
    assert history.draft([history.start(text[:5], 40)])[0].tolist() == text[5:]


# A chain has no place for ngram-pool's window; it drafts the n-grams that it sees.
ALONE = [*TOKENS_ONLY, "ngram-pool"]


@pytest.mark.parametrize("name", [name for name in registry.names() if name not in ALONE])
def test_others_are_refused(name):
    with pytest.raises(PacelineError):
        History(name, FACTS)


class Watching(Drafter):
    """Drafts a small tree, one node of it no token of the model, and writes down what it is told."""

    name = "watching"

    def __init__(self):
        self.kept = []

    def draft(self, row, most):
        return DraftTree.of(row.last_token, [3, 9, 4, VOCAB, 5], [0, 0, 1, 3, 4])

    def observe(self, round):
        [done] = round.accepted
        self.kept.append((done.path, round.trees[0].tokens.tolist()))


def test_a_drafter_hears_how_far_its_chain_went():
    drafter = Watching()
    history = History(drafter, FACTS, paced=False)
    row = history.start([1, 2], 100)
    assert history.draft([row])[0].tolist() == [3, 4], "cut where the model has no such token"
    history.advance([row], [[3, 8]])
    history.draft([row])
    history.advance([row], [np.array([3, 4, 6])])
    history.advance([row], [[6]])
    history.draft([row])
    history.advance([row], [[3]])  # the host's own token, which is the drafted one by chance
    assert drafter.kept == [([0, 1], [2, 3, 4]), ([0, 1, 2], [8, 3, 4]), ([0], [6]), ([0], [6, 3, 4])]


def test_of_rows_that_were_dropped_the_budget_keeps_nothing():
    drafter = Watching()
    history = History(drafter, FACTS)
    row = history.start([1, 2], 100)
    history.draft([row])
    history.drop(row)
    assert not any(known.begun for known in history.budget.drafts.values())


def test_one_request_at_a_time_is_followed_by_its_text():
    drafter, dropped = Watching(), list[int]()
    drafter.drop = lambda row: dropped.append(row.id)
    one = OneAtATime(History(drafter, FACTS, paced=False), 50)
    assert one.draft(np.array([1, 2])).tolist() == [3, 4]
    one.draft(np.array([1, 2, 3, 7]))
    assert (drafter.kept, dropped) == ([([0, 1], [2, 3, 4])], [])
    one.draft(np.array([1, 2, 3]))  # shorter: another request
    assert dropped == [0]
    one.draft(np.array([1, 9, 3, 7, 5]))  # longer, with another beginning: another one again
    assert dropped == [0, 1]
    one.close()
    assert dropped == [0, 1, 2]


def test_a_row_grows_and_knows_its_room():
    row = HostRow(0, [1, 2, 3], 1000)
    row.extend(range(600))
    assert (len(row), row.num_new, row.last_token, row.max_draft) == (603, 600, 599, 399)
    assert row.tokens[:3].tolist() == [1, 2, 3]


class Slow:
    """A clock that goes on when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("paceline.plugins.history.perf_counter", lambda: self.now)


def drafted(history, clock, node_ms, beside_ms=0.0):
    """Tokens drafted a row and round in batches of 4 over texts that repeat themselves half of the time, where a round
    takes 10 ms and `node_ms` for every token.

    beside_ms  of prompts that run beside every second round; the host says so."""
    rng, sizes = np.random.default_rng(0), []
    texts = [np.where(rng.random(400) < 0.5, np.arange(400) % 5, rng.integers(0, VOCAB, 400)) for _ in range(4)]
    rows = [history.start(text[:8], 400) for text in texts]
    for _ in range(200):
        chains = history.draft(rows)
        gained = []
        for row, text, chain in zip(rows, texts, chains, strict=True):
            wrong = np.flatnonzero(chain != text[len(row) : len(row) + len(chain)])
            kept = int(wrong[0]) if len(wrong) else len(chain)
            gained.append(text[len(row) : len(row) + kept + 1])
        sizes.append(sum(map(len, chains)) / 4)
        clock.now += 1e-3 * (10 + node_ms * (4 + 4 * sizes[-1]))
        if beside_ms and len(sizes) % 2:
            clock.now += 1e-3 * beside_ms
            history.disturbed()
        history.advance(rows, gained)
        if max(map(len, rows)) > 350:
            break
    for row in rows:
        history.drop(row)
    return float(np.mean(sizes[20:]))


def test_drafts_are_as_long_as_it_pays(monkeypatch):
    clock = Slow(monkeypatch)
    whole = drafted(History("sam", FACTS, 16, paced=False), clock, 0.0)
    assert drafted(History("sam", FACTS, 16), clock, 0.001) > 0.6 * whole
    assert drafted(History("sam", FACTS, 16), clock, 5.0) < 0.2 * whole


def test_rounds_with_prompts_beside_them_do_not_count(monkeypatch):
    clock, history = Slow(monkeypatch), History("sam", FACTS, 16)
    drafted(history, clock, 0.1, beside_ms=500)
    assert history.budget.prices.seconds(4, 4, 1000) == pytest.approx(0.0108, rel=0.1)
