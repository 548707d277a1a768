"""How often drafts stand, against the same drafter replayed: what is said of it, and what is not."""

import json

import numpy as np
import pytest

from paceline.certify.acceptance import LEAST_ANSWERS, acceptance
from paceline.certify.page import findings
from paceline.cli import main
from paceline.engine import engine
from paceline.engine.budget import PricedRound
from tests import models

REFERENCE = [(60, 20)] * 40
"""Tokens and rounds of answers of which two drafted tokens stand in every round."""


def rounds(accepted, answers, spread=0.0):
    """Of answers in whose rounds so many drafted tokens stand, more or less."""
    rng = np.random.default_rng(0)
    return [(60, round(60 / (1 + max(0.0, accepted + spread * one)))) for one in rng.normal(size=answers)]


@pytest.mark.parametrize(("accepted", "answers", "spread", "collapsed"), [
    (0.1, LEAST_ANSWERS, 0.0, True), (0.1, 40, 0.1, True), (1.2, 40, 0.3, True),
    (0.1, LEAST_ANSWERS - 1, 0.0, False), (0.0, 1, 0.0, False),  # too few to say
    (1.3, LEAST_ANSWERS, 1.0, False),  # below 0.8, and it might be chance
    (2.0, 40, 0.3, False), (1.8, 40, 0.1, False),
])  # fmt: skip
def test_acceptance_has_collapsed_where_all_of_the_interval_says_so(accepted, answers, spread, collapsed):
    found = acceptance(rounds(accepted, answers, spread), REFERENCE[:answers])
    assert found["collapsed"] == collapsed
    assert (found["interval"] is None) == (answers < LEAST_ANSWERS)


def test_the_interval_holds_the_share_in_ninety_nine_of_a_hundred():
    rng, inside = np.random.default_rng(1), 0
    for _ in range(400):
        engine = [(60, int(rng.integers(20, 50))) for _ in range(LEAST_ANSWERS)]
        low, high = acceptance(engine, REFERENCE[:LEAST_ANSWERS])["interval"]
        inside += low <= (60 / np.arange(20, 50).mean() - 1) / 2 <= high
    assert inside / 400 > 0.97


@pytest.mark.parametrize(("mine", "reference"), [((), REFERENCE), (REFERENCE, ()), (REFERENCE, [(20, 20)] * 40)])
def test_nothing_is_said_where_there_is_nothing_to_compare(mine, reference):
    found = acceptance(mine, reference)
    assert (found["share"], found["interval"], found["collapsed"]) == (None, None, False)


class Cutting(PricedRound):
    def cut(self, trees):
        return [tree.keeping(np.array([0])) for tree in trees]


class Busy(engine.Budget):
    """The budget of a machine on which no draft ever pays."""

    def open(self, rows):
        return Cutting(self, rows)


def test_an_engine_drafts_as_much_as_its_reference_on_any_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engine, "Budget", Busy)
    tiny = models.make_repetitive(tmp_path, vocab_size=288, max_position_embeddings=1024)
    how = ["--requests", "0", "--max-tokens", "32", "--budget", "0", "--json"]
    assert main(["certify", str(tiny), "-d", "sam", *how]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["acceptance"]["tokens_a_round"] == found["acceptance"]["reference"] > 1.2
    assert found["acceptance"]["interval"] == [1.0, 1.0]


def test_a_collapse_is_said_with_its_interval(tmp_path, capsys, monkeypatch):
    """As with a flag by which drafts are thrown away."""
    monkeypatch.setattr("paceline.certify.command.PACED", True)
    monkeypatch.setattr(engine, "Budget", Busy)
    tiny = models.make_repetitive(tmp_path, vocab_size=288, max_position_embeddings=1024)
    assert main(["certify", str(tiny), "-d", "sam", "--requests", "0", "-n", "32", "--budget", "0", "--json"]) == 0
    said = " ".join(findings(json.loads(capsys.readouterr().out)))
    assert "Acceptance has collapsed: of the drafted tokens that should stand, 0 to 0 % do" in said
