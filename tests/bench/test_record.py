"""A run's answers as they are written and read back. What a folder survives is tested with `runs.runs`."""

import json

import pytest
from tests.bench.turns import reply

from paceline.bench.record import Answer, read_answers, settled
from paceline.errors import PacelineError


def answer(question="q", **changes):
    turn = reply(5, [1, 2, 3], "text", 0.25, lengths=[1, 2], times=[0.1, 0.25], runs=[("", "te", 1), ("sam", "xt", 2)])
    return Answer(**{"method": "sam", "repeat": 0, "question": question, "category": "c", "task": "t", "group": 0,
                     "turns": [turn], **changes})  # fmt: skip


def test_answers_are_read_back_as_they_were_written_but_for_a_line_that_was_cut_off(tmp_path):
    file, answers = tmp_path / "answers.jsonl", [answer("a"), answer("b", failed="no room")]
    file.write_text("".join(json.dumps(one.row()) + "\n" for one in answers) + '{"method": "sa')
    assert [one.row() for one in read_answers(file)] == [one.row() for one in answers]
    assert [one.turns[0].times for one in read_answers(file)] == [[0.1, 0.25]] * 2
    assert list(read_answers(tmp_path / "none")) == []


def test_a_line_that_is_no_answer_is_named(tmp_path):
    (tmp_path / "answers.jsonl").write_text(json.dumps(answer().row()) + '\n{"method": "sam"}\n')
    with pytest.raises(PacelineError, match=r"answers.jsonl, line 2: not an answer"):
        list(read_answers(tmp_path / "answers.jsonl"))


def test_a_failure_that_was_made_good_is_forgotten():
    bad, good, other = answer("a", failed="x"), answer("a"), answer("b", failed="y")
    assert settled([bad, good, other]) == [good, other]
