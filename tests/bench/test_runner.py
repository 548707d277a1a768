"""The runner: who is asked what, and when; what is left behind by a failure, a stop and a kill."""

from collections import Counter

import pytest
from tests.bench.turns import reply

from paceline.bench import runner
from paceline.bench.record import Answer
from paceline.bench.runner import Options, Runner, fitting, grouped
from paceline.bench.suites import Question
from paceline.core.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.peers.peer import Peer

QUESTIONS = [
    Question("a", "writing", "mt-bench", ("one", "two")), Question("b", "math", "mt-bench", ("three",)),
    Question("c", "qa", "qa", ("four",)), Question("d", "qa", "qa", ("five",)), Question("e", "qa", "qa", ("six",)),
]


def prompt(question, answers):
    """A token a character of the conversation."""
    said = zip(question.turns, [*answers, ""], strict=False)
    return [ord(letter) for turn, answer in said for letter in turn + answer]


def request(question, answers):
    return {"prompt": prompt(question, answers)}


class Echo(Peer):
    """Answers the prompt backwards, and notes when it was asked what."""

    mixes = in_process = True
    asked: list[tuple[str, str, SamplingParams]] = []
    woken: list[tuple[str, int, float]] = []

    def __init__(self, name, fails_at=None, slots=8):
        super().__init__(name, slots, None)
        self.fails_at = fails_at
        self.forgot = 0

    def forget(self):
        self.forgot += 1

    def wake(self, seconds):
        Echo.woken.append((self.name, len(Echo.asked), seconds))

    def answer(self, prompts, params):
        turns = []
        for tokens, ask in zip(prompts, params, strict=True):
            text = "".join(map(chr, tokens))
            Echo.asked.append((self.name, text, ask))
            if self.fails_at is not None and text.endswith(self.fails_at):
                raise PacelineError("it broke\nin two")
            turns.append(reply(len(tokens), list(tokens[::-1]), " " + text[::-1] + " ", 0.5))
        return turns


@pytest.fixture(autouse=True)
def _forget():
    Echo.asked, Echo.woken = [], []


class Log(list[Answer]):
    """Answers as they are recorded, for a run to go on with."""


@pytest.fixture
def log():
    return Log()


def run(log, endpoints, options=Options(warm_up=0), **more):
    groups = grouped([(q, len(q.turns)) for q in QUESTIONS], options.batch)
    return Runner(endpoints, groups, options, request, known=list(log), record=log.extend, **more).run()


def test_everyone_answers_everything_in_an_order_of_its_own(log):
    assert run(log, [Echo("x"), Echo("y"), Echo("z")], Options(warm_up=0, repeats=8))
    done = list(log)
    assert Counter((a.method, a.question) for a in done) == {(m, q.id): 8 for m in "xyz" for q in QUESTIONS}
    assert [a.question for a in done] == [q for _ in range(8) for q in "acbde" for _ in range(3)]
    orders = ["".join(a.method for a in done[i : i + 3]) for i in range(0, len(done), 3)]
    assert len(set(orders)) == 6  # everyone comes first, and behind everyone else
    again = Log()
    run(again, [Echo("x"), Echo("y"), Echo("z")], Options(warm_up=0, repeats=8))
    assert [a.method for a in again] == [a.method for a in done]


def test_a_stopped_run_has_answers_of_every_task(log):
    """Their groups take turns, whatever the order of the suite."""
    done = []
    options = Options(warm_up=0, batch=2)
    there = {"stopped": lambda: len(done) >= 4, "progress": done.append}
    assert not run(log, [Echo("x")], options, **there)
    assert [a.question for a in log] == ["a", "b", "c", "d"]

    again = Log()
    run(again, [Echo("x")], Options(warm_up=0))
    assert "".join(a.question for a in again) == "acbde"
    assert {a.question: a.group for a in again} == {q.id: i for i, q in enumerate(QUESTIONS)}


def test_a_second_turn_reads_the_endpoints_own_first_answer(log):
    run(log, [Echo("x")])
    assert [text for _, text, _ in Echo.asked[:2]] == ["one", "one" + "eno" + "two"]
    first = log[0]
    assert [turn.text for turn in first.turns] == ["eno", "owtoneeno"]  # as a reader sees it
    assert [turn.plain_tokens for turn in first.turns] == [3, 9]
    assert first.turns[0].peak_bytes is None or first.turns[0].peak_bytes > 0


def test_who_is_asked_is_awake(log, monkeypatch):
    monkeypatch.setattr(runner, "WAKE", 0.25)
    run(log, [Echo("x"), Echo("y")], Options(warm_up=0, batch=2))
    assert {seconds for *_, seconds in Echo.woken} == {0.25}
    before = {at: name for name, at, _ in Echo.woken}
    assert len(Echo.woken) == len(before), "once for every request, right before it"
    assert [before[at] for at in sorted(before)] == [Echo.asked[at][0] for at in sorted(before)]
    assert 0 < len(before) < len(Echo.asked), "requests are of two questions"


