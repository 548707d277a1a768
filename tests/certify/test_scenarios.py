"""Scenarios against servers of tables: planted bugs are found where they show, made small, and lossless ones pass."""

import json
import re
from dataclasses import replace
from math import inf
from time import perf_counter
from xml.etree import ElementTree

import numpy as np
import pytest

from paceline.certify.asking import Control
from paceline.certify.certificate import certify
from paceline.certify.options import REQUESTS, STRUCTURED, Scope
from paceline.certify.oracles import Reported
from paceline.certify.page import findings, issue, junit, page
from paceline.certify.parts import Learnt, Run
from paceline.certify.sampled import Sampled
from paceline.certify.scenarios import FEATURES, FORMS, SCENARIOS, Play, probe, user
from paceline.certify.shrink import greedy_reports
from paceline.errors import PacelineError
from paceline.net.completion import CompletionError
from tests.certify.tables import (
    BUGS,
    CHARS,
    EYE,
    SAMPLED,
    BlockServer,
    FiltersFirst,
    GrammarOfBonus,
    SixteenBits,
    StopInsideDraft,
    TableServer,
    TemperatureOnOneSide,
    TopPOnOneSide,
)

PROMPTS = [user(text) for text in ("hello! what can you do?", "count from 1 to 9, twice.", "the cat sat on the mat.")]
NAMES = [scenario.name for scenario in SCENARIOS]
GREEDY = {bug: name for bug, name in BUGS.items() if name != SAMPLED}
REST = ",".join(name for name in FEATURES if name != "log-probabilities")
"""What is left out where scenarios are not what a test is about."""
ALONE = ("prompts that are in the prefix cache", "8 requests at once", "JSON schema after reasoning")
"""Where bugs show without a control: in what the server says under other circumstances, or in its form."""


def control_of(server, seed=0):
    return Control(TableServer(seed, drafts=False))


def played(server, control, *names):
    play = Play(server, control, PROMPTS, 40, perf_counter() + 600)
    play.run([one for one in SCENARIOS if one.name in names] if names else SCENARIOS)
    return play


def certified(server, seed, budget, **scope):
    found = certify(server, Reported(control_of(server, seed), PROMPTS), Scope(budget=budget, seed=seed, **scope))
    return {"target": "tables", "environment": {}, **found}


def test_a_lossless_server_passes_every_scenario_and_all_are_played():
    play = played(BlockServer(), control_of(BlockServer()))
    assert [row["scenario"] for row in play.rows] == NAMES
    assert {row["verdict"] for row in play.rows[:-1]} == {"passed"}
    assert play.rows[-1]["verdict"] == "partly"  # this model's context ends
    assert "context" in play.not_tested()[0]
    assert not play.divergences


@pytest.mark.parametrize("bug", GREEDY)
def test_a_bug_is_found_in_its_scenario(bug):
    server, control = bug(), control_of(bug())
    play = played(server, control, GREEDY[bug])
    (row,) = play.rows
    assert row["verdict"] == "wrong"
    (report,) = greedy_reports(play)
    asked = bodies_of(report)
    replies = server.ask(asked)
    texts = [one.text or one.tool_calls or [one.text, *(other.text for other in one.others)] for one in replies]
    right = json.loads(report["expected"].removeprefix("as tables: "))
    assert right != report["observed"]  # what the very requests that are printed answer, and should
    if isinstance(right, str):
        assert right == control.source.ask(asked[-1:])[0].text
        assert len(right) <= asked[-1]["max_tokens"]
        assert report["observed"] in texts
    assert ("stop" in asked[-1]) == (bug is StopInsideDraft)


class Rounded(TableServer):
    """Its logits have few bits, as in bfloat16, and its control's all of them."""

    def logits(self, row, context):
        return np.round(super().logits(row, context) * 4) / 4


@pytest.mark.parametrize("seed", [4, 7, 8])
def test_two_tokens_that_rounding_swaps_behind_a_mask_are_a_tie(seed):
    """Neither is among the best that servers report, because the mask comes after these."""
    play = played(Rounded(seed), control_of(TableServer(), seed), "JSON schema", "regular expression")
    assert sum(row["ties"] for row in play.rows) > 0
    assert {row["verdict"] for row in play.rows} == {"passed"}


class BiasForgotten(Rounded):
    """After a drafted token logit_bias is not added, and rounding makes ties."""

    def warp(self, row, logits, tokens):
        kept, row.body = row.body, {**row.body, "logit_bias": {}} if tokens else row.body
        p = super().warp(row, logits, tokens)
        row.body = kept
        return p


def test_a_forbidden_token_is_a_bug_by_itself():
    play = played(BiasForgotten(), control_of(TableServer()), "penalties and biases")
    said = [one for one in play.divergences if one.said in (CHARS[11], CHARS[13])]
    forbidden = [one for one in said if "forbids" in one.why]
    assert forbidden
    assert not [one for one in forbidden if one.is_tie]


