"""Looping: the one definition of an output that has run into a loop.

Small models and greedy decoding loop easily, and a loop is the easiest text there is to draft: a speed-up measured on
looping outputs says little. So every table that shows a speed-up says how many outputs loop.
"""

from collections.abc import Sequence

WINDOW, MAX_NGRAM = 64, 16


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether the last WINDOW tokens are covered by repeats of one n-gram of at most MAX_NGRAM tokens.

    The n-gram may begin anywhere in the window. An output shorter than the window does not loop."""
    tail = list(tokens[-WINDOW:])
    return len(tail) == WINDOW and any(tail[n:] == tail[:-n] for n in range(1, MAX_NGRAM + 1))
