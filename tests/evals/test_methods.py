"""Methods: how many requests each makes, what it forces into them, and what it takes for an answer."""

import asyncio
from itertools import pairwise

import pytest

from paceline.errors import MethodError
from paceline.evals.align import prompts
from paceline.evals.align.methods import read_methods
from tests.evals.fakes import answer, scenario

RULES = scenario()


def run(method, say, **settings):
    return asyncio.run(answer(method, say, **settings))


def thinking(request, number):
    """A reasoning model: thoughts where it is to stop at their end, else the end of a thought and an answer."""
    return f"thought {number}.  \n" if request.stop else f"thought {number}.</think>\n\nanswer {number}"


def test_raw_shows_no_rules_and_vanilla_shows_each_once():
    for method, times in (("raw", 0), ("vanilla", 1)):
        made, (request,) = run(method, lambda r, n: "yes")
        assert made.response == "yes"
        assert request.messages[1]["content"].startswith("disguised?")
        assert all(request.messages[1]["content"].count(rule.text) == times for rule in RULES.rules)


def test_rules_may_come_first_and_prompts_be_plain():
    _, (request,) = run("vanilla", lambda r, n: "yes", rules_first=True)
    assert request.messages[1]["content"].endswith("disguised?")
    _, (request,) = run("raw", lambda r, n: "yes", adversarial=False)
    assert request.messages[1]["content"] == "plain?"


def test_align3_is_one_growing_turn_of_three_requests():
    made, requests = run("align3", thinking)
    assert [r.phase for r in requests] == ["step 1", "step 2", "step 3"]
    assert [r.stop for r in requests] == [("</think>",), ("</think>",), ()]
    assert [r.decoding.max_tokens for r in run("align3,step_tokens=7", thinking)[1]] == [7, 7, 100]
    for before, after in pairwise(requests):
        assert after.prefix.startswith(before.prefix)
        assert after.messages == before.messages
    assert all(r.prefix.endswith(r.forced) and "</think>" not in r.prefix for r in requests)
    assert "thought 1.\n\nWait" in requests[1].prefix  # what trails a thought is stripped
    assert made.response == "answer 3"
    assert "</think>" not in made.thought
    assert made.thought.endswith("thought 3.")
    # Rules: once in the user's turn, and twice in the forced thought.
    for rule in RULES.rules:
        assert requests[-1].messages[1]["content"].count(rule.text) == 1
        assert requests[-1].prefix.count(rule.text) == 2


@pytest.mark.parametrize("steps", ["1", "2", "3", "12", "13", "23", "213", "321"])
def test_ablations_of_align3_drop_just_their_injections(steps):
    _, requests = run(f"align3,steps={steps}", thinking)
    assert [r.phase for r in requests] == [f"step {s}" for s in steps]
    whole = requests[-1].prefix
    safety, behavioral = RULES.safety[0].text, RULES.behavioral[0].text
    assert whole.count(behavioral) == sum(s in "13" for s in steps)
    assert whole.count(safety) == sum(s in "23" for s in steps)
    assert [whole.index(prompts.text("step", s, RULES)) for s in steps] == sorted(
        whole.index(prompts.text("step", s, RULES)) for s in steps
    )


@pytest.mark.parametrize(("reason", "why"), [("length", "budget ended within"), ("stop", "never ended")])
def test_a_thought_that_never_ends_is_flagged_and_no_answer(reason, why):
    made, _ = run("align3", lambda r, n: ("on and on", reason))
    assert made.response == ""
    assert why in str(made.unanswered)
    assert made.thought.endswith("on and on")
    kept, _ = run("align3", lambda r, n: ("on and on", reason), keep_open=True)
    assert kept.response == "on and on"
    assert kept.unanswered is None


def test_align3_can_close_a_thought_itself():
    made, requests = run("align3,close=true", lambda r, n: "the answer" if n == 4 else ("on and on", "length"))
    assert len(requests) == 4
    assert requests[3].prefix.startswith(requests[2].prefix + "on and on")
    assert made.response == "the answer"
    assert made.unanswered is None
    assert (made.extra["cut"], len(run("align3,close=true", thinking)[1])) == (["step 1", "step 2", "step 3"], 3)