class SaysOne(TableServer):
    """Its first token is the same whatever is asked, as behind a mask."""

    def mask(self, row, tokens):
        return 0.0 if row.said or tokens else 1e3 * EYE[0]


@pytest.mark.parametrize(("kind", "spelt"), [(TableServer, {CHARS[11]: -100.0, CHARS[13]: -100.0}), (SaysOne, {})])
def test_a_bias_is_known_by_what_its_token_says(kind, spelt):
    play = Play(kind(), Control(kind(drafts=False)), PROMPTS, 40, perf_counter() + 60)
    play.features = {"log-probabilities": FEATURES["log-probabilities"][0]}
    assert play._biases(FEATURES["logit_bias"][0]) == spelt
    assert play._biases({"max_tokens": 4}) == {}


def bodies_of(report):
    lines = [line.removesuffix(" &") for line in report["curl"] if line.startswith("curl")]
    return [json.loads(line.split(" -d ")[1].strip("'")) for line in lines]


def test_a_request_is_not_shrunk_to_one_that_asks_for_something_else():
    """An answer that is no JSON is a fault while the request asks for JSON."""
    play = played(GrammarOfBonus(), control_of(GrammarOfBonus()), "JSON schema")
    asked = bodies_of(greedy_reports(play)[0])
    assert "response_format" in asked[-1]


class OnceWrong(TableServer):
    """Its answers are wrong until it has stopped."""

    spoils = True

    def completion(self, row):
        done = super().completion(row)
        if self.spoils and done.logprobs and row.body["max_tokens"] == 40:
            done.text, done.logprobs = "x" + done.text[1:], [{**done.logprobs[0], "token": "x"}, *done.logprobs[1:]]
        return done


def test_what_does_not_show_again_is_said_to_be_no_small_request():
    play = played(OnceWrong(), control_of(TableServer()), "one request at a time")
    play.server.spoils = False
    (report,) = greedy_reports(play)
    assert report["sure"].startswith("the same requests show it 0 times of 3; so it could not be shrunk")


@pytest.mark.parametrize("bug", [bug for bug, name in GREEDY.items() if name in ALONE])
def test_what_depends_on_company_caches_or_form_is_found_without_a_control(bug):
    server = bug()
    (row,) = played(server, Control(server, is_self=True), GREEDY[bug]).rows
    assert row["verdict"] == "wrong"


@pytest.mark.parametrize(
    ("name", "requests", "tokens"),
    [("one request at a time", 1, 30), ("prompts that are in the prefix cache", 2, 8), ("8 requests at once", 5, 12)],
)
def test_a_bug_is_shown_by_few_and_short_requests(name, requests, tokens):
    bug = next(bug for bug, where in BUGS.items() if where == name)
    play = played(bug(), control_of(bug()), name)
    (report,) = greedy_reports(play)
    bodies = bodies_of(report)
    assert len(bodies) <= requests
    assert bodies[-1]["max_tokens"] <= tokens
    assert len(bodies[-1]["messages"][-1]["content"]) < 100  # of up to 400
    assert report["sure"].startswith("the same requests show it 3 times of 3")


def test_a_certificate_becomes_a_page_an_issue_and_junit_xml():
    found = certified(next(iter(GREEDY))(), 0, "5m", requests=0, leave_out=REST)
    assert found["verdict"] == "not lossless"
    text, suite = issue(found), ElementTree.fromstring(junit(found))
    assert "curl -s http://127.0.0.1:9000/v1/chat/completions" in text
    assert "## one request at a time" in text
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert "one request at a time" in failed
    assert (suite.get("failures"), int(suite.get("tests", 0))) == (str(len(failed)), len(NAMES) + 3)
    assert "one request at a time" in page(found)


class DiesOfTopK(TableServer):
    """As vLLM 0.32 on CPU beside n-gram drafts, in a step without one."""

    died = False

    def ask(self, bodies, slots=None):
        self.died |= any("top_k" in body and body["temperature"] for body in bodies)
        if self.died:
            raise CompletionError("connection refused")
        return super().ask(bodies, slots)


def test_a_request_that_ends_the_server_is_named():
    with pytest.raises(CompletionError, match=r'any more since a request with \{"top_k": 20\}, greedy or'):
        certified(DiesOfTopK(), 0, "5m", requests=0)


def test_the_rest_is_tested_where_a_feature_is_left_out():
    found = certified(DiesOfTopK(), 0, "20s", requests=96, leave_out="top_k")
    assert found["sampled"]["requests"] == 96
    assert "top_k" not in found["features"]
    assert found["not_tested"][0] == "top_k: left out as asked"
    with pytest.raises(PacelineError, match="no feature 'topk'"):
        Scope(leave_out="min_p,topk")