def test_the_warm_up_comes_first_is_not_recorded_and_is_forgotten(log):
    endpoints = [Echo("x"), Echo("y")]
    run(log, endpoints, Options(warm_up=2, max_tokens=100, repeats=2))
    warm = Echo.asked[:8]
    turns = ("one", "oneenotwo")
    assert [(name, text) for name, text, _ in warm] == [(n, t) for n in "xy" for _ in "12" for t in turns]
    assert ({ask.max_tokens for *_, ask in warm}, len(log)) == ({32}, 2 * 2 * len(QUESTIONS))
    assert [c.forgot for c in endpoints] == [2, 2]  # behind the warm-up, and between the repetitions


def test_the_warm_up_is_as_wide_as_the_widest_group(log):
    """Or whoever answers first at that width would pay for its memory."""
    run(log, [Echo("x")], Options(warm_up=1, batch=2))
    widest = max(sum(answer.group == n for answer in log) for n in {answer.group for answer in log})
    assert widest == 2
    assert len({text for _, text, _ in Echo.asked[:2]}) == 2, "two questions at once"


def test_a_method_that_fails_is_left_behind_and_the_others_go_on(log):
    assert not run(log, [Echo("x"), Echo("y", fails_at="three")])
    done = list(log)
    assert "".join(a.question for a in done if a.method == "x") == "acbde"
    failed = [a for a in done if a.method == "y"]
    assert [(a.question, a.failed) for a in failed] == [("a", None), ("c", None), ("b", "it broke in two")]


def test_a_method_that_fails_while_warming_up_has_a_line_that_says_so(log):
    run(log, [Echo("x"), Echo("y", fails_at="one")], Options(warm_up=1))
    assert [(a.question, a.failed) for a in log if a.method == "y"] == [("a", "it broke in two")]


def test_what_is_not_ours_to_foresee_is_caught_too(log):
    class Broken(Echo):
        def answer(self, prompts, params):
            raise ZeroDivisionError("1/0")

    run(log, [Echo("x"), Broken("y")])
    assert [a.failed for a in log if a.method == "y"] == ["ZeroDivisionError('1/0')"]


def test_a_run_that_was_stopped_goes_on_where_it_was(log):
    done = []
    assert not run(log, [Echo("x"), Echo("y")], stopped=lambda: len(done) == 7, progress=done.append)
    before = list(log)
    assert len(before) == 7
    Echo.asked = []
    seen = []
    assert run(log, [Echo("x"), Echo("y")], progress=seen.append)
    after = list(log)
    assert after[:7] == before
    assert Counter((a.method, a.question) for a in after) == Counter((m, q.id) for m in "xy" for q in QUESTIONS)
    assert (len(Echo.asked), len(seen)) == (3, 10)


def test_a_run_that_is_complete_asks_nothing(log):
    run(log, [Echo("x")])
    Echo.asked = []
    assert run(log, [Echo("x")], Options(warm_up=3))
    assert Echo.asked == []


def test_a_failure_is_tried_again_when_the_run_goes_on(log):
    run(log, [Echo("x", fails_at="four")])
    assert run(log, [Echo("x")])
    assert sum(a.failed is None for a in log) == len(QUESTIONS)


def test_a_batch_is_of_one_task(log):
    run(log, [Echo("x"), Echo("y", slots=1)], Options(batch=2, warm_up=0))
    done = list(log)
    groups = {a.question: a.group for a in done if a.method == "x"}
    assert groups == {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2}
    assert [a.failed for a in done if a.method == "y"] == ["answers 1 at a time, and --batch is 2"] * 2


def test_every_endpoint_has_the_same_seed_and_every_answer_another(log):
    run(log, [Echo("x"), Echo("y")], Options(temperature=0.7, repeats=2, warm_up=0, batch=2))
    seeds = {}
    for name, _, ask in Echo.asked:
        assert ask.temperature == 0.7
        seeds.setdefault(name, []).append(ask.seed)
    assert Counter(seeds["x"]) == Counter(seeds["y"])
    assert len(set(seeds["x"])) == 2 * (len(QUESTIONS) + 1)


def test_questions_that_do_not_fit_are_left_out_by_name():
    fit, left_out = fitting(QUESTIONS, prompt, max_context=16, max_tokens=5)
    assert [(q.id, turns) for q, turns in fit] == [("a", 2), ("b", 1), ("c", 1), ("d", 1), ("e", 1)]
    fit, left_out = fitting(QUESTIONS, prompt, max_context=9, max_tokens=5)
    assert [(q.id, turns) for q, turns in fit] == [("a", 1), ("c", 1), ("d", 1), ("e", 1)]
    assert [(out.question, out.why) for out in left_out] == [
        ("a", "turn 2 and answers of 5 tokens need 16 of a context of 9"),
        ("b", "turn 1 and answers of 5 tokens need 10 of a context of 9"),
    ]
