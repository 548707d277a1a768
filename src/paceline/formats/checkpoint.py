"""Checkpoint: a model as its files have it."""

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

    weights              as they are stored, by the checkpoint's names (`weight_shapes`).
    ends                 tokens that end an answer.
    made_from            fingerprint of the weights before they were quantised.
    dtype                its own dtype; None: its weights'.
    inverse_frequencies  [head_dim / 2] of the rotation; None: the configuration's.
    sampling             values of SamplingParams that it recommends.
    remarks              lines that a user should read."""

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
        """Merge an adapter into the checkpoint, if there is one."""
        if adapter is None:
            return self
        config, weights = adapter.applied(self.config, self.weights)
        return replace(
            self, config=config, weights=weights, made_from=fingerprint(weights), remarks=[adapter.remark]
        )
