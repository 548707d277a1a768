"""What an answer says of itself, with drafts and without."""

from time import perf_counter

import pytest

from paceline.certify.asking import Control
from paceline.certify.certificate import certify
from paceline.certify.options import Scope
from paceline.certify.oracles import Reported
from paceline.certify.page import detectable, verdict
from paceline.certify.scenarios import SCENARIOS, Play, alike, counted, user
from paceline.certify.verdict import _verdict
from paceline.net.completion import Completion
from tests.certify.test_slow_servers import Slow

NAME = "counts, limits and reasons"


def said(count, reason="length", usage=None, text="", **more):
    places = [{"token": "a", "logprob": -0.1}] * count
    told = {"completion_tokens": count if usage is None else usage}
    return Completion(text or "a " * count, finish_reason=reason, usage=told, **{"logprobs": places, **more})


@pytest.mark.parametrize(("answer", "fields", "says"), [
    (said(8), {}, ""),
    (said(5, "stop"), {}, ""),
    (said(5, "stop", usage=6), {}, ""),  # the end token is counted and not listed
    (said(8, usage=7), {}, "usage counts 7 tokens, and 8 are listed"),
    (said(9), {}, "it has 9 tokens; 8 were asked for"),
    (said(7), {}, "finish_reason is length after 7 of 8 tokens"),
    (said(8, ""), {}, "finish_reason is ''"),
    (said(3, "stop"), {"min_tokens": 5}, "it ends after 3 tokens; at least 5"),
    (said(8, text="a b<|im_end|>"), {}, "a special token is in the text"),
    (said(8, logprobs=[{"token": "a", "logprob": 0.0}] * 8), {}, "log-probability 0"),
])
def test_what_an_answer_says_of_itself(answer, fields, says):
    why = counted(answer, {"max_tokens": 8, **fields})
    assert why.startswith(says) if says == "" else says in why
    assert bool(why) == bool(says)


def test_sampled_answers_without_a_seed_are_not_alike():
    one, hot = said(8, text="one two three four"), {"temperature": 1.0}
    assert [alike(one, hot, [one] * before) for before in (0, 1)] == ["", ""]
    assert "3 requests without a seed" in alike(one, hot, [one, one])
    assert alike(one, hot | {"seed": 1}, [one, one]) == ""
    assert "its 3 sampled answers are all the same" in alike(said(8, text=one.text, others=[one, one]), hot)


class Off(Slow):
    """Writes a token more than was asked for."""

    async def complete(self, body):
        one = await super().complete({**body, "max_tokens": body["max_tokens"] + 1})
        return Completion(one.text, finish_reason="length", usage=one.usage, logprobs=one.logprobs)


def played(server, control):
    play = Play(server, Control(control), [user("Go on.")], 16, perf_counter() + 60)
    play.run([one for one in SCENARIOS if one.name == NAME])
    return play


def test_only_what_the_control_does_not_do_speaks_against_drafts():
    """Slow says the same to everybody, sampled or not."""
    right = played(Slow(1e6), Slow(1e6))
    assert right.rows[0]["verdict"] == "passed"
    assert "log-probability 0" in right.ignored[NAME]
    assert "with drafts and without" in right.not_tested()[0]
    assert played(Off(1e6), Slow(1e6)).rows[0]["verdict"] == "wrong"
    both = played(Off(1e6), Off(1e6))
    assert both.rows[0]["verdict"] == "passed"
    assert "were asked for" in both.ignored[NAME]


class IgnoresStop(Slow):
    async def complete(self, body):
        return await super().complete({key: value for key, value in body.items() if key != "stop"})


@pytest.mark.parametrize(("control", "verdict"), [(Slow, "wrong"), (IgnoresStop, "passed")])
def test_a_stop_string_that_both_ignore_is_no_fault_of_drafts(control, verdict):
    play = Play(IgnoresStop(1e6), Control(control(1e6)), [user("Go on.")], 16, perf_counter() + 60)
    play.run([one for one in SCENARIOS if one.name.startswith("stop strings")])
    assert play.rows[0]["verdict"] == verdict


@pytest.mark.parametrize("most", [0.997, 1.0])
def test_too_few_samples_are_not_called_a_shift_of_everything(most):
    scope = Scope(requests=20)
    facts = {"sampled": {"lossless": True, "requests": 20}, "greedy": {"lossless": True, "why": ""}}
    assert _verdict(facts, {"detectable": 0.3, "hidden": 0.0}, scope, "sam", "")[1].startswith("shifts of sampled")
    why = _verdict(facts, {"detectable": most, "hidden": 0.0}, scope, "sam", "")[1]
    assert why.startswith("too few answers were sampled to find any shift")
    power = dict.fromkeys(("greedy_rate", "shift", "power", "level"), 0.1) | {"detectable": most, "hidden": 0}
    lines = detectable({"sampled": {"cases": [1]}, "power": power, "not_tested": []})
    assert "Sampling: so few requests find no shift." in lines


class Another(Slow):
    """Another model: it begins with another word."""

    async def complete(self, body):
        one = await super().complete({**body, "max_tokens": body["max_tokens"] + 1})
        return Completion(
            one.text[3:], finish_reason="length", usage={"completion_tokens": body["max_tokens"]},
            logprobs=one.logprobs[1:],
        )  # fmt: skip


def test_a_difference_before_any_draft_is_two_models():
    prompts, plan = [user("Go on."), user("And on.")], Scope(requests=0, budget="30s", max_tokens=8)
    found = certify(Another(1e6), Reported(Control(Slow(1e6)), prompts), plan)
    assert (found["verdict"], found["lossless"], found["reports"]) == ("two models", False, [])
    assert "2 of 2 answers differ in their first token" in verdict({**found, "target": "m"})


class Surer(Slow):
    """The same words, with the log-probability of somebody who is less sure of the first one."""

    async def complete(self, body):
        one = await super().complete(body)
        for first in one.logprobs[:1]:
            first["logprob"] = -2.0
        return one


def test_another_log_probability_of_the_same_first_token_is_no_second_model():
    prompts, plan = [user("Go on."), user("And on.")], Scope(requests=0, budget="30s", max_tokens=8)
    assert certify(Surer(1e6), Reported(Control(Slow(1e6)), prompts), plan)["verdict"] == "not lossless"
