"""Log-probabilities of a prompt's own tokens, from the forwards that run the prompt anyway."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.engine.logits import top_tokens
from paceline.engine.round import Round, Verdict
from paceline.engine.sampling import TokenLogprob


def score_prompts(plan: Round, verdict: Verdict) -> Verdict:
    """Give rows the log-probabilities of their prompts; the verdict on what decides new tokens alone."""
    deciding = [slice(*verdict.logits_at[s : s + 2]) for s in range(len(plan))]
    for i, (row, segment) in enumerate(zip(plan.rows, plan.segments, strict=True)):
        if row.count_unscored(len(segment.tokens)):
            end = row.cached + len(segment.tokens)
            own = row.tokens[end - segment.num_logits + 1 : min(end + 1, row.prompt_length)].tolist()
            row.prompt_logprobs += logprobs_of(verdict.of(i)[: len(own)], own, row.params.prompt_logprobs or 0)
            last = int(not row.num_new and end == row.prompt_length)
            deciding[i] = slice(deciding[i].stop - last, deciding[i].stop)
    return verdict.select(deciding)


@torch.inference_mode()
def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """The log-probabilities of tokens [n], whose places have the logits [n, V]. top: alternatives to report."""
    logs = logits.float() - logits.float().logsumexp(-1, keepdim=True)
    own = logs.gather(-1, torch.tensor(tokens, device=logs.device).unsqueeze(-1)).squeeze(-1).tolist()
    alternatives: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if top:
        values, ids = top_tokens(logs, min(top, logs.shape[-1]))
        alternatives = [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(*one) for one in zip(tokens, own, alternatives, strict=True)]
