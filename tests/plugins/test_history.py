"""Drafters in a host that verifies chains: what they see of rows, and what they are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.draft import registry
from paceline.draft.base import Drafter
from paceline.errors import PacelineError
from paceline.plugins.history import Chains, History, HostRow
from paceline.replay.walk import Recording, tokens_only
from paceline.round import Round
from paceline.tree import DraftTree
from tests.drafters import TOKENS_ONLY

VOCAB = 40
FACTS = Recording(None, (2,), VOCAB)
TEXT = [7, 8, 9, 10, 7, 8, 9, 11] * 4


def follow(history: History, text: list[int], prompt: int) -> int:
    """Verify drafts against a text that is known, as a host does; the number of rounds."""
    row, rounds = history.start(text[:prompt], len(text)), 0
    while len(row) < len(text):
        [chain] = history.draft([row], [5])
        assert len(chain) <= 5
        new = []
        for guess in [*chain.tolist(), -1]:
            new.append(text[len(row) + len(new)])
            if new[-1] != guess or len(row) + len(new) == len(text):
                break
        history.advance(row, new)
        rounds += 1
    assert row.tokens.tolist() == text
    history.drop(row)
    return rounds


def test_what_reads_tokens_alone() -> None:
    assert tuple(tokens_only(FACTS)) == TOKENS_ONLY


@pytest.mark.parametrize("name", [*TOKENS_ONLY, "sam+prompt-lookup"])
def test_every_drafter_that_reads_tokens_can_be_hosted(name: str) -> None:
    history = History(name, FACTS)
    rounds = [follow(history, TEXT, 10) for _ in range(2)]
    if name in ("sam", "suffix", "prompt-lookup", "hierarchy", "blend", "sam+prompt-lookup"):
        assert rounds[0] < len(TEXT) - 10


def test_a_drafter_learns_from_requests_that_ended() -> None:
    history, text = History("sam,past=1000", FACTS), np.random.default_rng(0).permutation(VOCAB).tolist()
    first = follow(history, text, 5)
    assert follow(history, text, 5) < first


# A chain has no place for ngram-pool's window; it drafts the n-grams that it sees.
ALONE = [*TOKENS_ONLY, "ngram-pool"]


@pytest.mark.parametrize("name", [name for name in registry.names() if name not in ALONE])
def test_others_are_refused(name: str) -> None:
    with pytest.raises(PacelineError):
        History(name, FACTS)


class Watching(Drafter):
    """Drafts a small tree, one node of it no token of the model, and writes down what it is told."""

    name = "watching"

    def __init__(self) -> None:
        self.kept: list[tuple[list[int], list[int]]] = []

    def draft(self, row: Any) -> DraftTree:
        return DraftTree.of(row.last_token, [3, 9, 4, VOCAB, 5], [0, 0, 1, 3, 4])

    def observe(self, round: Round) -> None:
        [done] = round.accepted
        self.kept.append((done.path, round.trees[0].tokens.tolist()))


def test_a_drafter_hears_how_far_its_chain_went() -> None:
    history, drafter = History("sam", FACTS), Watching()
    history.drafter, history._watches = Chains(drafter), True
    row = history.start([1, 2], 100)
    assert history.draft([row])[0].tolist() == [3, 4], "cut where the model has no such token"
    history.advance(row, [3, 8])
    history.draft([row])
    history.advance(row, np.array([3, 4, 6]))
    history.advance(row, [6])
    assert drafter.kept == [([0, 1], [2, 3, 4]), ([0, 1, 2], [8, 3, 4]), ([0], [6])]


def test_a_row_grows_and_knows_its_room() -> None:
    row = HostRow(0, [1, 2, 3], 1000)
    row.extend(range(600))
    assert (len(row), row.num_new, row.last_token, row.max_draft) == (603, 600, 599, 399)
    assert row.tokens[:3].tolist() == [1, 2, 3]
