"""A matrix of two parameters, of which the suite has pairs in which each value occurs; the others are slow."""

import pytest


def paired(first, second):
    """For `parametrize`; a tuple is values of several parameters. Every value of the longer list comes once with one of
    the shorter, in turn; all other pairs are marked `slow`."""
    one, other = ([value if isinstance(value, tuple) else (value,) for value in values] for values in (first, second))
    short = min(len(one), len(other))
    return [
        pytest.param(*a, *b, marks=[] if i % short == j % short else [pytest.mark.slow])
        for i, a in enumerate(one)
        for j, b in enumerate(other)
    ]
