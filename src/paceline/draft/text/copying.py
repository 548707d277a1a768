"""Steps that drafters share who copy from a row's own text. Knows rows and tokens; proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.row import Request
from paceline.tree import IntArray


def continuation(text: IntArray, start: int, count: int) -> IntArray:
    """`count` tokens that follow `text[:start]`, start < len(text).

    Where the text ends the copy reads on from what it has just written, as LZ77 does: a text that repeats
    itself is continued in its period."""
    return text[start : start + count] if start + count <= len(text) else np.resize(text[start:], count)


def end_tokens(row: Request, eos_token_ids: Sequence[int]) -> frozenset[int]:
    """Tokens that end this row's answer."""
    return frozenset(row.params.stop_token_ids).union(() if row.params.ignore_eos else eos_token_ids)


def up_to_end(drafted: IntArray, ends: frozenset[int], *, keep: bool) -> IntArray:
    """`drafted` up to the first token of `ends`, with it if `keep`: nothing behind an end can be accepted."""
    for i, token in enumerate(drafted.tolist()):
        if token in ends:
            return drafted[: i + keep]
    return drafted
