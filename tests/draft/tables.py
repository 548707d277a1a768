"""Targets made of a rule, for drafters."""

import numpy as np

from tests.fakes import TableTarget


def counting(vocab_size, eos=()):
    """A target that counts on: t, t + 1, ..., and then again from 0."""
    return TableTarget(
        vocab_size,
        order=1,
        eos=eos,
        logits=lambda prefix: -((np.arange(vocab_size) - prefix[-1] - 1) % vocab_size).astype(float),
    )
