"""Steps that copying drafters share. Knows tokens only."""

from __future__ import annotations

import numpy as np

from paceline.engine.tree import IntArray


def continuation(text: IntArray, start: int, count: int) -> IntArray:
    """`count` tokens that follow `text[:start]`, start < len(text).

    Where the text ends the copy reads on from what it has just written, as LZ77 does: a text that repeats
    itself is continued in its period."""
    return text[start : start + count] if start + count <= len(text) else np.resize(text[start:], count)


def up_to_end(drafted: IntArray, ends: frozenset[int], *, keep: bool) -> IntArray:
    """`drafted` up to the first token of `ends`, with it if `keep`: nothing after an end can be accepted."""
    for i, token in enumerate(drafted.tolist()):
        if token in ends:
            return drafted[: i + keep]
    return drafted
