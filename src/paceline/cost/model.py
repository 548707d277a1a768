"""The cost model: from accepted lengths to a speed-up.

A round is a draft and the forward of the target that verifies it. Costs without a unit are in plain decoding steps; a
speed-up is over plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def chain_tokens(acceptance: Sequence[float]) -> float:
    """Expected tokens of a round that drafts a chain, the target's own included.

    acceptance[j]: probability that token j + 1 is accepted, given that all before it are (Leviathan et al. 2023,
    equation 1, with a rate for every depth)."""
    return 1.0 + float(np.cumprod(np.asarray(acceptance, float)).sum())


def speedup(
    tokens: float, *, verify: float = 1.0, calls: float = 0.0, call: float = 0.0, overhead: float = 0.0
) -> float:
    """Tokens of a round over its cost: a verification, `calls` draft calls of `call` each, and `overhead`, all in
    plain decoding steps (Leviathan et al. 2023, theorem 3.8, with the verification's own cost)."""
    return tokens / (verify + calls * call + overhead)


def memory_bound_speedup(tokens: float, calls: float, draft_bytes: float, target_bytes: float) -> float:
    """MBSU: the speed-up if a forward cost the bytes it reads and nothing else (VocabTrim, Goel et al. 2025)."""
    return speedup(tokens, calls=calls, call=draft_bytes / target_bytes if calls else 0.0)


def round_cost(tokens: float, speedup: float) -> float:
    """R: cost of a round, in plain decoding steps. Tokens a round depend on the text, R on the machine."""
    return tokens / speedup
