"""From acceptance to speed-up."""

import pytest

from paceline.draft.cost import forward_times
from paceline.errors import PacelineError
from paceline.replay.report import Cost, predict, read_cost
from paceline.replay.walk import ReplayTally


def tally(sizes, new_tokens, seconds=0.0):
    made = ReplayTally(new_tokens=new_tokens, rounds=sum(sizes.values()), seconds=seconds)
    for nodes, rounds in sizes.items():
        made.sizes[nodes] = rounds
    return made


def test_free_nodes_gain_what_is_accepted():
    some = tally({1: 10, 40: 10}, 60)
    assert predict(some, read_cost("flat")) == some.mean_accepted_tokens == 3
    assert predict(tally({}, 0), read_cost("flat")) == 1


def test_plain_decoding_gains_nothing():
    for cost in (read_cost("flat"), read_cost("linear:0.3"), Cost(forward_times({1: 1, 8: 2}))):
        assert predict(tally({1: 50}, 50), cost) == pytest.approx(1)


def test_nodes_are_paid_for_round_by_round():
    some = tally({1: 2, 11: 2}, 10)
    assert predict(some, read_cost("linear:0.1")) == pytest.approx(10 / (2 + 2 * 2))
    assert predict(some, read_cost("linear:0")) == 2.5


def test_the_drafters_time_counts_in_forwards():
    some = tally({5: 10}, 30, seconds=0.02)
    assert predict(some, read_cost("flat", forward_ms=10)) == pytest.approx(30 / (10 + 2))


def test_a_table_is_read_between_and_behind_its_entries(tmp_path):
    file = tmp_path / "cost.json"
    file.write_text('{"64": 40, "1": 20, "16": 25}')
    cost = read_cost(str(file))
    assert cost.forwards[[1, 16, 40, 64, 112]] == pytest.approx([1, 1.25, 1.625, 2, 2.75])


def test_more_costly_nodes_never_gain_more():
    some = tally({1: 3, 5: 4, 20: 2}, 30)
    gains = [predict(some, read_cost(f"linear:{x}")) for x in (0, 0.01, 0.1, 1)]
    assert gains == sorted(gains, reverse=True)


def test_costs_that_cannot_be_read(tmp_path):
    with pytest.raises(PacelineError, match="linear:X wants a number, 0 or more"):
        read_cost("linear:much")
    with pytest.raises(PacelineError, match="linear:X wants a number, 0 or more"):
        read_cost("linear:-1")
    with pytest.raises(PacelineError, match="no such file; give flat, linear:X or a JSON file"):
        read_cost("falt")
    file = tmp_path / "cost.json"
    for broken in ("[1, 2]", "{", '{"one": 1}', '{"1": null}'):
        file.write_text(broken)
        with pytest.raises(PacelineError, match="is not a table of verification costs"):
            read_cost(str(file))
    for wrong in ("{}", '{"2": 3}', '{"1": 0}'):
        file.write_text(wrong)
        with pytest.raises(PacelineError, match='must have an entry for "1" node'):
            read_cost(str(file))
