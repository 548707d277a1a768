"""Log-probabilities of a prompt's own tokens, for `echo` with `logprobs`: how likelihood tasks ask a model."""

from __future__ import annotations

import torch

from paceline.kernels.topk import top_tokens
from paceline.round import Segment
from paceline.sampling import TokenLogprob
from paceline.target.base import Target
from paceline.tree import IntArray

CHUNK = 512
"""Tokens of one forward."""


@torch.inference_mode()
def prompt_logprobs(target: Target, tokens: IntArray, top: int) -> list[TokenLogprob | None]:
    """Of every token of a prompt, given those before it; None for the first. top: most probable alternatives."""
    scored: list[TokenLogprob | None] = [None]
    slot = target.add_row(len(tokens))
    try:
        for begin in range(0, len(tokens) - 1, CHUNK):
            chunk = tokens[begin : min(begin + CHUNK, len(tokens) - 1)]
            segment = Segment.chunk(slot, chunk, last=False)
            segment.num_logits = len(chunk)
            logits = target.verify([segment]).logits.float()
            logs = logits - logits.logsumexp(-1, keepdim=True)
            next_tokens = torch.from_numpy(tokens[begin + 1 : begin + 1 + len(chunk)]).to(logs.device)
            own = logs.gather(-1, next_tokens.unsqueeze(-1)).squeeze(-1).tolist()
            best = top_tokens(logs, min(top, logs.shape[-1])) if top else None
            for i, (token, logprob) in enumerate(zip(next_tokens.tolist(), own, strict=True)):
                others = () if best is None else tuple(zip(best[1][i].tolist(), best[0][i].tolist(), strict=True))
                scored.append(TokenLogprob(token, logprob, others))
            target.commit(slot, range(len(chunk)))
    finally:
        target.drop_row(slot)
    return scored
