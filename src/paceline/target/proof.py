"""The proof that a transformers model can be a target: verified on our cache its logits are those of plain forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from paceline.errors import ModelError
from paceline.round import Segment

if TYPE_CHECKING:
    from paceline.target.hf import HFTarget

TOLERANCE, ROUNDING, NOISE, LIMIT = 1e-3, 8.0, 4.0, 0.2
"""Largest error in the proof, as a share of the effect of seeing wrong tokens: the largest of TOLERANCE, ROUNDING times
the precision of the dtype, and NOISE times the error between two plain forwards; but never more than LIMIT."""


def one_line(error: Exception) -> str:
    """The message of a library's error, in one line of at most 200 characters."""
    if isinstance(error, KeyError) or not str(error).strip():
        return repr(error)
    return " ".join(str(error).split())[:200]


class Example:
    """The proof: plain forwards of three short texts, and the same from our cache.

    Row 0 is a longer prefix and one node. Row 1 is a shorter prefix and a wide tree: a root, siblings, and a leaf
    below the last of them, so that the leaf's place in the cache is far from its position in the text. The third text
    is row 1 if the leaf saw all siblings: its difference from row 1 is the size of an error that matters. The
    difference between two plain forwards in this precision is the size of an error that does not."""

    SIBLINGS = 12

    @torch.inference_mode()
    def __init__(self, target: HFTarget):
        self.model, self.name = target.model, f"{target.name} ({target.model.config.model_type})"
        vocab = self.model.config.get_text_config(decoder=True).vocab_size
        some = np.arange(1, 100) * 7919 % vocab
        self.prefix, self.tree, self.after = some[:3], some[3 : 5 + self.SIBLINGS], some[40]
        self.parent = np.array([-1, *[0] * self.SIBLINGS, self.SIBLINGS])
        self.path = [0, self.SIBLINGS, self.SIBLINGS + 1]
        wrong = [*self.prefix, *self.tree]
        right = [*self.prefix, *self.tree[self.path], self.after]
        self.long = some[50 : 50 + len(wrong)]
        texts = np.array([self.long, [*right, *some[60 : 60 + len(wrong) - len(right)]], wrong])
        self.text = torch.from_numpy(texts).to(target.device)
        cache: Any = DynamicCache(config=self.model.config)
        try:
            self.logits = self._plain(self.text, cache)
        except Exception as error:  # the model's own code may raise anything
            raise ModelError(
                f"{self.name} cannot be a target: a plain forward with transformers' own cache fails: {one_line(error)}"
            ) from error
        if any(getattr(layer, "keys", None) is None for layer in cache.layers):
            raise ModelError(f"{self.name} cannot be a target: it does not keep its keys and values in a cache")
        shapes = {(*layer.keys.shape[1::2], *layer.values.shape[1::2]) for layer in cache.layers}
        if len(shapes) != 1 or len(cache.layers) != target.num_layers:
            raise ModelError(f"{self.name} cannot be a target: its layers keep keys and values of different shapes")
        ((self.kv_heads, self.head_dim, *values),) = shapes
        if values != [self.kv_heads, self.head_dim]:
            raise ModelError(f"{self.name} cannot be a target: its keys and values have different shapes")
        self.kv_dtype = cache.layers[0].keys.dtype

    def _plain(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        return self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits.float()

    def compare(self, target: HFTarget) -> None:
        """ModelError unless the logits of `target` agree with the plain forwards'; with our mask at the beginning of a
        prompt, if the model's own is not right there."""
        error, allowed = self._error(target)
        if not error <= allowed:
            target.masks_itself = False
            error, allowed = self._error(target)
        if not error <= allowed:
            raise ModelError(
                f"{self.name} cannot be a target: verified as a tree its logits are wrong, by {error:.2g} times "
                "the effect of a wrong context; it makes its mask or positions itself and ignores those given"
            )

    def _error(self, target: HFTarget) -> tuple[float, float]:
        """The error of the worst node, and what is allowed."""
        slots = [target.add_row(0) for _ in range(2)]
        try:
            error, noise = self.errors(target, slots)
        except ModelError:
            raise
        except Exception as failure:  # the model's own code may raise anything
            raise ModelError(
                f"{self.name} cannot be a target: its code does not run on a cache, positions and a mask from outside"
            ) from failure
        finally:
            for slot in slots:
                target.drop_row(slot)
        return error, min(max(TOLERANCE, ROUNDING * torch.finfo(target.dtype).eps, NOISE * noise), LIMIT)

    @torch.inference_mode()
    def errors(self, target: HFTarget, slots: Sequence[int]) -> tuple[float, float]:
        """Root mean square errors of the worst node, ours and of another plain forward, relative to the effect of
        seeing what must not be seen."""
        a, b = slots
        for slot, tokens in ((a, self.long[:-1]), (b, self.prefix)):
            target.verify([Segment.chunk(slot, tokens, False)])
            target.commit(slot, range(len(tokens)))
        tree = Segment(b, self.tree, self.parent, num_logits=len(self.tree))
        verdict = target.verify([Segment.chunk(a, self.long[-1:], True), tree])
        target.commit(b, self.path)
        last = target.verify([Segment.chunk(b, np.array([self.after]), True)])
        ours = torch.cat([verdict.of(0), verdict.of(1)[self.path], last.of(0)]).float()
        plain = torch.cat([self.logits[0, -1:], self.logits[1, 3:7]])
        cache = DynamicCache(config=self.model.config)
        again = torch.cat([self._plain(self.text[1:2, :3], cache), self._plain(self.text[1:2, 3:7], cache)], 1)[0]
        effect = _rms(self.logits[2, -1] - self.logits[1, 5]).clamp(min=1e-9)
        noise = _rms(again - self.logits[1, :7]).max()
        return float(_rms(ours - plain).max() / effect), float(noise / effect)


def _rms(difference: torch.Tensor) -> torch.Tensor:
    return difference.square().mean(-1).sqrt()
