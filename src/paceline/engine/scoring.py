"""Log-probabilities of a prompt's own tokens, from the forwards that run the prompt anyway."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from paceline.engine.request import Row
from paceline.engine.round import Round, Verdict
from paceline.engine.sampling import TokenLogprob
from paceline.engine.topk import top_tokens


def count_wanted(row: Row, chunk: int) -> int:
    """How many of the next `chunk` tokens of a prompt, counted from the end, need logits for `Row.prompt_logprobs`.

    A prompt that is run again after a preemption is scored from where it was."""
    if row.params.prompt_logprobs is None:
        return 0
    begin = max(row.cached, len(row.prompt_logprobs) - 1)
    return max(row.cached + chunk - begin, 0) if begin < row.prompt_length - 1 else 0


def score_prompts(plan: Round, verdict: Verdict) -> None:
    """Give rows the log-probabilities of their prompts, and cut the verdict down to what decides new tokens."""
    scored = [i for i, row in enumerate(plan.rows) if count_wanted(row, len(plan.segments[i].tokens))]
    for i in scored:
        row, segment = plan.rows[i], plan.segments[i]
        end = row.cached + len(segment.tokens)
        own = row.tokens[end - segment.num_logits + 1 : min(end + 1, row.prompt_length)].tolist()
        logits = verdict.of(i)[: len(own)]
        row.prompt_logprobs += logprobs_of(logits, own, row.params.prompt_logprobs or 0)
        segment.num_logits = int(not row.num_new and end == row.prompt_length)
    if scored:
        ends = verdict.logits_at[1:]
        kept = [at for end, s in zip(ends, plan.segments, strict=True) for at in range(end - s.num_logits, end)]
        verdict.logits = verdict.logits[kept]
        if verdict.top_k is not None:
            verdict.top_k = verdict.top_k[0][kept], verdict.top_k[1][kept]
        verdict.logits_at = list(accumulate((s.num_logits for s in plan.segments), initial=0))


@torch.inference_mode()
def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Of tokens [n] at the places whose logits are [n, V]. top: most probable alternatives."""
    logs = logits.float() - logits.float().logsumexp(-1, keepdim=True)
    own = logs.gather(-1, torch.tensor(tokens, device=logs.device).unsqueeze(-1)).squeeze(-1).tolist()
    best = top_tokens(logs, min(top, logs.shape[-1])) if top else None
    alternatives: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if best is not None:
        pairs = zip(best[1].tolist(), best[0].tolist(), strict=True)
        alternatives = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    return [TokenLogprob(*one) for one in zip(tokens, own, alternatives, strict=True)]