class DiesOfSamples(TableServer):
    """In the middle of sampled answers."""

    def ask(self, bodies, slots=None):
        if sum(body["temperature"] > 0 for body in bodies) > 20:
            raise CompletionError("connection refused")
        return super().ask(bodies, slots)


@pytest.mark.parametrize("endpoint", ["server", "control"])
def test_what_was_found_before_a_server_ended_is_not_lost(endpoint):
    server = DiesOfSamples() if endpoint == "server" else TableServer()
    control = control_of(server) if endpoint == "server" else Control(DiesOfSamples(drafts=False))
    plan = Scope(budget="20s", requests=400, max_tokens=16, leave_out=REST)
    found = certify(server, Reported(control, PROMPTS), plan)
    assert (found["verdict"], found["greedy"]["bugs"]) == ("cannot say", 0)
    assert found["greedy"]["tokens"] > 500
    assert found["why"].endswith("connection refused")
    assert f"It broke off: {found['why']}." in findings(found)


class ListsNoBestOfSome(TableServer):
    """As llama.cpp's server of accepted tokens of a draft."""

    def completion(self, row):
        one = super().completion(row)
        for place in one.logprobs[1::3] if row.temperature else ():
            place["top_logprobs"] = []
        return one


def test_long_samples_are_not_judged_by_half_of_their_tokens():
    """Which half may hang on what was drafted."""
    found = certified(ListsNoBestOfSome(), 0, "20s", requests=80, max_tokens=16, leave_out=REST)
    assert not found["sampled"]["findings"]
    assert found["sampled"]["long"]["tokens"] == 0
    assert any(one.startswith("long sampled answers: some tokens come without") for one in found["not_tested"])
    assert found["sampled"]["requests"] > 0


class Odd(TableServer):
    """Its longer answers are changed by `spoil`."""

    def __init__(self, spoil):
        super().__init__()
        self.spoil = spoil

    def ask(self, bodies, slots=None):
        answers = super().ask(bodies, slots)
        for one, body in zip(answers, bodies, strict=True):
            if body["max_tokens"] > 30:
                self.spoil(one, body)
        return answers


@pytest.mark.parametrize("place", [None, "x", {"token": "a"}, {"token": "a", "logprob": "x"}], ids=str)
def test_what_are_no_log_probabilities_is_said_and_no_error(place):
    server, plan = Odd(lambda one, _: one.logprobs.insert(0, place)), Scope(requests=20, leave_out=REST)
    found = certify(server, Reported(control_of(TableServer()), PROMPTS), plan)
    assert found["verdict"] == "cannot say"
    assert "sent what are no log-probabilities" in " ".join((found["why"], *found["not_tested"]))


def lose(one):
    one.text = one.text.replace("e", "", 1)


def another_digit(one):
    one.text = re.sub("[0-9]$", lambda last: str(9 - int(last[0])), one.text)


def another_colour(one):
    for call in one.tool_calls:
        call["arguments"] = re.sub("red|blue", "green", call["arguments"], count=1)


def another_thought(one):
    one.reasoning = one.reasoning[1:]


OTHER_TEXTS = {
    "a stream": ("streams", lambda body: body.get("stream"), lose),
    "a short answer": ("requests that join and leave", lambda body: body["max_tokens"] < 40, lose),
    "before a stop token": ("stop tokens", lambda body: "stop_token_ids" in body, lose),
    "an answer that ends": ("regular expression", bool, another_digit),
    "a tool call": ("tool calls", bool, another_colour),
    "a thought": ("JSON schema after reasoning", bool, another_thought),
}  # fmt: skip
"""Texts that are not those of their tokens: the scenario that asks for them, of which requests, and what is wrong."""


@pytest.mark.parametrize("where", OTHER_TEXTS)
def test_a_text_that_is_not_that_of_its_tokens_is_found(where):
    name, wanted, spoil = OTHER_TEXTS[where]

    class Misspells(TableServer):
        def ask(self, bodies, slots=None):
            answers = super().ask(bodies, slots)
            for one, body in zip(answers, bodies, strict=True):
                if wanted(body) and not body["temperature"]:
                    spoil(one)
            return answers

    play = played(Misspells(), control_of(TableServer()), name)
    assert play.rows[0]["verdict"] == "wrong"
    assert all("the tokens are right" in one.why for one in play.divergences)


def test_texts_that_differ_without_log_probabilities_cannot_be_judged():
    def other(one, body):
        if body.keys() <= {"messages", "temperature", "max_tokens"}:
            one.text = one.text[::-1]

    plan = Scope(requests=0, leave_out=f"log-probabilities,{REST}")
    found = certify(Odd(other), Reported(control_of(TableServer()), PROMPTS), plan)
    assert (found["verdict"], found["greedy"]["bugs"]) == ("cannot say", 0)
    assert "tell ties from bugs" in found["why"]
    assert {*FEATURES} == {*REQUESTS["features"], *STRUCTURED} == {*REQUESTS["features"], *FORMS}


