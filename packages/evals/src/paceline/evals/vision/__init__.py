"""SPEC (Peng et al. 2024): whether a vision-language model sees size, position, existence and count."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def child(*role: object) -> np.random.Generator:
    """A random generator that depends on its role alone, not on earlier draws.

    role: a build's seed, the case, and the choice to make, as in child(7, "count", 12, "colours")."""
    import numpy as np

    name = "/".join(map(str, role)).encode()
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(name).digest()[:16], "big")))
