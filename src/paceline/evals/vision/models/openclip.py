"""Dual encoders of open_clip, an optional package: `open_clip:ViT-B-32,pretrained=openai,quick_gelu=true`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from paceline.errors import ModelError
from paceline.target.load import device_named


class OpenClip:
    """A model with its own preprocessing. The activation is chosen by name, because weights do not say which they need:
    OpenAI's were trained with QuickGELU."""

    def __init__(self, architecture: str, pretrained: str = "openai", quick_gelu: bool = False, device: str = "cpu"):
        try:
            import open_clip
        except ImportError as error:
            raise ModelError(f"open_clip cannot be used ({error}): pip install open_clip_torch") from error
        self._quick_gelu, self._device = quick_gelu, device_named(device)
        try:
            self._model, _, self._preprocess = open_clip.create_model_and_transforms(
                architecture, pretrained=pretrained, force_quick_gelu=quick_gelu, device=self._device
            )
            self._tokenizer = open_clip.get_tokenizer(architecture)
        except (RuntimeError, OSError) as error:
            raise ModelError(
                f"open_clip cannot load {architecture}, {pretrained}: {str(error).splitlines()[0]}"
            ) from error
        self._model.eval()

    def describe(self) -> dict[str, Any]:
        activation = "quick_gelu" if self._quick_gelu else "as the architecture says"
        return {"model_type": "open_clip", "activation": activation, "preprocessing": str(self._preprocess)}

    @torch.inference_mode()
    def encode_images(self, pictures: Sequence[Image.Image]) -> NDArray[np.float32]:
        pixels = torch.stack([self._preprocess(picture) for picture in pictures]).to(self._device)
        return self._model.encode_image(pixels, normalize=True).float().cpu().numpy()

    @torch.inference_mode()
    def encode_texts(self, captions: Sequence[str]) -> NDArray[np.float32]:
        tokens = self._tokenizer(list(captions)).to(self._device)
        return self._model.encode_text(tokens, normalize=True).float().cpu().numpy()
