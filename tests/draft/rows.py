"""Rows out of letters, for drafters that need no target."""

from types import SimpleNamespace

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from tests.asks import asked


def row(text: str, room: int = 100, id: int = 0, eos: str = "", **params: object) -> Row:
    """A row whose prompt is `text`, a letter a token, with room for `room` new tokens; eos: its target's end tokens."""
    wishes = SamplingParams(max_tokens=room, **params)  # type: ignore[arg-type]
    return Row(id, tokens(text), wishes, max_context=1 << 20, eos_token_ids=tokens(eos))


def tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def letters(tokens: object) -> str:
    return "".join(chr(token) for token in tokens)  # type: ignore[attr-defined]


def target(eos: str = "") -> SimpleNamespace:
    """All that a drafter of this kind asks of a target."""
    return SimpleNamespace(eos_token_ids=tuple(tokens(eos)))


def draft_of(drafter: object, text: str, room: int = 100, **params: object) -> str:
    """What a fresh row of `text` is offered, as letters."""
    one = row(text, room, **params)
    drafter.start(one)  # type: ignore[attr-defined]
    (tree,) = drafter.propose(asked(one))  # type: ignore[attr-defined]
    assert tree.tokens[0] == one.last_token
    one.finish_reason = "stop"
    drafter.drop(one)  # type: ignore[attr-defined]
    return letters(tree.tokens[1:])
