"""Dual encoders of transformers (CLIP, SigLIP and their kin): pictures and captions as vectors of unit length.

towers = Towers.load("openai/clip-vit-base-patch32")
scores = towers.encode_images(pictures) @ towers.encode_texts(captions).T
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import ModelError
from paceline.target.load import device_named

KNOWN = ("clip", "siglip", "siglip2", "blip", "chinese_clip", "align", "flava", "metaclip_2")


class Towers:
    """A model, its tokenizer and its image processor."""

    def __init__(self, model: Any, tokenizer: Any, processor: Any, name: str = ""):
        self.model, self.tokenizer, self.processor, self.name = model, tokenizer, processor, name
        self.model.eval()

    @classmethod
    def load(cls, path: str, device: str = "cpu", dtype: str = "float32") -> Towers:
        """A folder, or a name on the hub. Raises ModelError if it is no dual encoder."""
        transformers.logging.set_verbosity_error()
        where = device_named(device)
        try:
            config = transformers.AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read as a model: {str(error).splitlines()[0]}") from error
        if config.model_type not in KNOWN:
            raise ModelError(f"{path} is a {config.model_type}; dual encoders known here: {', '.join(KNOWN)}")
        build = transformers.BlipForImageTextRetrieval if config.model_type == "blip" else transformers.AutoModel
        try:
            model: Any = build.from_pretrained(path, dtype=getattr(torch, dtype))
            processor = transformers.AutoImageProcessor.from_pretrained(path, backend="pil")
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error
        return cls(model.to(where), tokenizer, processor, path)

    def save(self, folder: Path) -> None:
        for part in (self.model, self.tokenizer, self.processor):
            part.save_pretrained(folder)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def blip(self) -> bool:
        return bool(self.model.config.model_type == "blip")

    def describe(self) -> dict[str, Any]:
        """What decides the scores beside the weights: activation and preprocessing."""
        settings = self.processor.to_dict()
        kept = ("size", "crop_size", "resample", "do_center_crop", "image_mean", "image_std")
        vision = getattr(self.model.config, "vision_config", None)
        return {
            "model_type": self.model.config.model_type,
            "activation": getattr(vision, "hidden_act", None),
            "preprocessing": {key: settings.get(key) for key in kept},
        }

    def pixels(self, pictures: Sequence[Image.Image]) -> NDArray[np.uint8]:
        """(n, 3, height, width): resized and cropped, not yet normalised, so that a set of them can be kept."""
        sized = self.processor(list(pictures), do_rescale=False, do_normalize=False, return_tensors="np")
        return np.asarray(sized["pixel_values"]).clip(0, 255).round().astype(np.uint8)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Bytes as the model wants them."""
        mean, std = (
            torch.tensor(v, device=pixels.device).view(1, 3, 1, 1)
            for v in (self.processor.image_mean, self.processor.image_std)
        )
        return ((pixels.float() / 255 - mean) / std).to(self.model.dtype)

    def embed_images(self, pixels: Tensor) -> Tensor:
        """(n, d) of unit length, of bytes as `pixels` makes them; with gradients if they are on."""
        inputs = self.normalise(pixels)
        if self.blip:
            states = self.model.vision_model(pixel_values=inputs).last_hidden_state[:, 0]
            return F.normalize(self.model.vision_proj(states), dim=-1)
        return F.normalize(_pooled(self.model.get_image_features(pixel_values=inputs)), dim=-1)

    def embed_texts(self, captions: Sequence[str]) -> Tensor:
        """(n, d) of unit length; captions longer than the model reads are cut."""
        tokens = self.tokens(captions)
        if self.blip:
            states = self.model.text_encoder(**tokens).last_hidden_state[:, 0]
            return F.normalize(self.model.text_proj(states), dim=-1)
        return F.normalize(_pooled(self.model.get_text_features(**tokens)), dim=-1)

    def tokens(self, captions: Sequence[str]) -> dict[str, Tensor]:
        config = self.model.config
        longest = getattr(getattr(config, "text_config", config), "max_position_embeddings", 77)
        # SigLIP was trained on captions of one length, padded to it.
        padding = "max_length" if config.model_type.startswith("siglip") else True
        given = self.tokenizer(
            list(captions), padding=padding, truncation=True, max_length=min(longest, 512), return_tensors="pt"
        )
        known = ("input_ids",) if config.model_type.startswith("siglip") else ("input_ids", "attention_mask")
        return {key: given[key].to(self.device) for key in known if key in given}

    @torch.inference_mode()
    def encode_images(self, pictures: Sequence[Image.Image]) -> NDArray[np.float32]:
        """(n, d), float32."""
        return self.embed_images(torch.from_numpy(self.pixels(pictures)).to(self.device)).float().cpu().numpy()

    @torch.inference_mode()
    def encode_texts(self, captions: Sequence[str]) -> NDArray[np.float32]:
        """(n, d), float32."""
        return self.embed_texts(captions).float().cpu().numpy()


def _pooled(features: Any) -> Tensor:
    """Projected features; newer versions of transformers wrap them."""
    return features if isinstance(features, Tensor) else features.pooler_output
