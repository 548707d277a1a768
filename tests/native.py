"""Random native decoders of every family beside the transformers model they were made from, without touching disk."""

import numpy as np
import torch

from paceline.core.segment import Segment
from paceline.formats.experts import as_checkpoint
from paceline.formats.precision import quantised
from paceline.formats.shape import weight_shapes
from paceline.target.decoder import Decoder
from tests import models
from tests.paths import DEVICE

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
"""Changes that make a model small enough for thousands of forwards a second."""


def of(model, dtype=torch.float32, eos=(models.EOS,), precision=None):
    """The native decoder with the weights of `model`, in blocks of `precision` if it is given."""
    state = as_checkpoint(model.state_dict())
    weights = {name: state[name] for name in weight_shapes(model.config)}
    blocks = quantised(weights, precision) if precision else {**weights}
    return Decoder(model.config, blocks, dtype=dtype, device="cpu" if precision else DEVICE, eos_token_ids=eos)


def pair(family, dtype=torch.float32, **changes):
    """A native decoder and the float32 transformers model with the same weights."""
    model = models.model(family, **changes)
    return of(model, dtype), model


TEXT = [5, 17, 200, 31, 5, 17, 9, 44, 45, 46, 270, 31]


def logits(target):
    """Logits [12, V] after every token of TEXT, on a row of its own."""
    segment = Segment.chunk(target.add_row(len(TEXT)), np.array(TEXT), last=True)
    segment.num_logits = len(TEXT)
    return target.verify([segment]).logits.float()


def off(one, other):
    """Root of the mean square of the difference, relative to that of `other`."""
    return float((one - other).norm() / other.norm())
