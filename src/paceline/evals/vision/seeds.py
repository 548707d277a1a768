"""Random numbers that depend on what they are for, not on what was drawn before: child("7", "count", 12, "colours")."""

from __future__ import annotations

import hashlib

import numpy as np


def child(*role: object) -> np.random.Generator:
    """A generator of its own for `role`: a build's seed, the case, and what is chosen there."""
    name = "/".join(map(str, role)).encode()
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(name).digest()[:16], "big")))
