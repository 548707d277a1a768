"""What the engine must write: plain decoding, written out here, and transformers' own.

`decode` runs one transformers forward over the whole text for every token, with no cache and no engine. It shares with
the engine only the definition of the distribution (`warp`) and of a row's noise (`Noise`), which have tests of their
own."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from paceline.core.noise import Noise
from paceline.core.sampling import probabilities


@dataclass
class Answer:
    tokens: list[int]
    text: str
    finish_reason: str


@torch.no_grad()
def decode(model, prompt, params, *, eos=(), max_context=None, tokenizer=None):
    """The answer to `prompt`, token by token."""
    room = max_context or model.config.max_position_embeddings
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    noise = Noise(params.seed)
    tokens = []
    reason = ""
    while not reason:
        text = [*prompt, *tokens]
        probs = probabilities(_after(model, text), params, [np.array(text)])[0]
        tokens.append(int(probs.argmax()) if params.is_greedy else noise.choose(probs, len(tokens)))
        shown = tokens[:-1] if tokens[-1] in ends else tokens
        written = tokenizer.decode(shown) if tokenizer else ""
        cuts = [written.find(stop) for stop in params.stop if stop in written]
        if tokens[-1] in ends or cuts:
            reason = "stop"
        elif len(tokens) == params.max_tokens:
            reason = "length"
        elif len(prompt) + len(tokens) == room:
            reason = "context"
    return Answer(tokens, written[: min(cuts)] if cuts else written, reason)


_known = WeakKeyDictionary()


def _after(model, text):
    """Logits [1, V] of one forward over `text`; many tests ask the same model for the same texts."""
    weights = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]
    if model not in _known or _known[model][0] != weights:
        _known[model] = weights, {}
    seen, key = _known[model][1], tuple(text)
    if key not in seen:
        seen[key] = model(torch.tensor([key], device=model.device), use_cache=False).logits[:, -1]
    return seen[key].clone()


@torch.inference_mode()
def generate(model, prompt, new, eos):
    """Greedy text, prompt included, by transformers."""
    ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new, eos_token_id=list(eos) or None, pad_token_id=0
    )
    return out[0].tolist()


def up_to(text, end, start):
    """`text` up to and with the first `end` at or behind `start`."""
    return text[: text.index(end, start) + 1] if end in text[start:] else text


def texts(prompts, out):
    return [[*prompt, *done.tokens] for prompt, done in zip(prompts, out, strict=True)]
