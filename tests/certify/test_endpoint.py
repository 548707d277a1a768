"""Servers, as they are certified: a scripted one of a small language model, honest, biased and wrong."""

import hashlib
import json
import math
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import pytest

from paceline.certify.asking import RETRY, TIE, Control, Noise, compare, control_of
from paceline.certify.certificate import certify
from paceline.certify.options import Scope, ServerTest
from paceline.certify.oracles import Reported
from paceline.certify.page import findings, page
from paceline.certify.server import certify_server
from paceline.net import endpoint
from paceline.net.client import Client
from paceline.net.completion import Completion
from paceline.net.endpoint import Remote
from paceline.runs.progress import Progress
from tests.pairs import paired
from tests.web import Handler, serving

WORDS = [f" w{i}" for i in range(12)]


KNOWN = dict.fromkeys((
    "model", "messages", "max_tokens", "temperature", "top_p", "seed", "logprobs", "top_logprobs", "frequency_penalty",
    "presence_penalty", "stream", "draft",
))  # fmt: skip


@lru_cache
def probs(context):
    """What may follow two words."""
    seed = int(hashlib.sha256(repr(context).encode()).hexdigest()[:8], 16)
    weights = np.exp(1.5 * np.random.default_rng(seed).normal(size=len(WORDS)))
    return weights / weights.sum()


class Model:
    """bias: the share of drafted words that are kept without asking; wrong: every so many greedy words, which are then
    of this rank, from 0; most: best tokens that it reports at a place."""

    def __init__(self, bias=0.0, wrong=0, rank=1, logprobs=True, owner="", most=20):
        self.bias, self.wrong, self.rank, self.logprobs = bias, wrong, rank, logprobs
        self.owner, self.most = owner, most

    def reply(self, body):
        rng = np.random.default_rng(body.get("seed"))
        text = [len(body["messages"][-1]["content"]) % len(WORDS)]
        content = []
        for n in range(body["max_tokens"]):
            p = probs(tuple(text[-2:]))
            counts = np.bincount(text[1:], minlength=len(WORDS))
            penalty = body.get("frequency_penalty", 0.0) * counts + body.get("presence_penalty", 0.0) * (counts > 0)
            order = np.argsort(-p)
            ranked = np.argsort(penalty - np.log(p))
            temperature = body.get("temperature", 1.0)
            if temperature == 0:
                token = int(ranked[self.rank if self.wrong and n % self.wrong == self.wrong - 1 else 0])
            else:
                hot = (p * np.exp(-penalty)) ** (1 / temperature)
                hot /= hot.sum()
                hot[ranked[np.cumsum(hot[ranked]) - hot[ranked] >= body.get("top_p", 1.0)]] = 0.0
                token = int(rng.choice(len(WORDS), p=hot / hot.sum()))
                token = int(ranked[0]) if n and rng.random() < self.bias else token
            top = [{"token": WORDS[i], "logprob": math.log(p[i])} for i in order[: body.get("top_logprobs", 0)]]
            content.append({"token": WORDS[token], "logprob": math.log(p[token]), "top_logprobs": top})
            text.append(token)
        said = "".join(WORDS[i] for i in text[1:])
        shown = {"logprobs": {"content": content}} if body.get("logprobs") and self.logprobs else {}
        choice = {"message": {"content": said}, "finish_reason": "length", **shown}
        return {"choices": [choice], "usage": {"completion_tokens": body["max_tokens"]}}


@contextmanager
def served(model):
    class Words(Handler):
        def do_GET(self):
            self.reply(200, {"data": [{"id": "words", "owned_by": model.owner}]})

        def do_POST(self):
            body = json.loads(self.body())
            unknown = body.keys() - KNOWN.keys()
            unknown |= {"top_logprobs"} if body.get("top_logprobs", 0) > model.most else set()
            self.reply(400, {"error": f"{unknown}?"}) if unknown else self.reply(200, model.reply(body))

    with serving(Words) as url, Remote(url, retry=RETRY) as asked:
        yield asked


PROMPTS = [({"role": "user", "content": "x" * n},) for n in (3, 8)]
PLAN = Scope(shift=0.1, requests=240, max_tokens=12, budget="20m")


def certified(model, reference=None, plan=PLAN):
    with served(model) as server:
        if reference is None:
            return certify(server, Reported(control_of(server), PROMPTS), plan)
        with served(reference) as other:
            return certify(server, Reported(Control(other), PROMPTS), plan)


