"""A model in training as the engine's target, with its present weights.

The native decoder has its own layout of the weights, so a new one is made after every step; this copy costs little
compared with a rollout. On accelerators, where two copies may not fit, and for models that the native decoder does not
know, transformers' code runs on the weights themselves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from paceline.formats.checks import unsupported
from paceline.formats.experts import as_checkpoint
from paceline.formats.folder import untied
from paceline.formats.shape import weight_shapes
from paceline.target.base import Target
from paceline.target.decoder import Decoder
from paceline.target.hf import HFTarget


class Policy:
    """An engine for a model whose weights change. Its drafter keeps what it has learnt.

    model      a transformers causal language model.
    max_batch  answers decoded at once.
    dtype      of the native decoder's copy of the weights; None: the model's."""

    def __init__(
        self, model: Any, draft: str | Drafter, *, eos_token_ids: Sequence[int], max_batch: int,
        prefill_chunk: int = 4096, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        self.model, self.eos_token_ids, self._dtype = model, tuple(eos_token_ids), dtype or model.dtype
        self._native = model.device.type == "cpu" and _fits(model)
        with _evaluating(model):
            self._engine = Engine(self._target(), draft, max_batch=max_batch, prefill_chunk=prefill_chunk)

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """The engine with the present weights, which must not change inside. All rows must have ended at the end."""
        with _evaluating(self.model):
            target = self._engine.target
            if self._native:
                target = self._target()
            self._engine.with_weights_of(target)
            yield self._engine

    def _target(self) -> Target:
        """The model with its present weights."""
        if not self._native:
            return HFTarget(self.model, name="the policy", eos_token_ids=self.eos_token_ids)
        state = as_checkpoint(self.model.state_dict())
        config = untied(self.model.config, state)
        weights = {name: state[name].detach().to(self._dtype, copy=True) for name in weight_shapes(config)}
        return Decoder(config, weights, name="the policy", dtype=self._dtype, eos_token_ids=self.eos_token_ids)


def _fits(model: Any) -> bool:
    """Whether the native decoder can run it: a plain model of its families, without adapters."""
    state = as_checkpoint(model.state_dict())
    return unsupported(model.config) is None and weight_shapes(model.config).keys() <= state.keys()


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside; the old mode after it."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)
