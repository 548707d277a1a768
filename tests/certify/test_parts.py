"""A certificate is what an oracle's parts have learnt, one after the other, each in its share of the budget."""

from dataclasses import replace
from math import inf
from time import perf_counter

import pytest

from paceline.certify.asking import Control
from paceline.certify.certificate import certify
from paceline.certify.exact import Exact
from paceline.certify.options import Scope
from paceline.certify.oracles import Reported
from paceline.certify.parts import Oracle, Part
from paceline.certify.verdict import Finding, Greedy
from tests.certify.tables import TableServer

FOUND = Finding("sampled", "planted")


class Told(Oracle):
    """Learns what its second part is to learn, after its first one."""

    plainly, control, chats, shift, sampled = None, None, (), None, 0.5
    cases = requests = reader = Oracle.reports  # It has no sampled answers.

    def __init__(self):
        self.asked = []

    def parts(self):
        return [Part("one", 0.25, self.one), Part("two", 0.5, self.two, ends=True), Part("three", 1.0, self.three)]

    def one(self, run, learnt, until):
        self.asked.append((until, learnt.left_out))
        return replace(learnt, left_out=["a part"])

    def two(self, run, learnt, until):
        self.asked.append((until, learnt.left_out))
        return replace(learnt, left_out=[*learnt.left_out, "another"], found=[FOUND])

    three = one

    def judged(self, run, learnt, sampled):
        about = {"greedy": Greedy(1, 1), "engine": "", "draft": None, "ran_on": {}, "acceptance": {"collapsed": False}}
        return about | {"not_tested": [], "also": [one.what for one in learnt.found]}


@pytest.mark.parametrize(("scope", "shares"), [
    ({"requests": None}, [0.25, 0.5, 1.0]), ({"requests": 9}, [inf, 0.5, inf]), ({"requests": 0}, [inf, 1.0, inf]),
])  # fmt: skip
def test_each_part_ends_by_its_share_and_goes_on_from_what_is_known(scope, shares):
    oracle, began = Told(), perf_counter()
    found = certify(TableServer(), oracle, Scope(budget="10m", **scope))
    assert [until if until == inf else round((until - began) / 600, 2) for until, _ in oracle.asked] == shares
    assert [known for _, known in oracle.asked] == [(), ["a part"], ["a part", "another"]]
    assert (found["verdict"], found["not_tested"]) == ("not lossless", ["a part"])


@pytest.mark.parametrize(("plainly", "names"), [
    (None, ["greedy", "stops", "first", "long"]),
    (Control(TableServer()), ["greedy", "stops", "first", "long", "scenarios"]),
])  # fmt: skip
def test_scenarios_are_a_part_where_there_is_something_to_compare_with(plainly, names, monkeypatch):
    monkeypatch.setattr(Exact, "__post_init__", lambda self: None)
    parts = Exact(None, None, None, (), (), plainly=plainly).parts()
    assert [part.name for part in parts] == names
    assert next(part.name for part in Reported(Control(TableServer()), ()).parts()) == "scenarios"
