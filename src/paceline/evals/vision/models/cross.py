"""Cross encoders: BLIP's image-text matching head, which reads a picture and a caption together.

The official evaluation uses BLIP's contrastive head alone (`transformers:PATH` here); this is the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from paceline.errors import ModelError
from paceline.evals.vision.models.towers import Towers


class Matching:
    """Logit of "matches" minus that of "does not", for every picture and caption."""

    def __init__(self, path: str, device: str = "cpu", dtype: str = "float32"):
        self._towers = Towers.load(path, device, dtype)
        if not self._towers.blip:
            raise ModelError(
                f"{path} has no image-text matching head: it is a {self._towers.model.config.model_type}, not a blip"
            )

    def describe(self) -> dict[str, Any]:
        return self._towers.describe()

    @torch.inference_mode()
    def pair_scores(self, pictures: Sequence[Image.Image], captions: Sequence[str]) -> NDArray[np.float32]:
        """(pictures, captions)."""
        towers = self._towers
        pixels = torch.from_numpy(towers.pixels(pictures)).to(towers.device)
        states = towers.model.vision_model(pixel_values=towers.normalise(pixels)).last_hidden_state
        tokens = towers.tokens(captions)
        rows = []
        for state in states:
            seen = state.expand(len(captions), *state.shape)
            joint = towers.model.text_encoder(
                **tokens,
                encoder_hidden_states=seen,
                encoder_attention_mask=torch.ones(seen.shape[:2], device=towers.device),
            ).last_hidden_state[:, 0]
            logits = towers.model.itm_head(joint).float()
            rows.append((logits[:, 1] - logits[:, 0]).cpu().numpy())
        return np.stack(rows)
