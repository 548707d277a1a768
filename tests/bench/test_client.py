"""What is said where the client, or what is counted, cannot be trusted."""

import pytest
from tests.bench.turns import reply

from paceline.bench.endpoint import _client
from paceline.cli.watch import reading
from paceline.net.servers import Drafting
from paceline.replay.advice import Costs


def test_a_client_that_is_busy_says_so():
    assert _client({}) == _client({"a": 0.69, "b": 0.1}) == []
    (note,) = _client({"a": 0.2, "b": 0.91})
    assert note.startswith("A process used 91% of a core")
    assert "--processes" in note


@pytest.mark.parametrize(("drafted", "accepted", "says"), [
    (400, (90, 80, 70, 60), "drafts pay at every position"),
    (200, (90, 40, 30, 20), "drafts pay as a whole; they vary in length (2.0 tokens)"),
    (200, (3, 1, 0, 0), "drafts do not pay as a whole; they vary in length"),
    (2000, (90, 60, 30), "drafts pay as a whole; they have 20.0 tokens, none accepted behind position 3"),
    (6000, (90, 60, 30), "drafts do not pay as a whole; they have 60.0 tokens"),
    (300, (), "drafts do not pay as a whole; they have 3.0 tokens, none accepted behind position 0"),
])
def test_drafts_that_are_no_chains_of_one_length_are_judged_as_a_whole(drafted, accepted, says):
    """Position 4 was offered in a few drafts only: that it was seldom accepted says nothing. A tree has more tokens
    than positions, and all are paid for."""
    new = Drafting("vllm", 1, 500, 100, drafted, sum(accepted), accepted)
    assert reading(new, Costs.assumed(0.05))["advice"].startswith(says)


def test_an_answer_without_token_ids_is_compared_by_its_text():
    """As of a server that returns none, beside our own."""
    ours, alike = reply(1, [5, 6], "a b", 1.0), reply(1, [], "a b", 1.0, count=2)
    other = reply(1, [], "a c", 1.0, count=2)
    assert ours.beside(reply(1, [5, 7], "a b", 1.0)) == ([5, 6], [5, 7])
    assert alike.beside(ours) == ("a b", "a b")
    assert other.beside(ours) == ("a c", "a b")
