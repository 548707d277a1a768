"""Looping: the one definition of an output that has run into a loop.

Small models and greedy decoding loop easily, and a loop is the easiest text there is to draft: a speed-up measured on
looping outputs says little. So every table that shows a speed-up says how many outputs loop.
"""

from collections.abc import Sequence

WINDOW, MAX_NGRAM = 64, 16


def is_looping(tokens: Sequence[int], window: int = WINDOW, max_ngram: int = MAX_NGRAM) -> bool:
    """Whether the last `window` tokens are covered by repeats of one n-gram of at most `max_ngram` tokens.

    The n-gram may begin anywhere in the window. An output shorter than the window does not loop."""
    if len(tokens) < window:
        return False
    tail = list(tokens[len(tokens) - window :])
    return any(tail[n:] == tail[:-n] for n in range(1, min(max_ngram, window - 1) + 1))
