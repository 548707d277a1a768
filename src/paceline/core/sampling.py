"""The warping of logits.

Logits are warped here and nowhere else. The target's logits and a drafter's go through the same function, so that both
take the same token from the same noise if they agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.core.params import SamplingParams as SamplingParams
from paceline.core.params import TokenLogprob as TokenLogprob
from paceline.core.tree import IntArray
from paceline.errors import PacelineError
from paceline.kernels.rows import best_or_none, keep_best, log_total, softmax, top_tokens
from paceline.moved import aliases


@torch.inference_mode()
def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens [n] by logits [n, V], with the `count` best tokens at each place."""
    if is_compiled(logits):
        whole = log_total(logits).unsqueeze(-1)
    else:
        logits, whole = logits.log_softmax(-1), torch.zeros((), device=logits.device)
    own = (logits.gather(-1, torch.tensor(tokens, device=logits.device).unsqueeze(-1)) - whole)[:, 0].tolist()
    values, ids = top_tokens(logits, min(count, logits.shape[-1])) if count else (logits[:, :0],) * 2
    values = values - whole
    tops = [tuple(zip(*best, strict=True)) for best in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(*entry) for entry in zip(tokens, own, tops, strict=True)]


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether reading `tensor` waits for a device."""
    return tensor.device.type != "cpu"


def best_of_rows(logits: torch.Tensor) -> list[int | None]:
    """The best token of each row of logits [R, V], of equals the lowest id; None for a row with NaN or infinity, or
    only minus infinity. On an accelerator it waits once."""
    if not on_accelerator(logits):
        return [best_or_none(logits, r) for r in range(len(logits))]
    values, indices = logits.max(-1)
    # Together, both wait only once. float64 holds all token ids exactly.
    finite, best = torch.stack([torch.isfinite(values).double(), indices.double()]).tolist()
    return [int(token) if good else None for good, token in zip(finite, best, strict=True)]


def warp(logits: torch.Tensor, params: SamplingParams, contexts: Sequence[IntArray]) -> torch.Tensor:
    """Apply a request's parameters to logits [R, V]. Returns float32 or float64 [R, V], with -inf for dropped tokens.

    contexts[r] has all tokens before the position that row r of `logits` predicts, drafted or not; it is read only if
    `params.shifts_logits`. The order is that of transformers' processors: logit bias, repetition penalty, bad words,
    temperature, top-k, top-p, min-p. `logits` are not changed.

    Raises PacelineError if logit_bias or bad_words name a token that the model lacks, or leave no token."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if params.shifts_logits:
        scores = _shift(scores.clone(), params, contexts)
    if params.is_greedy:
        return scores
    if params.temperature != 1:
        scores = scores / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[:, -1:], -torch.inf)
    if params.top_p < 1:
        scores = nucleus(scores, params.top_p)
    if params.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores


def _shift(scores: torch.Tensor, params: SamplingParams, contexts: Sequence[IntArray]) -> torch.Tensor:
    """Apply logit bias, repetition penalty and bad words in place."""
    vocab_size = scores.shape[-1]
    params.check_vocabulary(vocab_size)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        scores[:, ids] += torch.tensor(list(params.logit_bias.values())).to(scores)
    for row, context in zip(scores, contexts, strict=True):
        if params.repetition_penalty != 1:
            # A prompt may have ids that the model can read but not write, such as those of images.
            seen = torch.from_numpy(np.unique(context[context < vocab_size])).to(scores.device)
            past, penalty = row[seen], params.repetition_penalty
            row[seen] = torch.where(past > 0, past / penalty, past * penalty)
        if params.looks_back:
            _look_back(row, params, context[params.beginning :])
        if params.grammar is not None:
            allowed = params.grammar.allowed(context[params.beginning :].tolist(), vocab_size)
            row[~allowed.to(scores.device)] = -torch.inf
        for word in params.bad_words:
            begun = len(word) - 1
            if begun <= len(context) and list(context[len(context) - begun :]) == list(word[:-1]):
                row[word[-1]] = -torch.inf
    if bool((scores.amax(-1) == -torch.inf).any()):
        raise PacelineError("logit_bias, bad_words and grammar leave no token that may come next; ban fewer.")
    return scores


def _look_back(row: torch.Tensor, params: SamplingParams, answer: IntArray) -> None:
    """Apply OpenAI's penalties on the answer's tokens to row [V], and forbid its end before min_tokens; in place."""
    tokens, counts = np.unique(answer[answer < len(row)], return_counts=True)
    seen = torch.from_numpy(tokens).to(row.device)
    times = torch.from_numpy(counts).to(row)
    row[seen] -= params.presence_penalty + params.frequency_penalty * times
    ends = sorted(end for end in params.ends if end < len(row))  # Requests may name other ids, which never come.
    if len(answer) < params.min_tokens and ends:
        row[torch.tensor(ends, device=row.device)] = -torch.inf


def nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Set `scores` [R, V] to -inf outside the smallest set of tokens with probability `top_p` (Holtzman et al. 2020,
    section 3.1). Of equal scores at the border, lower ids are dropped first, in any batch."""
    ranked, order = scores.sort(stable=True)
    drop = ranked.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[:, -1] = False
    return scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)


def probabilities(logits: torch.Tensor, params: SamplingParams, contexts: Sequence[IntArray]) -> torch.Tensor:
    """The distribution from which a request draws, [R, V]: softmax of `warp`, or one-hot for a greedy request."""
    if params.is_greedy:
        scores = warp(logits, params, contexts)
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    if is_compiled(logits):
        if params.shifts_logits:
            logits = _shift(logits.to(torch.float32, copy=True), params, contexts)
        return distributions(logits, params)
    return warp(logits, params, contexts).softmax(-1)


def is_compiled(logits: torch.Tensor) -> bool:
    """Whether the compiled functions of `paceline.kernels.rows` take these logits."""
    return logits.dtype in (torch.float32, torch.bfloat16) and not on_accelerator(logits)


def distributions(logits: torch.Tensor, params: SamplingParams, row: int | None = None) -> torch.Tensor:
    """Fast path of `probabilities` for logits [n, V] for which `is_compiled`. Returns float32 [n, V], or [V] for `row`
    alone.

    It does not shift logits, is equal up to float32's rounding, and several times as fast."""
    probs = softmax(logits, params.temperature, row)
    if params.top_k or params.top_p < 1 or params.min_p:
        for of_row in probs if row is None else [probs]:
            keep_best(of_row, params.top_k, params.top_p, params.min_p)
    return probs


aliases(__name__)
