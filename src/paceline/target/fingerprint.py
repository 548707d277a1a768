"""Which weights a model has, in 16 hexadecimal digits: what was trained for one model is not for another.

    fingerprint({"model.norm.weight": tensor, ...})

A sample of every tensor is looked at, rounded to bfloat16, so the digits do not depend on the dtype or the device a
checkpoint was loaded with. Knows no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

SAMPLE = 64
"""Numbers looked at of every tensor. A fine-tuning in bfloat16 leaves many as they are, but not all of a model's."""


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """Of tensors by name; names and shapes count too."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        flat = weight.detach().reshape(-1)
        few = flat[:: max(len(flat) // SAMPLE, 1)][:SAMPLE].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(weight.shape)}".encode() + few.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