class RefusesMinP(TableServer):
    """Where it samples, as vLLM beside drafts."""

    def ask(self, bodies, slots=None):
        if any("min_p" in body and body["temperature"] for body in bodies):
            raise CompletionError("400")
        return super().ask(bodies, slots)


def test_what_is_refused_when_sampling_is_not_asked_for():
    assert "min_p" in probe(TableServer(), MIN_P)
    assert not probe(RefusesMinP(), MIN_P)


MIN_P = {"min_p": FEATURES["min_p"]}


def test_no_time_is_no_certificate():
    found = certified(TableServer(), 0, "0s", requests=0)
    assert (found["verdict"], found["why"]) == ("cannot say", "the budget was spent")
    assert {row["verdict"] for row in found["scenarios"]} == {"not tested"}


@pytest.mark.parametrize("bug", [TemperatureOnOneSide, TopPOnOneSide])
def test_a_bias_is_found_by_the_log_probabilities_reported(bug):
    server, plan = bug(), Scope(budget="10m", requests=320, max_tokens=16, leave_out=REST)
    found = certify(server, Reported(Control(server, is_self=True), PROMPTS), plan)
    assert not found["sampled"]["lossless"]
    assert not found["greedy"]["bugs"]


@pytest.mark.parametrize(("owner", "other", "requests"), [
    ("vllm", "vllm", 480), ("vllm", "sglang", 16), ("llamacpp", "llamacpp", 16),
])
def test_filters_at_a_temperature_are_asked_where_both_order_them_alike(owner, other, requests, monkeypatch):
    server, control, asked, alike = FiltersFirst(), control_of(None), [], (owner, other) == ("vllm", "vllm")
    monkeypatch.setattr(server, "owner", owner)
    monkeypatch.setattr(control.source, "owner", other)
    ask = TableServer.ask
    monkeypatch.setattr(TableServer, "ask", lambda self, bodies, slots=None: asked.extend(bodies) or ask(self, bodies))
    plan = Scope(budget="10m", requests=requests, max_tokens=24, leave_out=REST)
    found = certify(server, Reported(control, PROMPTS), plan)
    assert any(body["temperature"] == 0.7 and body.get("top_p") == 0.9 for body in asked) == alike
    assert found["sampled"]["lossless"] != alike


def test_a_shift_that_is_asked_for_can_be_found_whatever_time_that_takes():
    plan = Scope(shift=0.3, leave_out=REST)
    run, oracle = Run(TableServer(), plan), Reported(control_of(TableServer()), PROMPTS)
    played = oracle.scenarios(run, Learnt(), perf_counter())
    requests = []
    for level in (1e-3, 0.05):  # what rounding moves
        played.played.noise.level = level
        (look,) = oracle.first(run, replace(played, sampled=Sampled(slack=played.played.noise)), inf).sampled.looks[-1:]
        requests.append(look.requests)
        assert not look.accuses
    assert 100 < 1.2 * requests[0] < requests[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", BUGS)
def test_every_bug_is_found_within_five_minutes(bug):
    began = perf_counter()
    found = certified(bug(1), 1, "5m")
    shown = [row["scenario"] for row in found["scenarios"] if row["verdict"] == "wrong"]
    shown += [] if found["sampled"]["lossless"] else [SAMPLED]
    print(f"{bug.__name__}: {shown}, {perf_counter() - began:.0f} s, {[one['why'] for one in found['reports']][:1]}")
    assert found["verdict"] == "not lossless"
    assert BUGS[bug] in shown


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("lossless", [TableServer, BlockServer])
def test_no_lossless_server_is_accused(lossless, seed):
    found = certified(lossless(seed), seed, "30s")
    sampled = found["sampled"]
    print(f"{lossless.__name__} {seed}: {sampled['requests']} requests, p {sampled['p']:.3f}")
    assert found["sampled"]["lossless"], found["why"]
    assert not found["greedy"]["bugs"]


def test_drafts_verified_in_sixteen_bits_are_moved_less_than_the_budget_finds():
    """The total variation of a drafted token, which docs/certify.md states."""
    server, moved = SixteenBits(), []
    rng = np.random.default_rng(0)
    for _ in range(2000):
        logits = rng.normal(size=48) * 2
        q = np.exp(logits) / np.exp(logits).sum()
        rounded = q.astype(np.float16).astype(np.float64)
        moved.append(np.abs(q - rounded).sum() / 2)
    assert server.length == 4
    assert np.mean(moved) < 5e-4
