"""Checkpoint: a model as its files hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PretrainedConfig

from paceline.formats.adapter import Adapter
from paceline.formats.folder import fingerprint
from paceline.kernels.blocks import Weights


@dataclass(frozen=True)
class Checkpoint:
    """A model of a family that the native decoder runs.

    weights              by the checkpoint's names, `weight_shapes` of the configuration, as they are stored.
    ends                 tokens that end an answer.
    made_from            fingerprint of the weights before they were quantised.
    dtype                its own dtype; None: that of its weights.
    inverse_frequencies  [head_dim / 2] of the rotation, instead of the configuration's.
    sampling             how it says that tokens are to be drawn.
    remarks              what a user should read of it."""

    name: str
    config: PretrainedConfig
    weights: Weights = field(repr=False)
    ends: Sequence[int]
    made_from: str
    dtype: torch.dtype | None = None
    inverse_frequencies: torch.Tensor | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    remarks: Sequence[str] = ()

    def merged(self, adapter: Adapter | None) -> Checkpoint:
        """The checkpoint with the changes of an adapter, if there is one."""
        if adapter is None:
            return self
        config, weights = adapter.applied(self.config, self.weights)
        return replace(
            self, config=config, weights=weights, made_from=fingerprint(weights), remarks=[adapter.remark]
        )
