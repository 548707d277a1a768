"""past-answer: the answer to the same prompt, in pieces, until it differs."""

import numpy as np

from paceline.draft.registry import create
from tests.asks import asked
from tests.draft.rows import draft_of, letters, row, target, tokens


def taught(spec="past-answer", *answers):
    drafter = create(spec)
    drafter.bind(target())
    for id, (prompt, answer) in enumerate(answers):
        one = row(prompt, id=100 + id)
        drafter.start(one)
        one.extend(tokens(answer))
        one.finish_reason = "stop"
        drafter.drop(one)
    return drafter


def test_it_proposes_the_whole_answer_to_the_same_prompt():
    drafter = taught("past-answer", ("who?", "the cat"), ("what?", "a hat"))
    assert draft_of(drafter, "who?") == "the cat"
    assert draft_of(drafter, "who? ") == ""
    assert draft_of(drafter, "who?", room=4) == "the"


def test_it_goes_on_where_the_answer_is_the_same_and_is_silent_after():
    drafter = taught("past-answer,draft=3", ("who?", "the cat sat"))
    one = row("who?")
    drafter.start(one)
    for gained, proposed in (("", "the"), ("the ", "cat"), ("c", "at "), ("u", ""), ("t sat", "")):
        one.extend(tokens(gained))
        [tree] = drafter.propose(asked(one))
        assert letters(tree.tokens[1:]) == proposed


def test_the_last_answer_counts_and_the_oldest_is_forgotten():
    drafter = taught("past-answer,past=8", ("a", "old"), ("b", "1234"), ("a", "new"), ("c", "xx"))
    assert [draft_of(drafter, prompt) for prompt in "abc"] == ["new", "", "xx"]


def test_an_answer_that_was_given_up_is_not_remembered():
    drafter = taught("past-answer", ("who?", "the cat"))
    one = row("who?")
    drafter.start(one)
    one.extend(tokens("the d"))
    one.finish_reason = "abort"
    drafter.drop(one)
    assert draft_of(drafter, "who?") == "the cat"


def test_an_answer_that_a_row_brings_along_comes_first_and_is_not_remembered():
    drafter = taught("past-answer", ("a", "remembered"))
    one = row("a")
    one.past = np.array(tokens("brought"))
    drafter.start(one)
    [tree] = drafter.propose(asked(one))
    assert letters(tree.tokens[1:]) == "brought"
    one.extend(tokens("xyz"))
    one.finish_reason = "stop"
    drafter.drop(one)
    assert draft_of(drafter, "a") == "remembered"
    none = np.empty(0, np.int64)
    two = row("a", id=2)
    two.past = none
    drafter.start(two)
    assert drafter.propose(asked(two))[0].num_drafted == 0


def test_pieces_begin_small_and_double_while_they_stand():
    drafter = taught("past-answer,first=2,draft=6", ("who?", "abcdefghijklmnopqrstu"))
    one = row("who?")
    drafter.start(one)
    proposed = []
    while piece := letters(drafter.propose(asked(one))[0].tokens[1:]):
        proposed.append(piece)
        one.extend(tokens("abcdefghijklmnopqrstu"[one.num_new : one.num_new + len(piece) + 1]))
    assert proposed == ["ab", "def", "hijklm", "opqrst"], "the token after each is the target's own"
