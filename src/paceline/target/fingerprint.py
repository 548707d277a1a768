"""A fingerprint of a model's weights, 16 hexadecimal digits: drafters are trained for one model and no other.

    fingerprint({"model.norm.weight": tensor, ...})

It reads a sample of every tensor, rounded to bfloat16, so it does not depend on dtype or device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from paceline.target.quantised.blocks import Blocks

SAMPLE = 64
"""Numbers read of every tensor: fine-tuning in bfloat16 leaves many unchanged, but not all of a model's."""


def fingerprint(weights: Mapping[str, torch.Tensor | Blocks]) -> str:
    """The fingerprint of tensors by name, their names and shapes included; of blocks their bytes are sampled."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        flat = weight.data.reshape(-1) if isinstance(weight, Blocks) else weight.detach().reshape(-1)
        few = flat[:: max(len(flat) // SAMPLE, 1)][:SAMPLE].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(weight.shape)}".encode() + few.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
