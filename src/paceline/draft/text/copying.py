"""Continuations of a text and cuts at end tokens, for drafters that copy."""

import numpy as np

from paceline.core.tree import IntArray


def continuation(text: IntArray, start: int, count: int) -> IntArray:
    """The `count` tokens that follow `text[:start]`, start < len(text).

    At the end of the text the copy goes on from its own beginning, as in LZ77: a periodic text continues its period."""
    return text[start : start + count] if start + count <= len(text) else np.resize(text[start:], count)


def up_to_end(drafted: IntArray, ends: frozenset[int], *, keep: bool) -> IntArray:
    """`drafted` up to the first token of `ends`, with that token if `keep`."""
    for i, token in enumerate(drafted.tolist()):
        if token in ends:
            return drafted[: i + keep]
    return drafted
