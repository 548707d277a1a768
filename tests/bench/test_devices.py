"""Recorded rounds, as predictions for other machines take them."""

from dataclasses import replace

from paceline.bench.metrics import recorded_rounds
from paceline.bench.record import Answer
from paceline.cost.model import DEVICES, Machine, Size, predict
from paceline.workbench.contestant import Reply


def answer(rounds: int, tokens: int, drafted: int, drafting: float = 0.0) -> Answer:
    """After its first token an answer of so many rounds, each with `tokens` tokens after `drafted` drafted ones."""
    lengths, nodes = [1] + [tokens] * rounds, [0] + [drafted] * rounds
    reply = Reply(9, [1] * sum(lengths), "", 1.0, lengths, None, nodes, nodes, parts={"draft": drafting})
    return Answer("x", 0, "q", "qa", "qa", 0, turns=[reply])


def test_rounds_of_all_answers_after_their_first_tokens() -> None:
    rounds = recorded_rounds([answer(50, 2, 10, 0.1), answer(100, 1, 0)])
    assert rounds is not None
    assert (rounds.tokens, rounds.sizes, rounds.draft_seconds) == (200, {11: 50, 1: 100}, 0.1)
    size = Size(7e9, layers=32, width=4096, cache_bytes=131072)
    assert 1 < predict(rounds, size, Machine(DEVICES["H100-SXM"])).speedup < 200 / 150


def test_rounds_that_are_not_known() -> None:
    silent, failed = answer(2, 2, 3), replace(answer(2, 2, 3), failed="out of memory")
    silent.turns[0].nodes = None
    assert recorded_rounds([answer(2, 2, 3), silent]) is None
    assert recorded_rounds([failed]) is None
    assert recorded_rounds([]) is None
