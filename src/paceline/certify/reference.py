"""Reference: what the model alone says, by transformers' own code, whole texts at a time, without cache or drafts.

A model with weights of eight and four bits transformers does not have: its reference is `PlainDecoding`, ours.
`Reference` shares nothing with the engines under test but the weights, and, with ours, the definition of temperature
and filters (`paceline.engine.sampling.warp`), which has tests of its own against transformers' processors.

    reference = Reference.load("models/demo", dtype="float32")
    reference.after([[1, 2, 3], [1, 2, 4]])      # logits of the next token, [2, V]
    reference.along([1, 2, 3, 4, 5], start=3)    # of tokens 3 and 4, [2, V]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from paceline.engine.round import Segment
from paceline.target.base import Target
from paceline.target.load import DTYPES
from paceline.workbench.peers.setup import folder_of
from paceline.workbench.peers.transformers import load_model

TOKENS = 4096
"""Most tokens in one forward."""


class Model(Protocol):
    """What says what should have been said."""

    def after(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of the token after each text, [N, V]; the texts are equally long."""

    def along(self, text: Sequence[int], start: int) -> torch.Tensor:
        """Logits of the tokens `start`.. of a text, [len(text) - start, V]."""


class Reference:
    """A transformers model, in evaluation mode."""

    def __init__(self, model: Any):
        self.model = model

    @classmethod
    def load(cls, model: str, *, dtype: str, device: str | torch.device = "cpu") -> Reference:
        """The model in a folder or on the hub; ModelError if transformers cannot load it."""
        return cls(load_model(str(folder_of(model)), DTYPES[dtype]).to(device))

    @torch.inference_mode()
    def after(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of the token after each text, float32 [N, V]; the texts are equally long."""
        at_once = max(1, TOKENS // max(len(texts[0]), 1))
        parts = [texts[i : i + at_once] for i in range(0, len(texts), at_once)]
        return torch.cat([self._run(part, 1)[:, -1].float().cpu() for part in parts])

    @torch.inference_mode()
    def along(self, text: Sequence[int], start: int) -> torch.Tensor:
        """Logits of the tokens `start`.. of a text, float32 [len(text) - start, V]."""
        if start >= len(text):
            return torch.empty(0, 1)
        return self._run([text[:-1]], len(text) - start)[0].float().cpu()

    def _run(self, texts: Sequence[Sequence[int]], keep: int) -> torch.Tensor:
        ids = torch.tensor([list(text) for text in texts], device=self.model.device)
        out: torch.Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
        return out


class PlainDecoding:
    """Our own decoder, without drafts: a text's beginning in one forward, and then one token a forward, alone."""

    def __init__(self, target: Target):
        self.target = target

    def after(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of the token after each text, float32 [N, V]."""
        return torch.stack([self._read(text, len(text) - 1)[-1] for text in texts])

    def along(self, text: Sequence[int], start: int) -> torch.Tensor:
        """Logits of the tokens `start`.. of a text, float32 [len(text) - start, V]."""
        return self._read(text[:-1], start) if start < len(text) else torch.empty(0, 1)

    def _read(self, text: Sequence[int], start: int) -> torch.Tensor:
        """Logits after `text[:start]` and after every token from there on, float32."""
        slot, out = self.target.add_row(len(text)), []
        start = max(start, 1)
        for piece in (text[:start], *([token] for token in text[start:])):
            verdict = self.target.verify([Segment.chunk(slot, np.array(piece), last=True)])
            self.target.commit(slot, range(len(piece)))
            out.append(verdict.logits.float().cpu())
        self.target.drop_row(slot)
        return torch.cat(out)