REFERENCES = [
    pytest.param(None, id="by its own log-probabilities"),
    pytest.param(Model(), id="by a reference", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("reference", REFERENCES)
def test_an_honest_server_is_not_accused(reference):
    found = certified(Model(), reference)
    assert found["verdict"] != "not lossless", findings(found)
    assert found["greedy"]["tokens"] > 90 * PLAN.max_tokens
    assert found["sampled"]["requests"] == (PLAN.requests if reference else 0)
    assert found["sampled"]["long"]["tokens"] > 100
    assert found["features"] == ["frequency_penalty", "log-probabilities", "presence_penalty"]
    whose = "control" if reference else "endpoint"
    assert f"several answers to a request: the {whose} shows no n" in found["not_tested"]
    assert "streams: the endpoint shows no streams" in found["not_tested"]  # it takes `stream`, and answers at once
    assert {row["verdict"] for row in found["scenarios"]} == {"passed", "not tested"}
    page({"environment": {}, "target": "words", **found})


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_planted_bias_is_found(reference):
    found = certified(Model(bias=0.5), reference, Scope(requests=960, max_tokens=24, budget="20m"))
    assert found["sampled"]["findings"][0]["what"].startswith("the best token came")
    assert found["verdict"] == "not lossless"


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_a_server_that_reports_five_tokens_is_judged_by_these(bias):
    """And no more, as some servers do."""
    found = certified(Model(bias=bias, most=5), None, Scope(requests=960, max_tokens=24, budget="20m"))
    assert "log-probabilities" in found["features"]
    assert found["sampled"]["long"]["tokens"] > 1000
    assert bool(found["sampled"]["findings"]) == bool(bias)
    assert not found["greedy"]["bugs"]


def test_a_wrong_greedy_token_is_a_bug_and_a_near_one_a_tie():
    greedy = certified(Model(wrong=5), None, Scope(requests=0, max_tokens=12, budget="20m"))["greedy"]
    verdicts = {one["verdict"] for one in greedy["shown"]}
    assert not greedy["lossless"]
    assert "bug" in verdicts
    assert all(one["gap"] <= 0.25 for one in greedy["shown"] if one["verdict"] == "tie")


def test_a_server_without_log_probabilities_cannot_be_certified():
    found = certified(Model(logprobs=False), None, Scope(requests=0, max_tokens=4, budget="20m"))
    assert not found["lossless"]
    assert "reports no log-probabilities" in findings(found)[0]


def place(token, top):
    return {
        "token": token, "logprob": top[token],
        "top_logprobs": [{"token": name, "logprob": value} for name, value in top.items()],
    }


PLACES = [place(" a", {" a": -0.1, " b": -3.0}), place(" b", {" b": -0.7, " c": -0.8, "": -0.85, " a": -2.0})]
RIGHT = Completion(" a b", logprobs=PLACES)
BODY = {"messages": [{"role": "user", "content": "a a a"}], "max_tokens": 2}


@pytest.mark.parametrize(("said", "fields", "gap", "why"), [
    (PLACES, {}, None, None),
    ([PLACES[0], place(" c", {" b": -0.7, " c": -0.8})], {}, 0.1, ""),
    ([PLACES[0], place(" d", {" d": -0.7})], {}, None, "not among its 4 best"),
    (PLACES[:1], {}, None, "it has 1 tokens, and the control 2"),
    ([place(" a", {" a": -0.9}), PLACES[1]], {}, None, "the log-probability of ' a' is -0.900"),
    # Another server's spelling: no space before, and the name of a special token.
    ([place("a", {"a": -0.1, "b": -3.0}), place("c", {"c": -0.8})], {}, 0.1, ""),
    ([PLACES[0], place("<|end|>", {"<|end|>": -0.8})], {}, 0.15, ""),
    # " a" was there once: a penalty of 1.3 makes the two equal, if the penalty of the answer alone counts.
    ([PLACES[0], place(" a", {" a": -2.0})], {"frequency_penalty": 0.1}, 1.4, ""),
])
def test_an_answer_is_compared_with_the_controls(said, fields, gap, why):
    found = compare(Completion("".join(one["token"] for one in said), logprobs=said), RIGHT, BODY | fields, Noise())
    if why is None:
        assert found is None
        return
    assert found.get("gap") == (gap if gap is None else pytest.approx(gap))
    assert why in found.get("why", "")


SCHEMA = {"response_format": {"type": "json_schema"}}
UNRANKED = place(" q", {" q": -9.03})


@pytest.mark.parametrize(("said", "best", "fields", "gap"), [
    # Ranks 52 and 53 before the mask: no server reports either among its best.
    (UNRANKED, -9.0, SCHEMA, 0.03), (UNRANKED, -9.0, {"structured_outputs": {"regex": "q"}}, 0.03),
    (UNRANKED, -9.0, {"tool_choice": "required"}, 0.03), (UNRANKED, -9.0, {"min_tokens": 2}, 0.03),
    (UNRANKED, -9.0, {"presence_penalty": 0.8}, 0.03), (UNRANKED, -9.0, {"frequency_penalty": 0.8}, 0.03),
    (UNRANKED, -5.0, SCHEMA, 4.03), (UNRANKED, -9.0, {}, None), (UNRANKED, -9.0, {"top_k": 9}, None),
    # By its own server it would be nearly the best, but the control ranks it after its last.
    (place(" q", {" q": -2.4}), -2.5, SCHEMA, 0.5),
    (place(" q", {" q": float("nan")}), -2.5, SCHEMA, 0.5),
    # A bias counts, by the text of its token: -3 - 3.
    (place(" c", {" c": -3.0}), -2.0, {"logit_bias": {"7": -3.0}}, 4.0),
    (place(" c", {" c": -3.0}), -5.9, {"logit_bias": {"7": -3.0}}, 0.1),
], ids=str)
def test_what_a_field_moves_is_judged_by_what_its_own_server_says_of_it(said, best, fields, gap):
    ranked = place(" b", {" b": -0.7, " c": -3.0})["top_logprobs"]
    right = Completion(" a x", logprobs=[PLACES[0], {"token": " x", "logprob": best, "top_logprobs": ranked}])
    mine = Completion(" a" + said["token"], logprobs=[PLACES[0], said])
    found = compare(mine, right, BODY | fields, Noise(), {" c": -3.0})
    assert found["gap"] == (gap if gap is None else pytest.approx(gap))
    assert bool(found["why"]) == (gap is None)


@pytest.mark.parametrize(("words", "banned"), [(" a c", True), (" a b", False), (" c b", True)])
def test_a_token_that_is_forbidden_is_a_bug_however_near_the_tie(words, banned):
    """Also after a tie, where nothing else is compared."""
    top = {" a": -0.7, " b": -0.7, " c": -0.7}
    places = [[place(f" {one}", top) for one in text.split()] for text in (words, " a b")]
    mine, right = (Completion("".join(one["token"] for one in of), logprobs=of) for of in places)
    found = compare(mine, right, BODY | {"logit_bias": {"7": -100}}, Noise(), {" c": -100.0})
    assert (found is not None) == banned
    assert not banned or found["why"] == "it says ' c', which the request's logit_bias forbids"
    both = compare(mine, mine, BODY | {"logit_bias": {"7": -100}}, Noise(), {" c": -100.0})
    assert both is None  # then drafts have no part in it


def test_rounding_is_measured_and_has_a_limit():
    noise = Noise()
    assert float(noise) == TIE / 2
    moved = [place(" a", {" a": -0.1 - 0.01 * (i % 2)}) for i in range(40)]
    noise.add([(Completion("", logprobs=moved), Completion("", logprobs=[moved[0]] * 40))])
    assert float(noise) == pytest.approx(0.02)
    noise.add([(Completion("", logprobs=[place(" a", {" a": -3.0})] * 20), Completion("", logprobs=[moved[0]] * 20))])
    assert float(noise) == TIE / 2


def test_rounding_shows_in_the_tokens_beside_one_that_is_almost_certain():
    """Logits that move by 0.12 leave its log-probability where it was."""
    noise, tops = Noise(), [{" a": -0.001, " b": -9.0 - 0.12 * n} for n in (0, 1)]
    noise.add([tuple(Completion("", logprobs=[place(" a", top)] * 20) for top in tops)])
    assert float(noise) == TIE / 2


def test_one_server_switches_its_drafts_off_and_another_is_its_own_control():
    with served(Model()) as server:
        assert control_of(server).is_self
        server.model = ""
    with served(Model(owner="paceline")) as server:
        control = control_of(server)
        assert not control.is_self
        assert "draft = none" in control.name


@pytest.mark.parametrize(("owner", "reference"), paired(["", "paceline", "paceline that refuses"], [False, True]))
def test_servers_are_closed(owner, reference, monkeypatch):
    """And with them the connections: those to the endpoint, to the reference, and to the one that was no control."""
    opened = []

    def client(*arguments, **more):
        opened.append(Client(*arguments, **more))
        return opened[-1]

    monkeypatch.setattr(endpoint, "Client", client)
    if "refuses" in owner:
        monkeypatch.delitem(KNOWN, "draft")
    with served(Model(owner=owner.partition(" ")[0])) as server:
        other = server.url if reference else None
        certify_server(ServerTest(server=server.url, against=other, scope=Scope(requests=0, budget="0s")), Progress())
    assert opened
    assert all(one._http.is_closed for one in opened)
