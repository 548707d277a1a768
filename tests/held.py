"""What an object holds of rows: for tests that nothing stays of those that have left."""

import torch

from paceline.target.cache import RaggedCache


def held(part, depth=4):
    """Entries that an object and its parts hold by row, and rows in their caches."""
    if isinstance(part, RaggedCache):
        return len(part.held)
    if isinstance(part, dict):
        return held({*part}) + sum(held(value, depth - 1) for value in part.values())
    if isinstance(part, set):
        return sum(isinstance(key, int) for key in part)
    if isinstance(part, list) and len(part) < 100:
        return sum(held(value, depth - 1) for value in part)
    if depth > 0 and hasattr(part, "__dict__") and not isinstance(part, type | torch.Tensor | torch.nn.Module):
        return held(vars(part), depth)
    return 0
