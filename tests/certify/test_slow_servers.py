"""A server that writes a few tokens a second is tested all the same, with shorter answers."""

import asyncio
from time import perf_counter

import pytest

from paceline.certify.asking import Control
from paceline.certify.scenarios import SCENARIOS, SHORTEST, SPENT, Play, user
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import Endpoint

KNOWN = {"messages", "max_tokens", "temperature", "seed", "logprobs", "top_logprobs", "stop", "stream"}
TEXT = [f" w{n}" for n in range(400)]


class Slow(Endpoint):
    """Says the same words to everybody, so many a second."""

    def __init__(self, rate):
        super().__init__()
        self.name, self.rate = "slow", rate

    async def complete(self, body):
        if body.keys() - KNOWN:
            raise CompletionError("unknown field")
        said = TEXT[: body["max_tokens"]]
        if stop := (body.get("stop") or [None])[0]:
            text = "".join(said).partition(stop)[0]
            said = [word for i, word in enumerate(said) if len("".join(said[:i])) < len(text)]
        await asyncio.sleep(len(said) / self.rate)
        top = [{"token": word, "logprob": 0.0, "top_logprobs": [{"token": word, "logprob": 0.0}]} for word in said]
        reason = "length" if len(said) == body["max_tokens"] else "stop"
        return Completion("".join(said), finish_reason=reason, usage={"completion_tokens": len(said)}, logprobs=top)


class Takes(Slow):
    """Takes every field, and does nothing about those that it does not know."""

    async def complete(self, body):
        return await super().complete({name: value for name, value in body.items() if name in KNOWN})


def played(rate, seconds, kind=Slow):
    play = Play(kind(rate), Control(kind(rate)), [user("Go on.")], 64, perf_counter() + seconds, budget=2 * seconds)
    play.run([one for one in SCENARIOS if one.name in ("one request at a time", "JSON schema", "long contexts")])
    return play


def test_probing_leaves_time_and_answers_are_as_long_as_the_time_allows():
    play = played(60.0, 4.0)
    assert play.rate == pytest.approx(60, rel=0.3)
    assert play.max_tokens == SHORTEST
    first, _, last = play.rows
    assert (first["verdict"], first["answers"]) == ("passed", 1)
    assert "log-probabilities" in play.features
    if last["why"] == SPENT:
        assert "tokens/s; --budget" in play.not_tested()[-1]


def test_what_is_cheap_is_asked_of_both_before_what_is_slow_of_either():
    """No answer with a form is whole in the time: that says nothing of what the endpoint takes."""
    play = played(80.0, 4.0, Takes)
    assert {"log-probabilities", "stop", "min_p", "top_k"} <= play.features.keys()
    assert play.unasked
    assert not play.lacking & play.unasked
    (schema,) = (row for row in play.rows if row["scenario"] == "JSON schema")
    assert schema["why"] == SPENT
    assert not [line for line in play.not_tested() if any(f"shows no {name}" in line for name in play.unasked)]


def test_a_budget_that_is_named_is_more_than_was_given():
    line = next(line for line in played(80.0, 4.0, Takes).not_tested() if "--budget" in line)
    assert int(line.split("--budget ")[1].split("m ")[0]) * 60 > 8


def test_a_fast_server_writes_whole_answers():
    assert played(1e6, 60.0).max_tokens == 64


def test_nothing_is_tested_without_any_time_and_it_says_so():
    play = played(10.0, 0.01)
    assert {row["why"] for row in play.rows} == {SPENT}