def test_more_think_of_one_pass_says_no_wait_and_of_three_says_it_twice():
    made, requests = run("more-think,passes=1", thinking)
    assert len(requests) == 1
    assert prompts.WAIT not in requests[0].prefix
    assert made.response == "answer 1"
    _, requests = run("more-think", thinking)
    assert [r.prefix.count(prompts.WAIT) for r in requests] == [0, 1, 2]
    assert [bool(r.stop) for r in requests] == [True, True, False]


def test_zero_think_makes_no_thought():
    made, (request,) = run("zero-think", lambda r, n: "answer")
    assert (request.prefix, (made.thought, made.response)) == ("<think>\n\n</think>\n\n", ("", "answer"))


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_self_refine_makes_one_request_and_two_an_iteration(iterations):
    fails, _ = run(f"self-refine,iterations={iterations}", lambda r, n: "" if r.phase == "refine" else f"{r.phase} {n}")
    assert fails.response == "answer 1"  # a rewriting that fails leaves it standing
    made, requests = run(f"self-refine,iterations={iterations}", lambda r, n: f"{r.phase} {n}")
    assert len(requests) == 1 + 2 * iterations
    assert made.response == ("answer 1" if iterations == 0 else f"refine {len(requests)}")
    for request in requests[1:]:
        shows_rules = all(rule.text in request.messages[0]["content"] for rule in RULES.rules)
        assert shows_rules == (request.phase == "feedback")


class Longest:
    """A scorer for which longer is better."""

    label = "longest"

    async def score(self, item, scenario, asked, response):
        return float(len(response)), []


def test_best_of_one_is_vanilla_and_best_of_n_chooses():
    vanilla, asked = run("vanilla", lambda r, n: "yes")
    one, of_one = run("best-of-n,n=1", lambda r, n: "yes")
    assert (one.response, of_one) == (vanilla.response, asked)
    made, requests = run("best-of-n,n=4", lambda r, n: "x" * (7 if n == 3 else n), scorer=Longest())
    assert (sorted(r.sample for r in requests), made.response) == ([0, 1, 2, 3], "x" * 7)
    assert made.extra["scores"][made.extra["chosen"]] == 7
    # What is no answer is never chosen.
    made, _ = run("best-of-n,n=3", lambda r, n: "<think>" + "x" * 50 if n == 1 else "y" * n, scorer=Longest())
    assert made.response == "yyy"


def test_tpo_makes_fifteen_candidates_from_best_and_worst():
    made, requests = run("tpo", lambda r, n: "x" * (1 + r.sample) if r.phase != "critique" else "c", scorer=Longest())
    phases = [r.phase for r in requests]
    assert (phases.count("answer"), phases.count("revise")) == (5, 10)
    assert ((phases.count("critique"), phases.count("gradient")), len(made.extra["scores"])) == ((2, 2), 15)
    assert made.response == "x" * 15
    critique = next(r for r in requests if r.phase == "critique").messages[1]["content"]
    assert critique.index("xxxxx") < critique.index("The worse one:\nx\n")


def test_an_answer_after_a_thought_of_its_own_is_parted():
    made, _ = run("vanilla", lambda r, n: "<think>a thought</think>\n\nyes")
    assert (made.thought, made.response) == ("a thought", "yes")
    made, _ = run("vanilla", lambda r, n: ("<think>a thought", "length"))
    assert (made.response, made.unanswered) == ("", "the budget ended within the thought")
    assert run("vanilla", lambda r, n: "")[0].unanswered == "the answer is empty"


def test_methods_are_read_with_their_options():
    methods = read_methods("vanilla, align3,steps=31,self_refine,iterations=15,align3,steps=123")
    assert [m.label for m in methods] == ["vanilla", "align3,steps=31", "self-refine,iterations=15", "align3"]
    for wrong, why in {
        "aling3": "Did you mean 'align3'", "align3,steps=11": "at most once", "align3,step=1": "no option",
        "vanilla,n=3": "no options", "best-of-n,n=0": "1 or more", "align3,align3,steps=123": "twice", "": "name a",
    }.items():  # fmt: skip
        with pytest.raises(MethodError, match=why):
            read_methods(wrong)
