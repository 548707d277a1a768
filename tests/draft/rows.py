"""Rows out of letters, for drafters that need no target."""

from types import SimpleNamespace

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from tests.asks import asked


def row(text, room=100, id=0, eos="", **params):
    """A row whose prompt is `text`, a letter a token, with room for `room` new tokens; eos: its target's end tokens."""
    wishes = SamplingParams(max_tokens=room, **params)
    return Row(id, tokens(text), wishes, max_context=1 << 20, eos_token_ids=tokens(eos))


def tokens(text):
    return [ord(letter) for letter in text]


def letters(tokens):
    return "".join(chr(token) for token in tokens)


def target(eos=""):
    """All that a drafter of this kind asks of a target."""
    return SimpleNamespace(eos_token_ids=tuple(tokens(eos)))


def draft_of(drafter, text, room=100, **params):
    """What a fresh row of `text` is offered, as letters."""
    one = row(text, room, **params)
    drafter.start(one)
    (tree,) = drafter.propose(asked(one))
    assert tree.tokens[0] == one.last_token
    one.finish_reason = "stop"
    drafter.drop(one)
    return letters(tree.tokens[1:])
