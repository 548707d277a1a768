"""How much of an answer is another one's, token by token: the E and P of Zhang et al. 2025 (arXiv 2510.22876).

The paper compares texts that it encodes again, and fails on what a program writes after an end token. Here token ids
are compared, up to and with the first end token.

    exact([5, 6, 7], [5, 6, 7])           # True
    partial([5, 6, 9], [5, 6, 7])         # 2 / 3
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def exact(tokens: Sequence[int], reference: Sequence[int], ends: Collection[int] = ()) -> bool:
    """E of one answer: whether it is the reference, token for token."""
    return up_to_end(tokens, ends) == up_to_end(reference, ends)


def partial(tokens: Sequence[int], reference: Sequence[int], ends: Collection[int] = ()) -> float:
    """P of one answer: how many tokens at its beginning are the reference's, over the reference's number.

    Low from the first token on: positions or masks are wrong. A good beginning that drifts: the cache is."""
    mine, other = up_to_end(tokens, ends), up_to_end(reference, ends)
    same = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    return same / len(other) if other else float(not mine)


def up_to_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """The tokens up to and with the first that ends an answer."""
    return list(tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))])
