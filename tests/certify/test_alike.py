"""Which tokens of two servers are one, so that only their log-probabilities are compared."""


import pytest

from paceline.certify.asking import Noise, compare
from paceline.certify.verdict import Divergence
from paceline.net.completion import Completion

BODY = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 2, "presence_penalty": 0.8}


def reply(text, *tokens):
    """Each token with the best ones at its place, itself among them."""
    made = [
        {
            "token": token, "logprob": top[token],
            "top_logprobs": [{"token": one, "logprob": value} for one, value in top.items()],
        }
        for token, top in tokens
    ]
    return Completion(text, finish_reason="length", logprobs=made)


def divergence(mine, right):
    found = compare(mine, right, BODY, Noise(0.06))
    return None if found is None else Divergence(0, company="alone", **found)


def test_tokens_that_differ_by_a_space_are_two_and_may_tie_after_penalties():
    """As bfloat16 has it: " Th" has been said before, so that a penalty of 0.8 brings the two within 0.04."""
    first = (" Th", {" Th": -0.1, "A": -2.4})
    top = {" Th": -0.482, "Th": -1.244}
    one = divergence(reply(" Th Th", first, (" Th", top)), reply(" ThTh", first, ("Th", top)))
    assert (one.said, one.best, one.why) == (" Th", "Th", "")
    assert one.gap == pytest.approx(0.038, abs=1e-3)
    assert one.is_tie


def test_a_server_that_leaves_spaces_out_says_the_same():
    bare = reply("The cat", ("The", {"The": -0.1}), ("cat", {"cat": -0.5}))
    assert divergence(bare, reply(" The cat", (" The", {" The": -0.1}), (" cat", {" cat": -0.5}))) is None
    far = divergence(bare, reply(" The cat", (" The", {" The": -0.1}), (" cat", {" cat": -1.5})))
    assert not far.is_tie  # one token, and two log-probabilities
