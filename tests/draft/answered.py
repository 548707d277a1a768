"""A random target with prompts and what transformers writes after them, and draft models that are nearly the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.target.decoder import Decoder
from tests import models, native
from tests.plain import generate, texts, up_to
from tests.preempting import preempt_often

NEW = 16


def weakened(model, share, first=0, sureness=1.0):
    """`model` with layers from `first` on that add only a share of what they would, and with larger logits."""
    with torch.no_grad():
        model.lm_head.weight *= sureness
        for layer in model.model.layers[first:]:
            for part in last_steps(layer):
                part.weight *= share
    return model


def last_steps(layer):
    """What scales all that a layer adds: its last products, or Gemma 4's norms after them."""
    norms = ("post_attention_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm")
    if hasattr(layer, "layer_scalar"):
        return [getattr(layer, name) for name in norms if hasattr(layer, name)]
    return [layer.self_attn.o_proj, layer.mlp.down_proj]


@dataclass
class Answered:
    """A target, a folder for its drafters, prompts, and transformers' texts by prompt, some of which end early."""

    model: PreTrainedModel
    target: Decoder
    folder: Path
    prompts: list[list[int]]
    answers: dict[tuple[int, ...], list[int]]

    @classmethod
    def of(cls, model, folder):
        model.generation_config.eos_token_id = None
        rng = np.random.default_rng(1)
        prompts = [rng.integers(4, models.VOCAB_SIZE, n).tolist() for n in (23, 5, 34, 1, 60, 8)]
        free = [generate(model, prompt, NEW, ()) for prompt in prompts]
        late = [token for prompt, text in zip(prompts, free, strict=True) for token in text[len(prompt) + 5 :]]
        eos = int(np.bincount(late).argmax())
        answers = {tuple(p): up_to(text, eos, len(p)) for p, text in zip(prompts, free, strict=True)}
        assert len({len(text) - len(prompt) for prompt, text in answers.items()}) > 1
        return cls(model, native.of(model, eos=(eos,)), folder, prompts, answers)

    def check(self, drafter, batch=8, chunk=512):
        """Answers to all prompts, which must be transformers' own; in batches of 3 rows give way again and again."""
        engine = Engine(self.target, drafter, max_batch=batch, prefill_chunk=chunk)
        if batch == 3:
            preempt_often(engine)
        out = engine.generate(self.prompts, SamplingParams(max_tokens=NEW))
        assert texts(self.prompts, out) == list(self.answers.values())
        return out


def target_and_close_draft(at, noise):
    """Folders of a tiny target, and of a draft model `close` that is the target with some noise."""
    made = {"target": models.make("qwen3", at / "target", **native.TINY), "close": at / "close"}
    disturbed(models.model("qwen3", **native.TINY), noise).save_pretrained(made["close"])
    models.tokenizer().save_pretrained(made["close"])
    return made


def disturbed(model, noise):
    """`model` with noise of that size on all weights."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    return model
