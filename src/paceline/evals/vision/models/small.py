"""A small CLIP of our own, random, whose tokenizer knows the words of captions: for proofs that run on a laptop."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, PreTrainedTokenizerFast

from paceline.evals.vision.drawing import KINDS
from paceline.evals.vision.models.towers import Towers
from paceline.evals.vision.words import TEMPLATES, VALUES

SPECIAL = ("<pad>", "<unk>", "<start>", "<end>")


def small(
    more: Iterable[str] = (), *, seed: int = 0, size: int = 64, patch: int = 8, width: int = 96, layers: int = 3
) -> Towers:
    """Random weights: a picture of `size` x `size` in patches, two layers of text, about a million parameters.

    more: captions whose words it should know, beside those the data engine uses."""
    torch.manual_seed(seed)
    tokenizer = word_tokenizer(more)
    heads = max(1, width // 32)
    shared = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": heads}
    config = CLIPConfig(
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
    processor = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    return Towers(CLIPModel(config), tokenizer, processor, "small")


def word_tokenizer(more: Iterable[str]) -> PreTrainedTokenizerFast:
    """A word is a token."""
    said = [*more, *(name for kind in KINDS.values() for name in (kind.name, kind.plural, kind.article))]
    said += [text for texts in (*TEMPLATES.values(), *VALUES.values()) for text in texts] + ["and"]
    words = sorted({word for text in said for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate((*SPECIAL, *words))}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 2), ("<end>", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<start>", eos_token="<end>",
        model_max_length=32,
    )  # fmt: skip
