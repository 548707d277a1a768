"""Late answers: what a method's own rounds predict, and what asking again makes of a neighbour's visit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.bench.checks import disturbances, repeated
from paceline.bench.expected import Pace, late
from paceline.bench.metrics import speedup, summarize, tokens_per_second
from paceline.bench.options import Options
from paceline.bench.record import Answer
from paceline.bench.runner import AGAIN, Runner, grouped
from paceline.bench.suites import Question
from paceline.workbench.contestant import Ask, Contestant, Reply

QUESTIONS = [Question(str(i), "qa", "qa", ("?" * 40,)) for i in range(30)]


class Clocked(Contestant):
    """Answers by a clock of its own: 10 ms a prompt token, 20 ms a round of one token, 30 ms one of five. Its calls
    number `slow` take four times as long."""

    def __init__(self, name: str, drafted: int = 0, slow: Sequence[int] = ()):
        super().__init__(name)
        self.drafted, self.slow = drafted, set(slow)
        self.calls = self.forgot = 0

    def forget(self) -> None:
        self.forgot += 1

    def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Reply]:
        factor = 4 if self.calls in self.slow else 1
        self.calls += 1
        return [reply(len(prompts[0]), self.drafted, factor, rounds=ask.max_tokens // (self.drafted + 1))]


def reply(prompt: int, drafted: int, factor: float, rounds: int = 8) -> Reply:
    times = [0.01 * prompt * factor]
    for _ in range(rounds):
        times.append(times[-1] + (0.03 if drafted else 0.02) * factor)
    lengths, nodes = [1] + [drafted + 1] * rounds, [0] + [drafted] * rounds
    return Reply(prompt, list(range(sum(lengths))), "", times[-1], lengths, times, nodes, nodes)


def ask(contestants: Sequence[Contestant], known: Sequence[Answer] = (), again: bool = True) -> list[Answer]:
    answers = list(known)
    groups = grouped([(question, 1) for question in QUESTIONS], 1)
    prompt = lambda question, _: list(range(len(question.turns[0])))  # noqa: E731
    runner = Runner(contestants, groups, Options(max_tokens=40, warm_up=1), prompt, known=list(known), again=again,
                    record=answers.extend)  # fmt: skip
    assert runner.run()
    return answers


def of(answers: Sequence[Answer], method: str) -> list[Answer]:
    return [answer for answer in answers if answer.method == method]


def test_a_slow_answer_is_asked_again_and_does_not_move_the_total() -> None:
    quiet = ask([Clocked("none"), Clocked("sam", 4)])
    none, sam = Clocked("none", slow=[7]), Clocked("sam", 4, slow=[12, 20])
    visited = ask([none, sam])
    assert tokens_per_second(of(visited, "sam")) == tokens_per_second(of(quiet, "sam"))
    assert speedup(of(visited, "sam"), of(visited, "none")) == speedup(of(quiet, "sam"), of(quiet, "none"))
    (one,) = [answer for answer in of(visited, "none") if answer.attempts]
    assert one.attempts == pytest.approx([4 * one.seconds, one.seconds, one.seconds])
    assert none.calls == len(QUESTIONS) + 1 + AGAIN
    assert none.forgot == 1 + AGAIN, "an answer must not be drafted from the attempt before"
    rows = [row for row in summarize(visited, {}, resamples=2) if row["category"] == "overall"]
    assert [row["repeated"] for row in rows] == [1, 2]
    said = "3 of 60 answers were late and were each asked twice more: late is 1.5 times what"
    assert repeated(visited).startswith(said)
    assert repeated(quiet) == ""
    assert disturbances(visited, []) == disturbances(quiet, []) == []
    bent = ask([Clocked("none", slow=[7]), Clocked("sam", 4, slow=[12, 20])], again=False)
    assert tokens_per_second(of(bent, "sam")) != tokens_per_second(of(quiet, "sam"))


def test_a_neighbour_who_stays_is_reported_and_not_chased_for_ever() -> None:
    """Every third answer is slow, and the next one too: asking again is given up, and the run says what it is."""
    slow = [call for call in range(10, 400) if call % 9 < 4]
    noisy = Clocked("none", slow=slow)
    answers = ask([noisy])
    assert noisy.calls <= len(QUESTIONS) + 1 + AGAIN * 7
    (line,) = disturbances(answers, [])
    assert "answers took more than 1.5 times as long as their rounds predict" in line


def test_a_run_that_goes_on_knows_how_long_rounds_take() -> None:
    half = [answer for answer in ask([Clocked("none")]) if int(answer.question) < 15]
    whole = ask([Clocked("none", slow=[1])], known=half)  # the first call is the warm-up
    assert sum(bool(answer.attempts) for answer in whole) == 1


def answer(*turns: Reply, question: int = 0, method: str = "sam", group: int | None = None) -> Answer:
    return Answer(method, 0, str(question), "qa", "qa", question if group is None else group, list(turns))


def test_what_rounds_predict() -> None:
    seen = [answer(reply(40, 4, 1), reply(40, 0, 1), question=i) for i in range(6)]
    pace = Pace(seen)
    for prompt, drafted, factor, is_late in [
        (40, 4, 1.4, False),
        (40, 4, 1.6, True),
        (50, 4, 1.6, True),  # about as long
        (400, 4, 1.2, False),  # nothing is known of such prompts
        (40, 40, 9, False),  # nor of such drafts: only its prompt is late, and not for long
    ]:
        known = answer(reply(prompt, drafted, 1 if drafted == 40 else factor))
        assert pace.is_late(known) == is_late, (prompt, drafted, factor)
    assert not Pace(seen[:2]).is_late(answer(reply(40, 4, 9))), "two answers are no measure of a prompt's time"
    assert not pace.is_late(answer(Reply(40, [1, 2], "", 99.0))), "an engine that does not tell its rounds"
    quick = [answer(reply(1, 0, 0.01, rounds=2), question=i) for i in range(6)]
    assert not Pace(quick).is_late(answer(reply(1, 0, 0.1, rounds=2))), "a few milliseconds are no disturbance"


def test_answers_of_a_batch_are_not_judged_alone() -> None:
    slow = answer(reply(40, 0, 4), question=9)
    answers = [answer(reply(40, 0, 1), question=i) for i in range(8)]
    assert late([*answers, slow]) == [slow]
    assert late([*answers, slow, answer(reply(40, 0, 4), question=10, group=9)]) == []
