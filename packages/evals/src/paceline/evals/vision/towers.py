"""Models that score pictures and captions: dual encoders of transformers (CLIP, SigLIP, BLIP), and a small CLIP."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import ModelError
from paceline.evals.vision.captions import TEMPLATES, VALUES
from paceline.evals.vision.drawing import KINDS
from paceline.target.load import device_named

Floats = NDArray[np.float32]

KNOWN = ("clip", "siglip", "siglip2", "blip", "chinese_clip", "align", "flava", "metaclip_2")
SPECIAL = ("<pad>", "<unk>", "<start>", "<end>")


class Towers:
    def __init__(self, model: Any, tokenizer: Any, processor: Any):
        self.model, self.tokenizer, self.processor = model, tokenizer, processor
        self.model.eval()

    @classmethod
    def load(cls, path: str, device: str = "cpu", dtype: str = "float32") -> Self:
        """A folder, or a name on the hub. Raises ModelError if it is no dual encoder."""
        transformers.logging.set_verbosity_error()
        where = device_named(device)
        try:
            config = transformers.AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read as a model: {str(error).splitlines()[0]}") from None
        if config.model_type not in KNOWN:
            raise ModelError(f"{path} is a {config.model_type}; dual encoders known here: {', '.join(KNOWN)}")
        build = transformers.BlipForImageTextRetrieval if config.model_type == "blip" else transformers.AutoModel
        try:
            model: Any = build.from_pretrained(path, dtype=getattr(torch, dtype))
            processor = transformers.AutoImageProcessor.from_pretrained(path, backend="pil")
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from None
        return cls(model.to(where), tokenizer, processor)

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
        """What decides the scores in addition to the weights: activation and preprocessing."""
        settings = self.processor.to_dict()
        decisive = ("size", "crop_size", "resample", "do_center_crop", "image_mean", "image_std")
        vision = getattr(self.model.config, "vision_config", None)
        return {
            "model_type": self.model.config.model_type,
            "activation": getattr(vision, "hidden_act", None),
            "preprocessing": {key: settings.get(key) for key in decisive},
        }

    def pixels(self, pictures: Sequence[Image.Image]) -> NDArray[np.uint8]:
        """(n, 3, height, width): resized and cropped, not yet normalised, so that many fit into memory."""
        sized = self.processor(list(pictures), do_rescale=False, do_normalize=False, return_tensors="np")
        return np.asarray(sized["pixel_values"]).clip(0, 255).round().astype(np.uint8)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Bytes of `pixels` as the model's input."""
        both = (self.processor.image_mean, self.processor.image_std)
        mean, std = (torch.tensor(values, device=pixels.device).view(1, 3, 1, 1) for values in both)
        return ((pixels.float() / 255 - mean) / std).to(self.model.dtype)

    def embed_images(self, pixels: Tensor) -> Tensor:
        """(n, d) of unit length, of bytes of `pixels`; with gradients if they are on."""
        inputs = self.normalise(pixels)
        if self.blip:
            states = self.model.vision_model(pixel_values=inputs).last_hidden_state[:, 0]
            return F.normalize(self.model.vision_proj(states), dim=-1)
        return F.normalize(self.model.get_image_features(pixel_values=inputs).pooler_output, dim=-1)

    def embed_texts(self, captions: Sequence[str]) -> Tensor:
        """(n, d) of unit length; captions longer than the model's input are cut."""
        tokens = self.tokens(captions)
        if self.blip:
            states = self.model.text_encoder(**tokens).last_hidden_state[:, 0]
            return F.normalize(self.model.text_proj(states), dim=-1)
        return F.normalize(self.model.get_text_features(**tokens).pooler_output, dim=-1)

    def tokens(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Captions as inputs of the model."""
        config = self.model.config
        longest = getattr(getattr(config, "text_config", config), "max_position_embeddings", 77)
        # SigLIP was trained on captions that are padded to one length, and without a mask.
        siglip = config.model_type.startswith("siglip")
        given = self.tokenizer(
            list(captions), padding="max_length" if siglip else True, truncation=True, max_length=min(longest, 512),
            return_tensors="pt",
        )  # fmt: skip
        inputs = ("input_ids",) if siglip else ("input_ids", "attention_mask")
        return {key: given[key].to(self.device) for key in inputs if key in given}

    @torch.inference_mode()
    def encode_images(self, pictures: Sequence[Image.Image]) -> Floats:
        return self.embed_images(torch.from_numpy(self.pixels(pictures)).to(self.device)).float().cpu().numpy()

    @torch.inference_mode()
    def encode_texts(self, captions: Sequence[str]) -> Floats:
        return self.embed_texts(captions).float().cpu().numpy()


def small(
    captions: Iterable[str] = (), *, seed: int = 0, size: int = 64, patch: int = 8, width: int = 96, layers: int = 3
) -> Towers:
    """A CLIP with random weights that trains on a laptop: pictures of `size` x `size` in patches, two layers of text.

    captions: texts whose words its tokenizer knows, as well as those of the data engine."""
    torch.manual_seed(seed)
    tokenizer = word_tokenizer(captions)
    heads = max(1, width // 32)
    shared = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": heads}
    config = transformers.CLIPConfig(
        text_config={
            **shared, "num_hidden_layers": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 32,
            "pad_token_id": 0, "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
            "hidden_act": "gelu",
        },
        vision_config={
            **shared, "num_hidden_layers": layers, "image_size": size, "patch_size": patch, "hidden_act": "gelu",
        },
        projection_dim=128,
    )  # fmt: skip
    square = {"height": size, "width": size}
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=square)
    return Towers(transformers.CLIPModel(config), tokenizer, processor)


def word_tokenizer(captions: Iterable[str]) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of whole words: those of `captions` and of the data engine."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    texts = [*captions, *(name for kind in KINDS.values() for name in (kind.name, kind.plural, kind.article)), "and"]
    texts += [text for listed in (*TEMPLATES.values(), *VALUES.values()) for text in listed]
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate((*SPECIAL, *words))}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 2), ("<end>", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<start>", eos_token="<end>",
        model_max_length=32,
    )  # fmt: skip
